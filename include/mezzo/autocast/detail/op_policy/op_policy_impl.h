/// \file
/// The members of OpList and OpPolicy, and the text form of a policy.
#pragma once

#include <mezzo/autocast/detail/op_policy/op_overrides.h>
#include <mezzo/autocast/op_policy.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iomanip>
#include <sstream>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An edit in the words of the text form.
struct PolicyVerb {
  std::string_view word;
  OpCategory category;
  OpPolicy (OpPolicy::*edit)(std::string_view op) const;
};
inline constexpr std::array<PolicyVerb, 4> kPolicyVerbs{
    {{"allow", OpCategory::lower_precision, &OpPolicy::allow},
     {"deny", OpCategory::fp32, &OpPolicy::deny},
     {"promote", OpCategory::promote, &OpPolicy::promote},
     {"ignore", OpCategory::fallthrough, &OpPolicy::ignore}}};

inline OpPolicy edit_in_line(OpPolicy policy, const std::string& line) {
  std::istringstream words(line.substr(0, line.find('#')));
  std::string verb;
  if (!(words >> verb)) {
    return policy;
  }
  const auto known = std::find_if(kPolicyVerbs.begin(), kPolicyVerbs.end(),
                                  [&verb](const PolicyVerb& one) { return one.word == verb; });
  TORCH_CHECK(known != kPolicyVerbs.end(), "\"", verb,
              "\" is no edit; use allow, deny, promote or ignore");
  std::string op;
  TORCH_CHECK(words >> op, "\"", verb,
              "\" names no op; write the ops behind the verb, as in \"deny aten::bmm\"");
  do {
    policy = (policy.*known->edit)(op);
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

MEZZO_INLINE std::size_t OpList::count(OpCategory category) const {
  return static_cast<std::size_t>(
      std::count_if(entries_.begin(), entries_.end(),
                    [category](const OpEntry& entry) { return entry.category == category; }));
}

MEZZO_INLINE OpCategory OpList::category(std::string_view name) const {
  const auto entry =
      std::lower_bound(entries_.begin(), entries_.end(), name,
                       [](const OpEntry& e, std::string_view wanted) { return e.name < wanted; });
  return entry != entries_.end() && entry->name == name ? entry->category : OpCategory::fallthrough;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const OpList& list) {
  std::size_t width = 0;
  for (const auto& entry : list.entries()) {
    width = std::max(width, entry.name.size());
  }
  for (const auto& entry : list.entries()) {
    stream << c10::DeviceTypeName(list.device(), /*lower_case=*/true) << "  " << std::left
           << std::setw(static_cast<int>(width)) << entry.name << "  " << to_string(entry.category)
           << '\n';
  }
  return stream;
}

MEZZO_INLINE OpList autocast_op_lists(c10::DeviceType device) {
  const auto key = detail::autocast_key(device);
  std::vector<OpEntry> entries;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNamesForDispatchKey(key)) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op.has_value()) {
      continue;  // a kernel for an op that nobody defined: it cannot be called
    }
    const auto category = detail::override_registry().registered(*op, device);
    if (category != OpCategory::fallthrough) {  // else the kernel is mezzo's own
      entries.push_back({detail::full_name(name), category});
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const OpEntry& a, const OpEntry& b) { return a.name < b.name; });
  return {device, std::move(entries)};
}

MEZZO_INLINE OpPolicy OpPolicy::set(std::string_view op, OpCategory category) const {
  auto edits = empty() ? std::make_shared<detail::PolicyEdits>()
                       : std::make_shared<detail::PolicyEdits>(*edits_);
  for (const auto& overload : detail::find_ops(op)) {
    TORCH_CHECK(category == OpCategory::fallthrough || !detail::returns_view(overload.schema()),
                "op: ", detail::full_name(overload.operator_name()),
                " may return a view of its argument; behind a cast it would be a view of the cast "
                "copy, and what is written through it would be lost; name the op that computes "
                "with the result, or cast it with .to(dtype) where it is read");
    edits->by_op[&detail::override_registry().record(overload)] = category;
  }
  return OpPolicy(std::move(edits));
}

MEZZO_INLINE OpPolicy OpPolicy::with(const OpPolicy& other) const {
  return OpPolicy(detail::PolicyEdits::nest(edits_, other.edits_));
}

MEZZO_INLINE OpCategory OpPolicy::category(std::string_view op, c10::DeviceType device) const {
  const auto handle = detail::find_ops(op).front();
  detail::OverrideRegistry& registry = detail::override_registry();
  const auto edit = empty() ? std::nullopt : edits_->find(registry.record(handle));
  return edit.has_value() ? *edit : registry.registered(handle, device);
}

MEZZO_INLINE std::vector<OpEntry> OpPolicy::edits() const {
  std::vector<OpEntry> entries;
  if (empty()) return entries;
  for (const auto& [op, category] : edits_->by_op) entries.push_back({op->name, category});
  std::sort(entries.begin(), entries.end(),
            [](const OpEntry& a, const OpEntry& b) { return a.name < b.name; });
  return entries;
}

MEZZO_INLINE OpPolicy install_op_overrides(OpPolicy policy) {
  if (policy.empty()) return policy;
  detail::keep_this_library_loaded();
  for (const auto& edit : policy.edits_->by_op) detail::override_registry().install(*edit.first);
  return policy;
}

MEZZO_INLINE OpPolicy OpPolicy::parse(std::string_view text) {
  std::istringstream stream{std::string(text)};
  return detail::parse_policy(stream, "op policy");
}

MEZZO_INLINE OpPolicy OpPolicy::from_file(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file.is_open(), path,
              ": cannot be opened; name an op policy's text file that exists and may be read");
  OpPolicy policy = detail::parse_policy(file, path);
  TORCH_CHECK(file.eof() && !file.bad(), path,
              ": could not be read to its end; is it a folder, or the disk damaged?");
  return policy;
}

MEZZO_INLINE std::string OpPolicy::to_string() const {
  std::string text;
  for (const auto& [name, category] : edits()) {
    for (const detail::PolicyVerb& verb : detail::kPolicyVerbs) {
      if (verb.category == category) text += std::string(verb.word) + " " + name + "\n";
    }
  }
  return text;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const OpPolicy& policy) {
  return stream << policy.to_string();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
