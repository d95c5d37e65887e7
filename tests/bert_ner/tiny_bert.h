/// \file
/// What the tests of the model, its training and the command line share: a BERT of a few thousand
/// parameters and sentences that it can learn.
#pragma once

#include <torch/torch.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>

#include "bert.h"
#include "model_files.h"
#include "safetensors.h"
#include "scratch_folder.h"
#include "tensor_views.h"

namespace bert_ner::test {

inline std::filesystem::path data_folder() { return BERT_NER_TEST_DATA; }
inline std::filesystem::path tiny_bert_folder() { return data_folder() / "tiny_bert"; }

/// The tiny model with Hugging Face's weights, in evaluation mode.
inline BertForTokenClassification load_tiny_bert(
    const std::filesystem::path& folder = tiny_bert_folder()) {
  const auto files = read_model_files(folder);
  BertForTokenClassification model(bert_config_of(files),
                                   static_cast<int64_t>(labels_of(files).size()));
  load_weights(model, folder, Head::from_file);
  model->eval();
  return model;
}

/// A copy of the tiny model's folder whose files a test may spoil.
inline std::filesystem::path copy_tiny_bert(const ScratchFolder& scratch,
                                            std::string_view name = "model") {
  const auto copy = scratch / name;
  std::filesystem::copy(tiny_bert_folder(), copy, std::filesystem::copy_options::recursive);
  return copy;
}

/// `count` sentences "NAME [SURNAME] lives in PLACE ." in every combination, tagged, as a CoNLL
/// file.
inline std::filesystem::path write_tiny_corpus(const ScratchFolder& scratch, std::string_view name,
                                               int count) {
  constexpr std::array kNames = {"alice", "bob", "carol"};
  constexpr std::array kSurnames = {"", "smith", "jones"};
  constexpr std::array kVerbs = {"lives in", "works at", "visits", "met bob in"};
  constexpr std::array kPlaces = {"paris", "rome", "london", "new york"};
  std::string text;
  const auto words = [&](const std::string& phrase, const std::string& type) {
    std::istringstream stream(phrase);
    std::string tag = "B-";
    for (std::string word; stream >> word; tag = "I-") {
      text += word + "\t" + (type.empty() ? (word == "bob" ? "B-person" : "O") : tag + type) + "\n";
    }
  };
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    words(std::string(kNames[i % 3]) + " " + kSurnames[i / 3 % 3], "person");
    words(kVerbs[i / 9 % 4], "");
    words(kPlaces[(i / 2 + i / 36) % 4], "place");
    words(".", "");
    text += "\n";
  }
  return scratch.write(name, text);
}

}  // namespace bert_ner::test
