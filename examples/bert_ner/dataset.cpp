#include "dataset.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "text.h"

namespace bert_ner {
namespace {

struct Row {
  std::string_view word = {}, tag = {};  // empty where there is none
};

Row parse_row(std::string_view line) {
  const char separator = line.find('\t') == std::string_view::npos ? ' ' : '\t';
  const std::string_view columns = separator == ' ' ? trimmed(line) : line;
  const std::size_t first = columns.find(separator), last = columns.rfind(separator);
  if (first == std::string_view::npos) return {.word = trimmed(columns)};
  return {.word = trimmed(columns.substr(0, first)), .tag = trimmed(columns.substr(last + 1))};
}

bool is_bio(std::string_view tag) {
  return tag == "O" || (tag.size() > 2 && (tag.starts_with("B-") || tag.starts_with("I-")));
}

void check(const Row& row, const std::string& where) {
  if (row.word.empty() || row.tag.empty()) {
    const auto what = row.word.empty() ? "word" : "tag for \"" + std::string(row.word) + '"';
    throw InputError(where + ": has no " + what +
                     "; write \"word<TAB>tag\", or leave the line blank between sentences");
  }
  if (!is_bio(row.tag)) {
    throw InputError(
        where + ": \"" + std::string(row.tag) +
        "\" is not a BIO tag; write O, B-TYPE or I-TYPE (convert other schemes first)");
  }
}

}  // namespace

std::vector<Sentence> read_conll(const std::filesystem::path& path) {
  std::vector<Sentence> sentences;
  bool inside = false;
  for_each_line(path, [&](std::string_view line, std::size_t number) {
    const Row row = parse_row(line);
    if (trimmed(line).empty() || row.word == "-DOCSTART-") {
      inside = false;
      return;
    }
    check(row, place(path, number));
    if (!inside) sentences.push_back({.words = {}, .tags = {}, .line = number});
    inside = true;
    sentences.back().words.emplace_back(row.word);
    sentences.back().tags.emplace_back(row.tag);
  });
  if (sentences.empty()) {
    throw InputError(path.string() + ": holds no sentence; give a file of \"word<TAB>tag\" lines");
  }
  return sentences;
}

Split split_by_seed(std::vector<Sentence> sentences, double held_out, std::uint64_t seed) {
  const std::size_t count = sentences.size();
  const double wanted = std::round(held_out * static_cast<double>(count));
  if (!(wanted >= 1 && wanted < static_cast<double>(count))) {
    throw InputError("--held-out " + formatted("%g", held_out) + " of " + std::to_string(count) +
                     " sentences leaves the training or the validation part empty; choose another "
                     "share, such as 0.2, or give more sentences");
  }
  const auto valid_count = static_cast<std::size_t>(wanted);
  std::mt19937_64 generator(seed);
  const auto order = shuffled_indices(count, generator);
  std::vector<bool> is_valid(count, false);
  for (std::size_t i = 0; i < valid_count; ++i) is_valid[order[i]] = true;
  Split split;
  for (std::size_t i = 0; i < count; ++i) {
    (is_valid[i] ? split.valid : split.train).push_back(std::move(sentences[i]));
  }
  return split;
}

std::vector<std::size_t> shuffled_indices(std::size_t count, std::mt19937_64& generator) {
  std::vector<std::size_t> indices(count);
  std::iota(indices.begin(), indices.end(), std::size_t{0});
  for (std::size_t last = count; last > 1; --last) {
    // Uniform: draws that fall into the incomplete last multiple of `last` are drawn again.
    const auto surplus = (std::mt19937_64::max() % last + 1) % last;
    auto drawn = generator();
    while (drawn > std::mt19937_64::max() - surplus) drawn = generator();
    std::swap(indices[last - 1], indices[drawn % last]);
  }
  return indices;
}

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

std::string Dataset::text() const {
  std::string text;
  for (const auto* part : {&train, &valid}) {
    for (const auto& sentence : *part) {
      for (const auto& word : sentence.words) text += word + '\t';
      for (const auto& tag : sentence.tags) text += tag + '\t';
      text += '\n';
    }
    text += '\n';
  }
  return text;
}

Dataset load_dataset(const DataOptions& options, uint64_t seed) {
  auto sentences = read_conll(options.data.empty() ? options.train : options.data);
  Dataset dataset;
  if (options.data.empty()) {
    dataset.train = std::move(sentences);
    dataset.valid = read_conll(options.valid);
  } else {
    auto split = split_by_seed(std::move(sentences), options.held_out, seed);
    dataset.train = std::move(split.train);
    dataset.valid = std::move(split.valid);
  }
  sentences = dataset.train;
  sentences.insert(sentences.end(), dataset.valid.begin(), dataset.valid.end());
  dataset.labels = Labels::of(sentences);
  return dataset;
}

}  // namespace bert_ner
