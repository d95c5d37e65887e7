#pragma once

#include <span>
#include <string>

namespace bert_ner {

/// What std::printf would print. (g++ 12 has no std::format.)
[[gnu::format(printf, 1, 2)]] std::string formatted(const char* pattern, ...);

/// "a, b, c"
std::string joined(std::span<const std::string> names);

}  // namespace bert_ner
