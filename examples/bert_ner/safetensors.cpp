#include "safetensors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

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
  std::uint64_t begin = 0, end = 0;
};

/// Reads the header of one file. Every complaint opens with the file's name.
class HeaderReader {
 public:
  HeaderReader(std::string origin, std::string_view file)
      : origin_(std::move(origin)), file_(file) {}

  std::vector<Entry> read(std::map<std::string, std::string>& metadata) {
    refuse_other_formats();
    const auto text = header();
    data_bytes_ = file_.size() - kLengthBytes - text.size();
    if (!text.starts_with('{')) fail("the header is no JSON object; fetch the file again");
    std::vector<Entry> entries;
    const auto json = parse_json(text, origin_);
    for (const auto& [name, value] : json.items()) {
      if (name == kMetadataKey) {
        metadata = read_metadata(value);
      } else {
        entries.push_back(read_entry(name, value));
      }
    }
    check_coverage(entries);
    return entries;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw InputError(origin_ + ": " + what); }
  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    fail("tensor \"" + name + "\" " + what + kAgain);
  }

  /// A safetensors file may begin with any of these bytes (they count those of its header), but
  /// goes on with a brace.
  void refuse_other_formats() const {
    if (file_.size() > kLengthBytes && file_[kLengthBytes] == '{') return;
    if (file_.starts_with("PK\x03\x04") || file_.starts_with("\x80\x02") ||
        file_.starts_with("\x80\x04")) {
      fail(
          "is a PyTorch pickle, which can run code when it is read; convert it to safetensors in "
          "Python: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
          "\"model.safetensors\")");
    }
    if (file_.starts_with("version https://git-lfs")) {
      fail("is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository");
    }
  }

  std::string_view header() const {
    std::uint64_t length = 0;
    if (file_.size() < kLengthBytes) fail("is too short for a safetensors file; fetch it again");
    std::memcpy(&length, file_.data(), kLengthBytes);
    if (length <= kMaxHeaderBytes && length <= file_.size() - kLengthBytes) {
      return file_.substr(kLengthBytes, length);
    }
    fail("announces a header of " + std::to_string(length) + " bytes in a file of " +
         std::to_string(file_.size()) + " (and at most " + std::to_string(kMaxHeaderBytes) +
         " are allowed); it is cut off or no safetensors file: fetch it again");
  }

  std::map<std::string, std::string> read_metadata(const nlohmann::json& json) const {
    std::map<std::string, std::string> metadata;
    if (!json.is_object()) fail("the metadata are no JSON object; write the file anew");
    for (const auto& [key, value] : json.items()) {
      if (!value.is_string()) fail("metadata \"" + key + "\" is no string; write the file anew");
      metadata.emplace(key, value.get<std::string>());
    }
    return metadata;
  }

  Entry read_entry(const std::string& name, const nlohmann::json& json) const {
    if (!json.is_object() || json.size() != 3 || !json.contains("dtype") ||
        !json.contains("shape") || !json.contains("data_offsets")) {
      fail(name, "is not described by exactly dtype, shape and data_offsets");
    }
    Entry entry{.name = name, .dtype = read_dtype(name, json["dtype"]), .shape = {}};
    // Bytes of a tensor of this shape, as long as 64 bits can count them.
    auto bytes = static_cast<std::uint64_t>(c10::elementSize(entry.dtype));
    if (!json["shape"].is_array()) fail(name, "has a shape that is no list");
    for (const auto& extent : json["shape"]) {
      constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
      if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > kMost) {
        fail(name, "has " + extent.dump() + " in its shape, which is no count");
      }
      entry.shape.push_back(extent.get<std::int64_t>());
      if (__builtin_mul_overflow(bytes, extent.get<std::uint64_t>(), &bytes)) {
        fail(name, "has a shape of more elements than 64 bits can count");
      }
    }
    const auto& offsets = json["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
      fail(name, "has data_offsets that are not two counts");
    }
    entry.begin = offsets[0].get<std::uint64_t>();
    entry.end = offsets[1].get<std::uint64_t>();
    if (entry.begin > entry.end || entry.end > data_bytes_) {
      fail(name, "lies at bytes " + std::to_string(entry.begin) + " to " +
                     std::to_string(entry.end) + " of " + std::to_string(data_bytes_));
    }
    if (bytes != entry.end - entry.begin) {
      fail(name, "needs " + std::to_string(bytes) + " bytes by its shape and dtype, but has " +
                     std::to_string(entry.end - entry.begin));
    }
    return entry;
  }

  torch::ScalarType read_dtype(const std::string& name, const nlohmann::json& json) const {
    if (!json.is_string()) fail(name, "has a dtype that is no string");
    for (const auto& [dtype, word] : kDtypes) {
      if (word == json.get<std::string>()) return dtype;
    }
    fail("tensor \"" + name + "\" has the dtype " + json.get<std::string>() +
         ", which is not read here; convert it to F32, F16 or BF16");
  }

  /// Sorted by place, each tensor begins where the last one ended, and the last ends with the file.
  void check_coverage(std::vector<Entry>& entries) const {
    std::ranges::stable_sort(entries, {},
                             [](const Entry& entry) { return std::pair(entry.begin, entry.end); });
    std::uint64_t reached = 0;
    for (const auto& entry : entries) {
      if (entry.begin < reached) fail(entry.name, "overlaps the one before it");
      if (entry.begin > reached) fail(entry.name, "leaves a hole before it");
      reached = entry.end;
    }
    if (reached == data_bytes_) return;
    fail("has " + std::to_string(data_bytes_ - reached) + " bytes behind the last tensor" + kAgain);
  }

  std::string origin_;
  std::string_view file_;
  std::uint64_t data_bytes_ = 0;
};

/// The file's bytes, which the kernel reads when they are touched.
torch::Tensor map_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    throw InputError(path.string() + ": is no regular file; give the path of a file");
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
  const auto entries = HeaderReader(path.string(), text).read(content.metadata);
  auto begin = bytes.numel();
  if (!entries.empty()) begin -= static_cast<std::int64_t>(entries.back().end);
  for (const auto& entry : entries) {
    const auto size = static_cast<std::int64_t>(entry.end - entry.begin);
    auto tensor = bytes.narrow(0, begin + static_cast<std::int64_t>(entry.begin), size);
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
  std::vector<std::string_view> parts(2);
  std::uint64_t offset = 0;
  for (auto& [name, tensor] : order) {
    TORCH_CHECK(!json.contains(name) && name != kMetadataKey, "write_safetensors: the name \"",
                name, "\" is reserved or given twice");
    tensor = tensor.detach().cpu().contiguous();
    const std::uint64_t end = offset + tensor.nbytes();
    json[name] = {{"dtype", dtype_name(tensor.scalar_type())},
                  {"shape", tensor.sizes().vec()},
                  {"data_offsets", {offset, end}}};
    parts.emplace_back(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    offset = end;
  }
  std::string header = json.dump();
  header.append((kLengthBytes - header.size() % kLengthBytes) % kLengthBytes, ' ');
  const std::uint64_t length = header.size();
  parts[0] = {reinterpret_cast<const char*>(&length), sizeof length};
  parts[1] = header;
  write_file(path, parts);
}

}  // namespace bert_ner
