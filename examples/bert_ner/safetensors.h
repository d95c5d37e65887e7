/// \file
/// Tensors in a file of the safetensors format.
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bert_ner {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// The content of a file.
struct Safetensors {
  NamedTensors tensors;  ///< in the order of their bytes
  std::map<std::string, std::string> metadata;

  /// Undefined if there is none of that name.
  torch::Tensor find(std::string_view name) const;
};

/// Maps a file into memory (torch::from_file). Checks the header's length, its JSON, and every
/// tensor's dtype, shape and offsets, which must cover the rest of the file without hole or
/// overlap. The tensors are on the CPU, read the file when they are used, and keep it mapped.
/// \throws InputError naming the file and the tensor
Safetensors read_safetensors(const std::filesystem::path& path);

/// Writes the same bytes as Hugging Face's writer: the largest dtypes first, then names in order,
/// behind a header padded to 8 bytes. Replaces `path` as write_file does.
/// \throws c10::Error for a name twice or a dtype that the format lacks; InputError if the system
///   refuses
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

/// The format's own word: "F32", "BF16", "BOOL".
std::string_view dtype_name(torch::ScalarType dtype);

}  // namespace bert_ner
