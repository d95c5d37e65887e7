#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

/// Builds pickles and zip archives that torch.save would not write.
namespace test_support::pickle_bytes {

using Records = std::map<std::string, std::string>;

inline std::string number(std::uint64_t value, int size) {
  std::string bytes;
  for (int i = 0; i < size; ++i, value >>= 8) bytes += static_cast<char>(value);
  return bytes;
}
inline std::string byte(int value) { return std::string(1, static_cast<char>(value)); }
inline std::string text(const std::string& value) { return "X" + number(value.size(), 4) + value; }
inline std::string integer(std::int64_t value) {
  return "\x8a\x08" + number(static_cast<std::uint64_t>(value), 8);
}
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string tuple(const std::vector<std::int64_t>& values) {
  std::string bytes = "(";
  for (const std::int64_t value : values) bytes += integer(value);
  return bytes + "t";
}
inline std::string dict(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string bytes = "}";
  for (const auto& [key, value] : items) bytes += text(key) + value + "s";
  return bytes;
}
inline std::string storage(const std::string& type, const std::string& key, std::int64_t count) {
  return "(" + text("storage") + global("torch", type) + text(key) + text("cpu") + integer(count) +
         "tQ";
}
inline std::string empty_ordered_dict() { return global("collections", "OrderedDict") + ")R"; }
inline std::string tensor(const std::string& storage, std::int64_t offset,
                          const std::vector<std::int64_t>& sizes,
                          const std::vector<std::int64_t>& strides) {
  return global("torch._utils", "_rebuild_tensor_v2") + "(" + storage + integer(offset) +
         tuple(sizes) + tuple(strides) + "\x89" + empty_ordered_dict() + "tR";
}
inline std::string quantized(const std::string& storage, const std::vector<std::int64_t>& sizes,
                             const std::vector<std::int64_t>& strides, const std::string& scheme,
                             const std::string& parameters) {
  return global("torch._utils", "_rebuild_qtensor") + "(" + storage + integer(0) + tuple(sizes) +
         tuple(strides) + "(" + global("torch", scheme) + parameters + "t\x89" +
         empty_ordered_dict() + "tR";
}

/// Returns an archive in the format of torch.save with `value` and `records`. Checksums are 0.
inline std::string zip(const std::string& value, const Records& records = {}) {
  Records files{
      {"data.pkl", "\x80\x02" + value + "."}, {"byteorder", "little"}, {"version", "3\n"}};
  for (const auto& [key, record] : records) files["data/" + key] = record;
  std::string bytes, directory;
  for (const auto& [name, content] : files) {
    const std::string path = "archive/" + name;
    const std::string common = number(20, 2) + number(0, 12) + number(content.size(), 4) +
                               number(content.size(), 4) + number(path.size(), 2);
    // Records are aligned to 64 bytes, as in torch.save.
    const std::size_t padding = (64 - (bytes.size() + 30 + path.size()) % 64) % 64;
    directory +=
        "PK\x01\x02" + number(20, 2) + common + number(0, 12) + number(bytes.size(), 4) + path;
    bytes +=
        "PK\x03\x04" + common + number(padding, 2) + path + std::string(padding, '\0') + content;
  }
  const std::string end = "PK\x05\x06" + number(0, 4) + number(files.size(), 2) +
                          number(files.size(), 2) + number(directory.size(), 4) +
                          number(bytes.size(), 4) + number(0, 2);
  return bytes + directory + end;
}

}  // namespace test_support::pickle_bytes
