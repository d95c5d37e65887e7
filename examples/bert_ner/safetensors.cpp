#include "safetensors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "text.h"

namespace bert_ner {
namespace {

constexpr int64_t kLengthBytes = 8;  // of the header, before it
constexpr std::array<std::pair<torch::ScalarType, std::string_view>, 6> kDtypes{
    {{torch::kBool, "BOOL"},
     {torch::kFloat16, "F16"},
     {torch::kBFloat16, "BF16"},
     {torch::kFloat32, "F32"},
     {torch::kFloat64, "F64"},
     {torch::kInt64, "I64"}}};

torch::ScalarType dtype_of(const nlohmann::json& entry) {
  const auto word = entry.at("dtype").get<std::string>();
  const auto found = std::ranges::find(kDtypes, word, [](const auto& one) { return one.second; });
  TORCH_CHECK(found != kDtypes.end(), "has the dtype ", word, "; convert it to F32, F16 or BF16");
  return found->first;
}

}  // namespace

std::map<std::string, torch::Tensor> read_safetensors(const std::filesystem::path& path) {
  const std::string origin = path.string();
  std::error_code ignored;
  const auto size = std::filesystem::is_regular_file(path, ignored)
                        ? static_cast<int64_t>(std::filesystem::file_size(path))
                        : 0;
  int64_t length = -1;
  torch::Tensor bytes;
  if (size > kLengthBytes) {
    bytes = torch::from_file(origin, /*shared=*/false, size, torch::kUInt8);
    std::memcpy(&length, bytes.const_data_ptr(), kLengthBytes);
  }
  if (length < 2 || length > size - kLengthBytes) {
    throw InputError(
        origin + ": is no safetensors file, or is cut off; convert a pickle with " +
        "safetensors.torch.save_file, and fetch a Git LFS pointer with `git lfs pull`");
  }
  const auto* const text = static_cast<const char*>(bytes.const_data_ptr()) + kLengthBytes;
  const auto header = parse_json({text, static_cast<std::size_t>(length)}, origin);
  const auto data = bytes.narrow(0, kLengthBytes + length, size - kLengthBytes - length);
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    try {  // narrow and view refuse what is not in the file
      const auto dtype = dtype_of(entry);
      const auto [begin, end] = entry.at("data_offsets").get<std::pair<int64_t, int64_t>>();
      auto tensor = data.slice(0, begin, end);
      TORCH_CHECK(tensor.numel() == end - begin, "ends behind the file's end");
      // Files by other writers may have a header of any length.
      if (tensor.storage_offset() % c10::elementSize(dtype) != 0) tensor = tensor.clone();
      tensors[name] = tensor.view(dtype).view(entry.at("shape").get<std::vector<int64_t>>());
    } catch (const c10::Error& error) {
      throw InputError(origin + ": \"" + name + "\" " + error.what_without_backtrace());
    } catch (const nlohmann::json::exception& error) {
      throw InputError(origin + ": \"" + name + "\" " + error.what());
    }
  }
  return tensors;
}

void write_safetensors(const std::filesystem::path& path, const torch::nn::Module& module) {
  nlohmann::ordered_json json{{"__metadata__", {{"format", "pt"}}}};
  std::vector<torch::Tensor> tensors;
  std::size_t offset = 0;
  for (const auto& parameter : module.named_parameters()) {
    const auto tensor = parameter.value().detach().cpu().contiguous();
    const auto dtype =
        std::ranges::find(kDtypes, tensor.scalar_type(), [](const auto& one) { return one.first; });
    json[parameter.key()] = {{"dtype", dtype->second},
                             {"shape", tensor.sizes().vec()},
                             {"data_offsets", {offset, offset + tensor.nbytes()}}};
    offset += tensor.nbytes();
    tensors.push_back(tensor);
  }
  std::string header = json.dump();
  header.append((kLengthBytes - header.size() % kLengthBytes) % kLengthBytes, ' ');
  const uint64_t length = header.size();
  write_file(path, [&](std::ostream& file) {
    file.write(reinterpret_cast<const char*>(&length), sizeof length) << header;
    for (const auto& tensor : tensors) {
      file.write(static_cast<const char*>(tensor.const_data_ptr()),
                 static_cast<std::streamsize>(tensor.nbytes()));
    }
  });
}

}  // namespace bert_ner
