#include <mezzo/checkpoint/safetensors.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "../support/temp_dir.h"
#include "targets.h"

namespace fuzz {
namespace {

std::string with_length(std::string_view header, std::string_view data) {
  const std::uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  return file.append(header).append(data);
}

std::string read_bytes(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

/// Every byte of the tensors can be read, and saving and loading them again changes none.
void check_tensors(const mezzo::TensorDict& tensors, const std::filesystem::path& path) {
  mezzo::save_safetensors(tensors, path);
  const auto loaded = mezzo::load_safetensors(path);
  require(loaded.size() == tensors.size(), "all tensors are saved");
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor& again = loaded.at(name);
    require(again.scalar_type() == tensor.scalar_type() && again.sizes() == tensor.sizes() &&
                read_bytes(again) == read_bytes(tensor),
            "a saved tensor loads again");
  }
}

}  // namespace

/// Loads a file: bytes, a header with data, an edited valid file, or an index. A file that does not
/// load into a module changes nothing.
void safetensors(std::string_view bytes) {
  static const test_support::TempDir temp_dir;
  static const auto path = temp_dir / "x.safetensors", index = temp_dir / "x.json";
  static torch::nn::Linear model(3, 2);
  static const std::string whole = [] {
    mezzo::save_safetensors(model, path);
    return test_support::read_file(path);
  }();
  const unsigned char mode = take_byte(bytes);
  const std::size_t data_size = mode % 4 == 1 ? take_byte(bytes) : 0;
  test_support::write_file(path, mode % 4 == 0   ? std::string(bytes)
                                 : mode % 4 == 1 ? with_length(bytes, std::string(data_size, '\1'))
                                 : mode % 4 == 2 ? apply_edits(whole, bytes)
                                                 : whole);
  test_support::write_file(index, std::string(bytes));
  const std::string before = read_bytes(model->weight) + read_bytes(model->bias);
  try {
    const auto tensors = mezzo::load_safetensors(mode % 4 == 3 ? index : path);
    check_tensors(tensors, temp_dir / "again.safetensors");
    mezzo::load_safetensors(model, tensors, {.strict = mode / 4 % 2 == 1});
  } catch (const c10::Error&) {
    require(before == read_bytes(model->weight) + read_bytes(model->bias),
            "a file that does not load changes nothing");
  }
}

}  // namespace fuzz
