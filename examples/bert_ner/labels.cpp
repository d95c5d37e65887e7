#include "labels.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <utility>

#include "formatted.h"
#include "input_error.h"
#include "text_lines.h"

namespace bert_ner {
namespace {

double parse_weight(std::string_view text, const std::string& origin) {
  double weight = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), weight);
  // The loss is computed in float32: a weight that is 0 or infinite there is none.
  const auto in_loss = static_cast<float>(weight);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(in_loss) ||
      in_loss <= 0) {
    throw InputError(origin + ": the weight \"" + std::string(text) +
                     "\" is no number above 0 that float32 holds; write one such as 2.5");
  }
  return weight;
}

/// One entry, its label and weight parted by any of `separators`.
void take_weight(std::string_view entry, std::string_view separators, const std::string& origin,
                 const Labels& labels, std::vector<double>& weights) {
  const auto cut = entry.find_last_of(separators);
  if (cut == std::string_view::npos) {
    throw InputError(origin + ": \"" + std::string(entry) +
                     "\" has no weight; write a label and a number, such as B-person=2");
  }
  const std::string label(trimmed(entry.substr(0, cut), " \t="));
  const auto id = labels.id(label);
  if (!id) {
    throw InputError(origin + ": the training data has no label \"" + label + "\"; it has " +
                     labels.list());
  }
  weights[static_cast<std::size_t>(*id)] = parse_weight(trimmed(entry.substr(cut + 1)), origin);
}

}  // namespace

Labels::Labels(std::vector<std::string> names) : names_(std::move(names)) {
  if (names_.empty()) throw InputError("a token classifier needs at least one label");
  std::set<std::string_view> seen;
  for (const auto& name : names_) {
    if (!seen.insert(name).second) throw InputError("the label \"" + name + "\" occurs twice");
  }
}

Labels Labels::of(std::span<const Sentence> sentences) {
  std::set<std::string> others;
  for (const auto& sentence : sentences) others.insert(sentence.tags.begin(), sentence.tags.end());
  others.erase("O");
  std::vector<std::string> names{"O"};
  names.insert(names.end(), others.begin(), others.end());
  return Labels(std::move(names));
}

std::optional<int64_t> Labels::id(std::string_view name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) return std::nullopt;
  return found - names_.begin();
}

std::string Labels::list() const { return joined(names_); }

std::vector<double> parse_class_weights(const std::string& spec, const Labels& labels) {
  std::vector<double> weights(labels.size(), 1.0);
  if (spec.empty()) return weights;
  if (spec.find('=') == std::string::npos) {
    for_each_line(spec, [&](std::string_view line, std::size_t number) {
      if (trimmed(line).empty()) return;
      take_weight(trimmed(line), " \t=", place(spec, number), labels, weights);
    });
    return weights;
  }
  for (std::size_t begin = 0; begin <= spec.size();) {
    const auto end = std::min(spec.find(',', begin), spec.size());
    take_weight(std::string_view(spec).substr(begin, end - begin), "=", "--class-weights", labels,
                weights);
    begin = end + 1;
  }
  return weights;
}

}  // namespace bert_ner
