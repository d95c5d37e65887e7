#include "json_file.h"

#include <algorithm>
#include <set>
#include <vector>

#include "input_error.h"
#include "mapped_file.h"
#include "unicode.h"

namespace bert_ner {
namespace {

constexpr std::size_t kMaxDepth = 64;

// nlohmann/json keeps the last of two equal keys; this refuses the second.
class StrictKeys {
 public:
  explicit StrictKeys(const std::string& origin) : origin_(origin) {}

  bool operator()(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > static_cast<int>(kMaxDepth)) {
      throw InputError(origin_ + ": JSON is nested deeper than " + std::to_string(kMaxDepth) +
                       " levels; this is no file of the expected kind");
    }
    if (event == Event::object_start) keys_.emplace_back();
    if (event == Event::object_end) keys_.pop_back();
    if (event == Event::key && !keys_.back().insert(parsed.get<std::string>()).second) {
      throw InputError(origin_ + ": the JSON key " + parsed.dump() +
                       " stands twice in one object; remove one of them");
    }
    return true;
  }

 private:
  const std::string& origin_;
  std::vector<std::set<std::string>> keys_;
};

std::string line_of(std::string_view text, std::size_t byte) {
  const auto before = text.substr(0, byte);
  return std::to_string(1 + std::count(before.begin(), before.end(), '\n'));
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& origin) {
  if (const auto invalid = first_invalid_utf8(text)) {
    throw InputError(origin + ":" + line_of(text, *invalid) + ": byte " + std::to_string(*invalid) +
                     " is not UTF-8; save the file as UTF-8");
  }
  try {
    return nlohmann::json::parse(text.begin(), text.end(), StrictKeys(origin));
  } catch (const nlohmann::json::parse_error& error) {
    const std::size_t byte = error.byte == 0 ? 0 : error.byte - 1;
    throw InputError(origin + ":" + line_of(text, byte) + ": is no valid JSON from byte " +
                     std::to_string(byte) + " on; correct it or fetch the file again");
  } catch (const nlohmann::json::out_of_range&) {
    throw InputError(origin + ": a number in the JSON is out of range; correct it");
  }
}

nlohmann::json read_json(const std::filesystem::path& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string());
}

}  // namespace bert_ner
