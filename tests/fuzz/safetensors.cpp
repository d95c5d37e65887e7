#include "safetensors.h"

#include <cstring>
#include <string>

#include "../support/scratch.h"
#include "targets.h"
#include "text.h"

namespace fuzz {

/// A file: what is taken is written, and read back the same.
void safetensors(std::string_view bytes) {
  static const test_support::Scratch scratch;
  const auto path = scratch.path() / "model.safetensors",
             copy = scratch.path() / "copy.safetensors";
  test_support::put_bytes(path, std::string(bytes));
  try {
    const auto file = bert_ner::read_safetensors(path);
    bert_ner::write_safetensors(copy, file.tensors, file.metadata);
    const auto again = bert_ner::read_safetensors(copy);
    require(again.metadata == file.metadata, "metadata are written as they were read");
    require(again.tensors.size() == file.tensors.size(), "every tensor is written");
    for (const auto& [name, tensor] : file.tensors) {
      const auto other = again.find(name);
      require(
          other.defined() && other.sizes() == tensor.sizes() &&
              other.scalar_type() == tensor.scalar_type() &&
              std::memcmp(other.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()) == 0,
          "a tensor is written as it was read");
    }
  } catch (const bert_ner::InputError&) {
  }
}

}  // namespace fuzz
