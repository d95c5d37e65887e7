#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace bert_ner {

/// One JSON value from text that a stranger wrote: keys that appear twice, more than 64 levels and
/// bytes that are no UTF-8 are refused. Throws InputError that opens with `origin` (a file's name)
/// and says where.
nlohmann::json parse_json(std::string_view text, const std::string& origin);

/// parse_json of a whole file.
nlohmann::json read_json(const std::filesystem::path& path);

}  // namespace bert_ner
