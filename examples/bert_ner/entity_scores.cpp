#include "entity_scores.h"

#include <compare>
#include <cstddef>
#include <stdexcept>
#include <string_view>

namespace bert_ner {
namespace {

struct Entity {
  std::string_view type;
  std::size_t first, last;
  auto operator<=>(const Entity&) const = default;
};

std::string_view type_of(std::string_view tag) { return tag == "O" ? tag : tag.substr(2); }

// As conlleval reads tags: an entity goes on only over an I- of its own type.
std::vector<Entity> entities_of(const std::vector<std::string>& tags) {
  std::vector<Entity> entities;
  bool inside = false;
  for (std::size_t i = 0; i < tags.size(); ++i) {
    const std::string_view tag = tags[i], type = type_of(tag);
    if (tag == "O") {
      inside = false;
    } else if (inside && tag.front() == 'I' && entities.back().type == type) {
      entities.back().last = i;
    } else {
      entities.push_back({type, i, i});
      inside = true;
    }
  }
  return entities;
}

void check(const TagSequences& truth, const TagSequences& predicted) {
  if (truth.size() != predicted.size()) {
    throw std::invalid_argument("entity_scores: " + std::to_string(truth.size()) +
                                " sentences in truth, " + std::to_string(predicted.size()) +
                                " in predicted");
  }
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (truth[i].size() != predicted[i].size()) {
      throw std::invalid_argument("entity_scores: sentence " + std::to_string(i) + " has " +
                                  std::to_string(truth[i].size()) + " tags in truth, " +
                                  std::to_string(predicted[i].size()) + " in predicted");
    }
  }
}

double ratio(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0. : static_cast<double>(part) / static_cast<double>(whole);
}

void set_ratios(Score& score) {
  score.precision = ratio(score.correct, score.predicted);
  score.recall = ratio(score.correct, score.support);
  const double sum = score.precision + score.recall;
  score.f1 = sum == 0 ? 0. : 2 * score.precision * score.recall / sum;
}

void count_sentence(const std::vector<Entity>& truth, const std::vector<Entity>& predicted,
                    std::map<std::string, Score>& scores) {
  for (const Entity& entity : truth) ++scores[std::string(entity.type)].support;
  for (const Entity& entity : predicted) ++scores[std::string(entity.type)].predicted;
  // Both lists are in order of their first word, and no two entities of a list share a word.
  for (std::size_t t = 0, p = 0; t < truth.size() && p < predicted.size();) {
    if (truth[t] == predicted[p]) ++scores[std::string(truth[t].type)].correct;
    (truth[t].first <= predicted[p].first ? t : p) += 1;
  }
}

}  // namespace

std::map<std::string, Score> entity_scores_by_type(const TagSequences& truth,
                                                   const TagSequences& predicted) {
  check(truth, predicted);
  std::map<std::string, Score> scores;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    count_sentence(entities_of(truth[i]), entities_of(predicted[i]), scores);
  }
  for (auto& [type, score] : scores) set_ratios(score);
  return scores;
}

Score entity_scores(const TagSequences& truth, const TagSequences& predicted) {
  Score total;
  for (const auto& [type, score] : entity_scores_by_type(truth, predicted)) {
    total.support += score.support;
    total.predicted += score.predicted;
    total.correct += score.correct;
  }
  set_ratios(total);
  return total;
}

}  // namespace bert_ner
