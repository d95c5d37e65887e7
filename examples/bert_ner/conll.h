#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace bert_ner {

/// Words and, one each, their BIO tags ("O", "B-TYPE", "I-TYPE").
struct Sentence {
  std::vector<std::string> words;
  std::vector<std::string> tags;  ///< empty if they are yet to be predicted
  std::size_t line = 0;           ///< where the sentence begins in its file, from 1
};

/// Sentences of a CoNLL file: a word a line, in the first column, and its tag in the last one
/// (CoNLL-2003 has more in between); columns parted by tabs (or, on a line without one, by spaces),
/// sentences parted by blank lines, which may hold white space. "-DOCSTART-" lines are passed over.
/// Throws InputError with file and line for a missing column, a tag that is not BIO, bytes that are
/// no UTF-8, and for a file without a sentence.
std::vector<Sentence> read_conll(const std::filesystem::path& path);

/// Two parts of one file.
struct Split {
  std::vector<Sentence> train, valid;
};

/// Draws round(held_out * n) sentences as the validation part; both parts keep the file's order.
/// The same seed draws the same sentences on every platform. Throws InputError unless 0 < held_out
/// < 1 and neither part is empty.
Split split_by_seed(std::vector<Sentence> sentences, double held_out, std::uint64_t seed);

}  // namespace bert_ner
