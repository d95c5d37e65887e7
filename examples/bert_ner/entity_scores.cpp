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

/// As conlleval reads tags: an entity goes on only over an I- of its own type.
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

Score with_ratios(Score score) {
  const auto ratio = [](double part, double whole) { return whole == 0 ? 0. : part / whole; };
  const auto correct = static_cast<double>(score.correct);
  score.precision = ratio(correct, static_cast<double>(score.predicted));
  score.recall = ratio(correct, static_cast<double>(score.support));
  score.f1 = ratio(2 * score.precision * score.recall, score.precision + score.recall);
  return score;
}

}  // namespace

std::map<std::string, Score> entity_scores_by_type(const TagSequences& truth,
                                                   const TagSequences& predicted) {
  if (!std::ranges::equal(truth, predicted, {}, &Tags::size, &Tags::size)) {
    throw std::invalid_argument("entity_scores: truth and prediction differ in sentences or words");
  }
  std::map<std::string, Score> scores;
  const auto wanted = entities_of(truth), found = entities_of(predicted);
  for (const auto& entity : wanted) ++scores[std::get<0>(entity)].support;
  for (const auto& entity : found) {
    auto& score = scores[std::get<0>(entity)];
    ++score.predicted;
    if (wanted.contains(entity)) ++score.correct;
  }
  for (auto& [type, score] : scores) score = with_ratios(score);
  return scores;
}

Score entity_scores(const TagSequences& truth, const TagSequences& predicted) {
  Score total;
  for (const auto& [type, score] : entity_scores_by_type(truth, predicted)) {
    total.support += score.support;
    total.predicted += score.predicted;
    total.correct += score.correct;
  }
  return with_ratios(total);
}

}  // namespace bert_ner
