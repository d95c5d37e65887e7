/// \file
/// What the tests of the model, its training and the command line share: a BERT of a few thousand
/// parameters.
#pragma once

#include <torch/torch.h>

#include <filesystem>

#include "bert.h"
#include "model_files.h"
#include "safetensors.h"
#include "tiny_corpus.h"

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

}  // namespace bert_ner::test
