#include "safetensors.h"

#include <map>
#include <string>

#include "../support/scratch.h"
#include "input_error.h"
#include "targets.h"

namespace fuzz {

/// A file: what is taken is written, and read back the same.
void safetensors(std::string_view bytes) {
  static const test_support::Scratch scratch;
  const auto path = scratch.path() / "model.safetensors",
             copy = scratch.path() / "copy.safetensors";
  test_support::put_bytes(path, std::string(bytes));
  try {
    const bert_ner::SafetensorsFile file(path);
    for (const auto& view : file.tensors()) {
      require(file.find(view.name) == &view, "a tensor is found by its name");
    }
    try {
      static_cast<void>(bert_ner::write_safetensors(copy, file.tensors(), file.metadata()));
    } catch (const std::invalid_argument&) {
      require(false, "what was read can be written");
    }
    const bert_ner::SafetensorsFile again(copy);
    require(again.metadata() == file.metadata(), "metadata are written as they were read");
    require(again.tensors().size() == file.tensors().size(), "every tensor is written");
    for (const auto& view : file.tensors()) {
      const auto* const other = again.find(view.name);
      require(other != nullptr && other->shape == view.shape && other->dtype == view.dtype &&
                  std::equal(view.bytes.begin(), view.bytes.end(), other->bytes.begin(),
                             other->bytes.end()),
              "a tensor is written as it was read");
    }
  } catch (const bert_ner::InputError&) {
  }
}

}  // namespace fuzz
