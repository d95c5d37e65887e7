#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace bert_ner {

/// Calls `take(line, number)` for each line of a UTF-8 text file, numbered from 1, without its "\n"
/// or "\r\n" and without a byte order mark. Throws InputError if the file cannot be read or, with
/// the line, is no UTF-8.
void for_each_line(const std::filesystem::path& path,
                   const std::function<void(std::string_view, std::size_t)>& take);

inline constexpr std::string_view kWhiteSpace = " \t\v\f\r\n";

/// The text without what `edges` has of it at its ends.
std::string_view trimmed(std::string_view text, std::string_view edges = kWhiteSpace);

/// "FILE:LINE", the opening of an error message.
std::string place(const std::filesystem::path& path, std::size_t line);

}  // namespace bert_ner
