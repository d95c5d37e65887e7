/// \file
/// The BIO tags a model knows, as the numbers its classifier answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "conll.h"

namespace bert_ner {

class Labels {
 public:
  Labels() = default;
  /// In the order of their ids. \throws InputError if there are none or one occurs twice.
  explicit Labels(std::vector<std::string> names);
  /// The tags of the sentences: "O" first, the others in alphabetical order.
  static Labels of(std::span<const Sentence> sentences);

  std::size_t size() const { return names_.size(); }
  const std::vector<std::string>& names() const { return names_; }
  const std::string& name(int64_t id) const { return names_.at(static_cast<std::size_t>(id)); }
  std::optional<int64_t> id(std::string_view name) const;
  /// "O, B-person, I-person, ..." for messages.
  std::string list() const;

  friend bool operator==(const Labels&, const Labels&) = default;

 private:
  std::vector<std::string> names_;
};

/// The weight of each label in the loss, by id: 1 unless `spec` says otherwise.
/// \param spec "B-person=2,O=0.5", or the name of a file with a label and a weight on each line;
///   empty for none
/// \throws InputError for an unknown label or a weight that is no finite number above 0
///   (a batch of nothing but labels of weight 0 would have no mean), naming it
std::vector<double> parse_class_weights(const std::string& spec, const Labels& labels);

}  // namespace bert_ner
