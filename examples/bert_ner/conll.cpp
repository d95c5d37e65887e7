#include "conll.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string_view>
#include <utility>

#include "input_error.h"
#include "shuffle.h"
#include "text_lines.h"

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
  if (row.word.empty()) {
    throw InputError(where + ": has no word in its first column; write \"word<TAB>tag\"");
  }
  if (row.tag.empty()) {
    throw InputError(where + ": has no tag for \"" + std::string(row.word) +
                     "\"; write \"word<TAB>tag\", or leave the line blank between sentences");
  }
  if (!is_bio(row.tag)) {
    throw InputError(where + ": \"" + std::string(row.tag) +
                     "\" is no BIO tag; write O, B-TYPE or I-TYPE (convert other schemes first)");
  }
}

}  // namespace

std::vector<Sentence> read_conll(const std::filesystem::path& path) {
  std::vector<Sentence> sentences;
  bool inside = false;
  for_each_line(path, [&](std::string_view line, std::size_t number) {
    if (trimmed(line).empty()) {
      inside = false;
      return;
    }
    const Row row = parse_row(line);
    if (row.word == "-DOCSTART-") {
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
  if (!(held_out > 0 && held_out < 1)) {
    throw InputError("held-out share " + std::to_string(held_out) +
                     ": is not between 0 and 1; give the share to validate on, such as 0.2");
  }
  const std::size_t count = sentences.size();
  const auto valid_count =
      static_cast<std::size_t>(std::llround(held_out * static_cast<double>(count)));
  if (valid_count == 0 || valid_count == count) {
    throw InputError("held-out share " + std::to_string(held_out) + ": of " +
                     std::to_string(count) + " sentences leaves the " +
                     (valid_count == 0 ? "validation" : "training") +
                     " part empty; choose another share or give more sentences");
  }
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

}  // namespace bert_ner
