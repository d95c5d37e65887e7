#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/json_reader.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

// A safetensors file is the size of its header, in 8 bytes, the header, and the data of all
// tensors:
//
//   {"__metadata__": {"format": "pt"},
//    "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The dtypes of the format, in the order in which Python's safetensors writes them.
inline constexpr std::array<at::ScalarType, 19> kSafetensorsDtypes{
    {at::kUInt64, at::kLong, at::kDouble, at::kComplexFloat, at::kFloat, at::kUInt32, at::kInt,
     at::kBFloat16, at::kHalf, at::kUInt16, at::kShort, at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz,
     at::kFloat8_e8m0fnu, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kChar, at::kByte, at::kBool}};
inline constexpr std::array<const char*, 19> kSafetensorsDtypeNames{
    "U64",     "I64",     "F64", "C64", "F32",         "U32",         "I32",
    "BF16",    "F16",     "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0",
    "F8_E4M3", "F8_E5M2", "I8",  "U8",  "BOOL"};

inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

/// Returns the index of `value`, or the size of `array` if it is not found.
template <class Array, class Value>
std::size_t find_index(const Array& array, const Value& value) {
  return static_cast<std::size_t>(std::find(array.begin(), array.end(), value) - array.begin());
}

struct SafetensorsEntry {
  std::string name;
  std::size_t dtype = 0;  ///< index in kSafetensorsDtypes
  std::vector<std::int64_t> sizes{};
  std::uint64_t begin = 0, end = 0;  ///< offsets of the data in the file
};

/// Reads one tensor of a header. Its offsets count from the end of the header.
inline SafetensorsEntry read_safetensors_entry(JsonReader& json, const std::string& name) {
  std::string dtype;
  std::vector<std::uint64_t> shape, offsets;
  bool has_shape = false;
  json.read_object([&](const std::string& key) {
    if (key == "dtype") {
      dtype = json.read_string();
    } else if (key == "shape" || key == "data_offsets") {
      has_shape |= key == "shape";
      auto& numbers = key == "shape" ? shape : offsets;
      json.read_array([&] { numbers.push_back(json.read_uint()); });
    } else {
      json.skip_value();
    }
  });
  TORCH_CHECK(!dtype.empty() && has_shape && shape.size() <= 64 && offsets.size() == 2, name,
              " lacks a dtype, a shape of at most 64 dimensions, or two data_offsets");
  const std::size_t index = find_index(kSafetensorsDtypeNames, dtype);
  TORCH_CHECK(index < kSafetensorsDtypes.size(), name, " has the dtype ", dtype,
              ", which libtorch lacks; convert it, for example to BF16");
  std::uint64_t bytes = c10::elementSize(kSafetensorsDtypes[index]);
  bool overflows = false;
  for (const std::uint64_t size : shape) {
    overflows |= c10::mul_overflows(bytes, std::max<std::uint64_t>(size, 1), &bytes) ||
                 bytes > std::numeric_limits<std::int64_t>::max();
  }
  if (find_index(shape, 0U) < shape.size()) bytes = 0;
  TORCH_CHECK(!overflows && offsets[0] <= offsets[1] && offsets[1] - offsets[0] == bytes, name,
              ": the data_offsets [", c10::Join(", ", offsets), "] do not match ", dtype,
              " of shape [", c10::Join(", ", shape), "]");
  return {name, index, {shape.begin(), shape.end()}, offsets[0], offsets[1]};
}

/// Returns the entries of a file in the order of their data.
/// \throws c10::Error unless the data of all tensors is exactly the rest of the file
inline std::vector<SafetensorsEntry> read_safetensors_header(std::string_view file) {
  TORCH_CHECK(std::endian::native == std::endian::little, "safetensors needs a little-endian CPU");
  std::uint64_t length = 0;
  if (file.size() > sizeof length) std::memcpy(&length, file.data(), sizeof length);
  TORCH_CHECK(length > 0 && length <= kMaxSafetensorsHeader &&
                  length <= file.size() - sizeof length && file[sizeof length] == '{',
              "it is not a safetensors file, or is truncated; convert a pickle with "
              "safetensors.torch.save_file, and fetch a Git LFS pointer with `git lfs pull`");
  std::vector<SafetensorsEntry> entries;
  JsonReader json(file.substr(sizeof length, length));
  json.read_object([&](const std::string& name) {
    if (name != "__metadata__") return entries.push_back(read_safetensors_entry(json, name));
    json.read_object([&](const std::string&) { json.read_string(); });
  });
  json.check_end();
  std::sort(entries.begin(), entries.end(), [](const auto& left, const auto& right) {
    return std::tie(left.begin, left.end) < std::tie(right.begin, right.end);
  });
  std::uint64_t end = 0;
  for (SafetensorsEntry& entry : entries) {
    TORCH_CHECK(entry.begin == end, entry.name, " begins at byte ", entry.begin,
                " of the data, and the tensors before it end at byte ", end);
    end = entry.end;
    entry.begin += sizeof length + length, entry.end += sizeof length + length;
  }
  const std::uint64_t data_bytes = file.size() - sizeof length - length;
  TORCH_CHECK(end == data_bytes, "it has ", data_bytes, " bytes of data, and its tensors have ",
              end, "; copy the file again");
  return entries;
}

/// Returns the beginning of a file whose tensors have `end - begin` bytes, and sorts the entries in
/// the order of their data.
inline std::string make_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                           const std::map<std::string, std::string>& metadata) {
  std::sort(entries.begin(), entries.end(), [](const auto& left, const auto& right) {
    return std::tie(left.dtype, left.name) < std::tie(right.dtype, right.name);
  });
  std::string header = "{";
  for (const auto& [key, value] : metadata) {
    header += header.size() == 1 ? "\"__metadata__\":{" : ",";
    header += quote_json(key) + ":" + quote_json(value);
  }
  if (!metadata.empty()) header += "}";
  std::uint64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (header.size() > 1) header += ",";
    header += quote_json(entry.name) + ":{\"dtype\":\"" + kSafetensorsDtypeNames[entry.dtype] +
              "\",\"shape\":[";
    for (const std::int64_t size : entry.sizes) header += std::to_string(size) + ",";
    if (header.back() == ',') header.pop_back();
    header += "],\"data_offsets\":[" + std::to_string(end) + ",";
    header += std::to_string(end += entry.end - entry.begin) + "]}";
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  const std::uint64_t length = header.size();
  TORCH_CHECK(length <= kMaxSafetensorsHeader, "names and shapes need more than 100 MB");
  header.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
  return header;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
