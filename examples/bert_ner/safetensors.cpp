#include "safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "input_error.h"
#include "json_file.h"
#include "unicode.h"

namespace bert_ner {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kAlignment = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::string_view kMetadataKey = "__metadata__";

struct DtypeEntry {
  Dtype dtype;
  std::string_view name;
  std::size_t size;
};
// From the smallest to the largest, in the order of Hugging Face's own writer.
constexpr std::array kDtypes{
    DtypeEntry{Dtype::boolean, "BOOL", 1}, DtypeEntry{Dtype::u8, "U8", 1},
    DtypeEntry{Dtype::i8, "I8", 1},        DtypeEntry{Dtype::i16, "I16", 2},
    DtypeEntry{Dtype::f16, "F16", 2},      DtypeEntry{Dtype::bf16, "BF16", 2},
    DtypeEntry{Dtype::i32, "I32", 4},      DtypeEntry{Dtype::f32, "F32", 4},
    DtypeEntry{Dtype::f64, "F64", 8},      DtypeEntry{Dtype::i64, "I64", 8},
};

const DtypeEntry& entry_of(Dtype dtype) {
  return *std::find_if(kDtypes.begin(), kDtypes.end(),
                       [dtype](const DtypeEntry& entry) { return entry.dtype == dtype; });
}

// Bytes of a tensor, or nothing if the shape is negative or the product leaves 64 bits.
std::optional<std::uint64_t> checked_bytes(const std::vector<std::int64_t>& shape, Dtype dtype) {
  std::uint64_t bytes = entry_of(dtype).size;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Reads the header of one file. Every complaint opens with the file's name.
class HeaderReader {
 public:
  HeaderReader(std::string origin, std::span<const std::byte> file)
      : origin_(std::move(origin)), file_(file) {}

  void read(std::vector<TensorView>& tensors, std::map<std::string, std::string>& metadata) {
    refuse_other_formats();
    const auto header_bytes = header();
    data_ = file_.subspan(kLengthBytes + header_bytes.size());
    if (header_bytes.empty() || header_bytes.front() != '{') {
      fail("the header is no JSON object", "fetch the file again");
    }
    const auto json = parse_json(header_bytes, origin_);
    for (const auto& [name, value] : json.items()) {
      if (name == kMetadataKey) {
        metadata = read_metadata(value);
      } else {
        tensors.push_back(read_tensor(name, value));
      }
    }
    check_coverage(tensors);
  }

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& advice) const {
    throw InputError(origin_ + ": " + what + "; " + advice);
  }
  [[noreturn]] void fail_tensor(const std::string& name, const std::string& what) const {
    fail("tensor \"" + name + "\" " + what, "fetch the file again or write it anew");
  }

  // For a word on what to do. A safetensors file may begin with any of these bytes (they count
  // those of its header), but goes on with a brace.
  void refuse_other_formats() const {
    const auto text = as_text(file_);
    if (text.size() > kLengthBytes && text[kLengthBytes] == '{') return;
    if (text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02") ||
        text.starts_with("\x80\x04")) {
      fail("is a PyTorch pickle, which can run code when it is read",
           "convert it to safetensors in Python: safetensors.torch.save_file(torch.load(FILE, "
           "weights_only=True), \"model.safetensors\")");
    }
    if (text.starts_with("version https://git-lfs")) {
      fail("is a Git LFS pointer, not the file itself", "run `git lfs pull` in its repository");
    }
  }

  std::string_view header() const {
    if (file_.size() < kLengthBytes) {
      fail("is too short for a safetensors file (" + std::to_string(file_.size()) + " bytes)",
           "fetch the file again");
    }
    std::uint64_t length = 0;
    std::memcpy(&length, file_.data(), kLengthBytes);
    if (length > kMaxHeaderBytes || length > file_.size() - kLengthBytes) {
      fail("announces a header of " + std::to_string(length) + " bytes in a file of " +
               std::to_string(file_.size()) + " (and at most " + std::to_string(kMaxHeaderBytes) +
               " are allowed)",
           "it is cut off or no safetensors file: fetch it again");
    }
    return as_text(file_.subspan(kLengthBytes, length));
  }

  std::map<std::string, std::string> read_metadata(const nlohmann::json& json) const {
    std::map<std::string, std::string> metadata;
    if (!json.is_object()) fail("the metadata are no JSON object", "write the file anew");
    for (const auto& [key, value] : json.items()) {
      if (!value.is_string()) fail("metadata \"" + key + "\" is no string", "write the file anew");
      metadata.emplace(key, value.get<std::string>());
    }
    return metadata;
  }

  TensorView read_tensor(const std::string& name, const nlohmann::json& json) const {
    if (!json.is_object() || json.size() != 3 || !json.contains("dtype") ||
        !json.contains("shape") || !json.contains("data_offsets")) {
      fail_tensor(name, "is not described by exactly dtype, shape and data_offsets");
    }
    TensorView view{.name = name,
                    .dtype = read_dtype(name, json["dtype"]),
                    .shape = read_shape(name, json["shape"]),
                    .bytes = read_bytes(name, json["data_offsets"])};
    const auto bytes = checked_bytes(view.shape, view.dtype);
    if (!bytes) fail_tensor(name, "has a shape of more elements than 64 bits can count");
    if (*bytes != view.bytes.size()) {
      fail_tensor(name, "needs " + std::to_string(*bytes) +
                            " bytes by its shape and dtype, but has " +
                            std::to_string(view.bytes.size()));
    }
    return view;
  }

  Dtype read_dtype(const std::string& name, const nlohmann::json& json) const {
    if (!json.is_string()) fail_tensor(name, "has a dtype that is no string");
    const auto word = json.get<std::string>();
    for (const DtypeEntry& entry : kDtypes) {
      if (entry.name == word) return entry.dtype;
    }
    fail("tensor \"" + name + "\" has the dtype " + word + ", which is not read here",
         "convert it to F32, F16 or BF16");
  }

  // Counts and offsets are read as nlohmann/json's unsigned numbers: no sign, no fraction, at most
  // 64 bits.
  std::vector<std::int64_t> read_shape(const std::string& name, const nlohmann::json& json) const {
    constexpr auto kMaxExtent =
        static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (!json.is_array()) fail_tensor(name, "has a shape that is no list");
    std::vector<std::int64_t> shape;
    for (const auto& extent : json) {
      if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > kMaxExtent) {
        fail_tensor(name, "has " + extent.dump() + " in its shape, which is no count");
      }
      shape.push_back(extent.get<std::int64_t>());
    }
    return shape;
  }

  std::span<const std::byte> read_bytes(const std::string& name, const nlohmann::json& json) const {
    if (!json.is_array() || json.size() != 2 || !json[0].is_number_unsigned() ||
        !json[1].is_number_unsigned()) {
      fail_tensor(name, "has data_offsets that are not two counts");
    }
    const auto begin = json[0].get<std::uint64_t>(), end = json[1].get<std::uint64_t>();
    if (begin > end || end > data_.size()) {
      fail_tensor(name, "lies at bytes " + std::to_string(begin) + " to " + std::to_string(end) +
                            " of " + std::to_string(data_.size()));
    }
    return data_.subspan(begin, end - begin);
  }

  // Sorted by place, each tensor begins where the last one ended, and the last ends with the file.
  void check_coverage(std::vector<TensorView>& tensors) const {
    const auto bounds = [](const TensorView& view) {
      return std::pair(view.bytes.data(), view.bytes.data() + view.bytes.size());
    };
    std::stable_sort(tensors.begin(), tensors.end(), [&](const auto& left, const auto& right) {
      return bounds(left) < bounds(right);
    });
    const std::byte* reached = data_.data();
    for (const TensorView& view : tensors) {
      if (view.bytes.data() != reached) {
        fail_tensor(view.name, view.bytes.data() < reached ? "overlaps the one before it"
                                                           : "leaves a hole before it");
      }
      reached = view.bytes.data() + view.bytes.size();
    }
    if (reached != data_.data() + data_.size()) {
      fail("has " + std::to_string(data_.data() + data_.size() - reached) +
               " bytes behind the last tensor",
           "fetch the file again or write it anew");
    }
  }

  std::string origin_;
  std::span<const std::byte> file_, data_;
};

void check_text(std::string_view text) {
  if (first_invalid_utf8(text)) {
    throw std::invalid_argument("write_safetensors: a name or a metadata string is not UTF-8");
  }
}

void check_writable(std::span<const TensorView> tensors,
                    const std::map<std::string, std::string>& metadata) {
  std::set<std::string_view> names{kMetadataKey};
  for (const TensorView& view : tensors) {
    check_text(view.name);
    if (!names.insert(view.name).second) {
      throw std::invalid_argument("write_safetensors: the name \"" + view.name +
                                  "\" is reserved or given twice");
    }
    if (checked_bytes(view.shape, view.dtype) != view.bytes.size()) {
      throw std::invalid_argument("write_safetensors: the bytes of \"" + view.name +
                                  "\" do not fit its shape and dtype");
    }
  }
  for (const auto& [key, value] : metadata) {
    check_text(key);
    check_text(value);
  }
}

std::vector<const TensorView*> in_file_order(std::span<const TensorView> tensors) {
  std::vector<const TensorView*> order;
  for (const TensorView& view : tensors) order.push_back(&view);
  // Entries lie in one array, so the address of an entry is its rank.
  std::sort(order.begin(), order.end(), [](const TensorView* left, const TensorView* right) {
    const auto *left_rank = &entry_of(left->dtype), *right_rank = &entry_of(right->dtype);
    return left_rank != right_rank ? left_rank > right_rank : left->name < right->name;
  });
  return order;
}

std::string make_header(std::span<const TensorView* const> order,
                        const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[std::string(kMetadataKey)] = metadata;
  std::uint64_t offset = 0;
  for (const TensorView* view : order) {
    const std::uint64_t end = offset + view->bytes.size();
    json[view->name] = {
        {"dtype", name_of(view->dtype)}, {"shape", view->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string header = json.dump();
  if (header.size() > kMaxHeaderBytes - kAlignment) {
    throw std::invalid_argument("write_safetensors: the header would pass 100 MB");
  }
  header.append((kAlignment - header.size() % kAlignment) % kAlignment, ' ');
  return header;
}

}  // namespace

std::string_view name_of(Dtype dtype) { return entry_of(dtype).name; }

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
  HeaderReader(path.string(), file_.bytes()).read(tensors_, metadata_);
  for (std::size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

AtomicFile::Durability write_safetensors(const std::filesystem::path& path,
                                         std::span<const TensorView> tensors,
                                         const std::map<std::string, std::string>& metadata) {
  check_writable(tensors, metadata);
  const auto order = in_file_order(tensors);
  const std::string header = make_header(order, metadata);
  const std::uint64_t length = header.size();
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(header);
  for (const TensorView* view : order) file.write(view->bytes);
  return file.commit();
}

}  // namespace bert_ner
