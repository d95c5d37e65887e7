#include "entity_scores.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string_view>
#include <tuple>

namespace bert_ner {
namespace {

using Tags = TagSequences::value_type;

/// Type, sentence, first word, last word.
using Entities = std::set<std::tuple<std::string, std::size_t, std::size_t, std::size_t>>;

/// Reads tags as conlleval does: only an I- of the same type continues an entity.
Entities entities_of(const TagSequences& sentences) {
  Entities entities;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    const auto& tags = sentences[i];
    for (std::size_t first = 0; first < tags.size();) {
      std::size_t next = first + 1;
      if (tags[first] != "O") {
        const auto type = tags[first].substr(2);
        while (next < tags.size() && tags[next] == "I-" + type) ++next;
        entities.emplace(type, i, first, next - 1);
      }
      first = next;
    }
  }
  return entities;
}

}  // namespace

Score entity_scores(const TagSequences& truth, const TagSequences& predicted) {
  if (!std::ranges::equal(truth, predicted, {}, &Tags::size, &Tags::size)) {
    throw std::invalid_argument("entity_scores: truth and prediction differ in sentences or words");
  }
  const auto wanted = entities_of(truth), found = entities_of(predicted);
  Score score{.support = wanted.size(), .predicted = found.size()};
  for (const auto& entity : found) score.correct += wanted.count(entity);
  const auto ratio = [](double part, double whole) { return whole == 0 ? 0. : part / whole; };
  const auto correct = static_cast<double>(score.correct);
  score.precision = ratio(correct, static_cast<double>(score.predicted));
  score.recall = ratio(correct, static_cast<double>(score.support));
  score.f1 = ratio(2 * score.precision * score.recall, score.precision + score.recall);
  return score;
}

}  // namespace bert_ner
