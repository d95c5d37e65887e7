#include "safetensors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "text.h"

namespace bert_ner {
namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kMetadataKey = "__metadata__";
constexpr const char* kAgain = "; fetch the file again or write it anew";

/// From the smallest to the largest, in the order of Hugging Face's own writer.
constexpr std::array<std::pair<torch::ScalarType, std::string_view>, 10> kDtypes{{
    {torch::kBool, "BOOL"},
    {torch::kUInt8, "U8"},
    {torch::kInt8, "I8"},
    {torch::kInt16, "I16"},
    {torch::kFloat16, "F16"},
    {torch::kBFloat16, "BF16"},
    {torch::kInt32, "I32"},
    {torch::kFloat32, "F32"},
    {torch::kFloat64, "F64"},
    {torch::kInt64, "I64"},
}};

auto entry_of(torch::ScalarType dtype) {
  const auto found = std::ranges::find(kDtypes, dtype, [](const auto& one) { return one.first; });
  TORCH_CHECK(found != kDtypes.end(), "a safetensors file of this example cannot hold ", dtype);
  return found;
}

/// A tensor as the header describes it.
struct Entry {
  std::string name;
  torch::ScalarType dtype = torch::kFloat32;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0, end = 0;
};

/// The length and the text of the header. `fail` throws.
template <class Fail>
std::string_view header_of(std::string_view file, const Fail& fail) {
  if (file.size() <= kLengthBytes || file[kLengthBytes] != '{') {
    fail(
        "is too short, or has no JSON object in its place, so it is not a safetensors file; "
        "convert a "
        "PyTorch pickle with safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
        "\"model.safetensors\"), and fetch what a Git LFS pointer stands for with `git lfs pull`");
  }
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  if (length > kMaxHeaderBytes || length > file.size() - kLengthBytes) {
    fail("announces a header of " + std::to_string(length) + " bytes in a file of " +
         std::to_string(file.size()) + " (and at most " + std::to_string(kMaxHeaderBytes) +
         " are allowed); it is cut off: fetch it again");
  }
  return file.substr(kLengthBytes, length);
}

/// A count as the header has it: a number without sign or point, of 63 bits.
std::int64_t count_of(const nlohmann::json& json) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (json.is_number_unsigned() && json.get<std::uint64_t>() <= kMost) return json;
  throw std::invalid_argument("has " + json.dump() + " for a count");
}

/// \throws std::invalid_argument or nlohmann::json::exception that say what is wrong
Entry read_entry(const std::string& name, const nlohmann::json& json, std::int64_t data_bytes) {
  if (json.size() != 3) {
    throw std::invalid_argument("is not described by exactly dtype, shape and data_offsets");
  }
  const auto word = json.at("dtype").get<std::string>();
  const auto dtype = std::ranges::find(kDtypes, word, [](const auto& one) { return one.second; });
  if (dtype == kDtypes.end()) {
    throw std::invalid_argument("has the dtype " + word + "; convert it to F32, F16 or BF16");
  }
  const auto& offsets = json.at("data_offsets");
  Entry entry{.name = name,
              .dtype = dtype->first,
              .shape = {},
              .begin = count_of(offsets.at(0)),
              .end = count_of(offsets.at(1))};
  auto bytes = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
  for (const auto& extent : json.at("shape").get<nlohmann::json::array_t>()) {
    entry.shape.push_back(count_of(extent));
    if (__builtin_mul_overflow(bytes, entry.shape.back(), &bytes)) {
      throw std::invalid_argument("has a shape of more bytes than 63 bits can count");
    }
  }
  if (entry.end > data_bytes || bytes != entry.end - entry.begin || offsets.size() != 2) {
    throw std::invalid_argument("needs " + std::to_string(bytes) +
                                " bytes by its shape and dtype, but has the bytes " +
                                offsets.dump() + " of " + std::to_string(data_bytes));
  }
  return entry;
}

/// Reads and checks the header: sorted by place, each tensor begins where the last one ended, and
/// the last ends with the file.
std::vector<Entry> read_header(const std::string& origin, std::string_view file,
                               std::map<std::string, std::string>& metadata) {
  const auto fail = [&](const std::string& what) { throw InputError(origin + ": " + what); };
  const auto text = header_of(file, fail);
  const auto data_bytes = static_cast<std::int64_t>(file.size() - kLengthBytes - text.size());
  std::vector<Entry> entries;
  const auto json = parse_json(text, origin);
  for (const auto& [name, value] : json.items()) {
    try {
      if (name == kMetadataKey) {
        metadata = value.get<std::map<std::string, std::string>>();
      } else {
        entries.push_back(read_entry(name, value, data_bytes));
      }
    } catch (const std::exception& error) {
      fail("\"" + name + "\" " + error.what() + kAgain);
    }
  }
  std::ranges::stable_sort(entries, {},
                           [](const Entry& entry) { return std::pair(entry.begin, entry.end); });
  std::int64_t reached = 0;
  for (const auto& entry : entries) {
    if (entry.begin != reached) {
      fail("\"" + entry.name + "\" overlaps the one before it, or leaves a hole" + kAgain);
    }
    reached = entry.end;
  }
  if (reached != data_bytes) {
    fail("has " + std::to_string(data_bytes - reached) + " bytes behind the last tensor" + kAgain);
  }
  return entries;
}

/// The file's bytes, which the kernel reads when they are touched.
torch::Tensor map_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    throw InputError(path.string() + ": is not a regular file; give the path of a file");
  }
  const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path));
  if (size == 0) return torch::empty({0}, torch::kUInt8);
  return torch::from_file(path.string(), /*shared=*/false, size, torch::kUInt8);
}

}  // namespace

std::string_view dtype_name(torch::ScalarType dtype) { return entry_of(dtype)->second; }

torch::Tensor Safetensors::find(std::string_view name) const {
  const auto found = std::ranges::find(tensors, name, [](const auto& one) { return one.first; });
  return found == tensors.end() ? torch::Tensor() : found->second;
}

Safetensors read_safetensors(const std::filesystem::path& path) {
  const auto bytes = map_file(path);
  const std::string_view text(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  Safetensors content;
  const auto entries = read_header(path.string(), text, content.metadata);
  auto begin = bytes.numel();
  if (!entries.empty()) begin -= entries.back().end;
  for (const auto& entry : entries) {
    auto tensor = bytes.narrow(0, begin + entry.begin, entry.end - entry.begin);
    // Files by other writers may have a header of any length.
    if (tensor.storage_offset() % c10::elementSize(entry.dtype) != 0) tensor = tensor.clone();
    content.tensors.emplace_back(entry.name, tensor.view(entry.dtype).view(entry.shape));
  }
  return content;
}

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  auto order = tensors;
  std::ranges::sort(order, [](const auto& left, const auto& right) {
    const auto left_rank = entry_of(left.second.scalar_type());
    const auto right_rank = entry_of(right.second.scalar_type());
    return left_rank != right_rank ? left_rank > right_rank : left.first < right.first;
  });
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[kMetadataKey] = metadata;
  std::uint64_t offset = 0;
  for (auto& [name, tensor] : order) {
    TORCH_CHECK(!json.contains(name) && name != kMetadataKey, "write_safetensors: the name \"",
                name, "\" is reserved or given twice");
    tensor = tensor.detach().cpu().contiguous();
    const std::uint64_t end = offset + tensor.nbytes();
    json[name] = {{"dtype", dtype_name(tensor.scalar_type())},
                  {"shape", tensor.sizes().vec()},
                  {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string header = json.dump();
  header.append((kLengthBytes - header.size() % kLengthBytes) % kLengthBytes, ' ');
  const std::uint64_t length = header.size();
  write_file(path, [&](std::ostream& file) {
    file.write(reinterpret_cast<const char*>(&length), sizeof length) << header;
    for (const auto& [name, tensor] : order) {
      file.write(static_cast<const char*>(tensor.const_data_ptr()),
                 static_cast<std::streamsize>(tensor.nbytes()));
    }
  });
}

}  // namespace bert_ner
