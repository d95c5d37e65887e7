/// \file
/// A policy as text, and back.
#pragma once

#include <c10/util/Exception.h>
#include <mezzo/autocast/op_policy.h>

#include <array>
#include <fstream>
#include <functional>
#include <sstream>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One edit in the words of the text form: a verb of OpPolicy's or a category's name.
inline OpPolicy edit_in_words(const OpPolicy& policy, std::string_view word, std::string_view op) {
  using Verb = OpPolicy (OpPolicy::*)(std::string_view) const;
  static constexpr std::array<std::pair<std::string_view, Verb>, 5> kVerbs = {
      {{"allow", &OpPolicy::allow},
       {"deny", &OpPolicy::deny},
       {"promote", &OpPolicy::promote},
       {"ignore", &OpPolicy::ignore},
       {"allow_banned", &OpPolicy::allow_banned}}};
  for (const auto& [verb, method] : kVerbs) {
    if (word == verb) {
      return (policy.*method)(op);
    }
  }
  for (std::size_t i = 0; i < kCategoryNames.size(); ++i) {
    if (word == kCategoryNames[i]) {
      return policy.set(op, static_cast<OpCategory>(i));
    }
  }
  TORCH_CHECK(
      false, "\"", word,
      "\" is no edit; use allow, deny, promote, ignore, allow_banned or the name of a category");
}

inline OpPolicy edit_in_line(OpPolicy policy, std::string line) {
  std::istringstream words(line.substr(0, line.find('#')));
  std::string verb;
  if (!(words >> verb)) {
    return policy;
  }
  std::string op;
  TORCH_CHECK(words >> op, "\"", verb, "\" names no op");
  do {
    policy = edit_in_words(policy, verb, op);
  } while (words >> op);
  return policy;
}

inline OpPolicy parse_policy(std::istream& text, const std::string& source) {
  OpPolicy policy;
  std::string line;
  for (int number = 1; std::getline(text, line); ++number) {
    try {
      policy = edit_in_line(std::move(policy), line);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, source, ", line ", number, ": ", error.what_without_backtrace());
    }
  }
  return policy;
}

}  // namespace detail

inline OpPolicy OpPolicy::parse(std::string_view text) {
  std::istringstream stream{std::string(text)};
  return detail::parse_policy(stream, "op policy");
}

inline OpPolicy OpPolicy::from_file(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file.is_open(), path, ": cannot be opened; an op policy is a readable text file");
  OpPolicy policy = detail::parse_policy(file, path);
  TORCH_CHECK(file.eof() && !file.bad(), path, ": could not be read to its end");
  return policy;
}

inline std::string OpPolicy::to_string() const {
  std::string text;
  for (const auto& [name, category] : edits()) {
    text += std::string(mezzo::to_string(category)) + " " + name + "\n";
  }
  return text;
}

inline std::ostream& operator<<(std::ostream& stream, const OpPolicy& policy) {
  return stream << policy.to_string();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
