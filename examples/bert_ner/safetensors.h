/// \file
/// Tensors in a file of the safetensors format.
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <string>

namespace bert_ner {

/// Maps a file into memory (torch::from_file). The tensors are on the CPU, read the file when they
/// are used, and keep it mapped. \throws InputError naming the file and the tensor that is not
/// within it
std::map<std::string, torch::Tensor> read_safetensors(const std::filesystem::path& path);

/// Writes the parameters of `module` by name. Replaces `path` as write_file does.
/// \throws InputError if the system refuses
void write_safetensors(const std::filesystem::path& path, const torch::nn::Module& module);

}  // namespace bert_ner
