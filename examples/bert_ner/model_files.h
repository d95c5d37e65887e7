/// \file
/// A model folder in Hugging Face's form (config.json, vocab.txt, model.safetensors and the
/// tokenizer's configuration): read, checked, and written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bert.h"
#include "dataset.h"
#include "wordpiece.h"

namespace bert_ner {

/// The small files of a model folder, kept in memory so that a checkpoint can carry them on.
struct ModelFiles {
  std::filesystem::path folder;              ///< where they came from, for messages
  nlohmann::json config;                     ///< config.json
  std::map<std::string, std::string> texts;  ///< by name: vocab.txt and the tokenizer's own files
};

/// \throws InputError naming the file that is missing or cannot be read.
ModelFiles read_model_files(const std::filesystem::path& folder);

/// The fields that shape the model. \throws InputError naming the field and what it may be.
BertConfig bert_config_of(const ModelFiles& files);

/// The tokenizer. \throws InputError if its vocabulary is larger than the model's.
WordPiece load_tokenizer(const ModelFiles& files, const BertConfig& config);

/// The labels (`id2label`) of a folder that this example, or Hugging Face, saved.
/// \throws InputError if the folder holds no token classifier.
Labels labels_of(const ModelFiles& files);

/// Whether the classifier's weights come from the file or keep their fresh start.
enum class Head { fresh, from_file };

/// Compares the sizes in config.json with `folder/model.safetensors`, before memory is taken for a
/// model of them. \throws InputError naming the tensor that is missing or misshapen
void check_sizes(const BertConfig& config, const std::filesystem::path& folder);

/// Fills `model` from `folder/model.safetensors`. Names may carry the prefix `bert.` or not and may
/// end in the older `gamma` and `beta`; all floating-point dtypes are converted to float32.
/// \returns the names of the tensors of other heads (pooler, language model), which are left alone.
/// \throws InputError naming the tensors that are missing, unknown to the encoder, or misshapen.
std::vector<std::string> load_weights(BertForTokenClassification& model,
                                      const std::filesystem::path& folder, Head head);

/// Configuration and tokenizer as one text, the same for a folder that has its labels or not.
std::string text_of(const ModelFiles& files, const Labels& labels);

/// Writes a folder that load_weights, and Hugging Face's own `from_pretrained`, can read.
/// `folder` must exist. Each file is written aside, flushed to the disk and renamed into its place.
void write_model_folder(const std::filesystem::path& folder, const ModelFiles& files,
                        const BertForTokenClassification& model, const Labels& labels);

}  // namespace bert_ner
