/// \file
/// Reads, checks and writes a model folder in Hugging Face's form: config.json, vocab.txt,
/// model.safetensors and the tokenizer's configuration.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "bert.h"
#include "dataset.h"
#include "wordpiece.h"

namespace bert_ner {

/// The small files of a model folder, in memory, for the folders that --save writes.
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

/// Fills `model` from `folder/model.safetensors`. Names may carry the prefix `bert.` or not and may
/// end in the older `gamma` and `beta`; all floating-point dtypes are converted to float32. Tensors
/// of other heads (pooler, language model) are left out.
/// \throws InputError naming a tensor that is missing, unknown to the encoder, or misshapen.
void load_weights(BertForTokenClassification& model, const std::filesystem::path& folder,
                  Head head);

/// Configuration, with these labels, and tokenizer as one text.
std::string text_of(const ModelFiles& files, const Labels& labels);

/// Writes a folder that load_weights and Hugging Face's `from_pretrained` can read. `folder` must
/// exist. Replaces each file atomically.
void write_model_folder(const std::filesystem::path& folder, const ModelFiles& files,
                        const BertForTokenClassification& model, const Labels& labels);

}  // namespace bert_ner
