/// \file
/// The members of OpList and OpPolicy, and the text form of a policy.
#pragma once

#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/op_overrides.h>
#include <mezzo/autocast/op_policy.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <functional>
#include <iomanip>
#include <set>
#include <sstream>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_category(const c10::OperatorHandle& op, OpCategory category) {
  const auto name = full_name(op.operator_name());
  TORCH_CHECK(category != OpCategory::unknown,
              "category: OpCategory::unknown says nothing; name another category for ", name);
  TORCH_CHECK(category != OpCategory::fp32_set_opt_dtype || optional_dtype_index(op.schema()),
              "category: ", name,
              " has no optional dtype argument for fp32_set_opt_dtype to set; use "
              "fp32");
  TORCH_CHECK(category != OpCategory::fp32_append_dtype || overload_with_dtype(op),
              "category: ", name,
              " has no overload with a dtype for fp32_append_dtype to call; use "
              "fp32");
  // libtorch's own lists have view_as_complex: there is no complex bfloat16 to view.
  const auto& registered = override_registry().record(op).registered;
  const bool is_cast =
      category != OpCategory::fallthrough && category != OpCategory::banned &&
      std::find(registered.begin(), registered.end(), category) == registered.end();
  TORCH_CHECK(!is_cast || !may_alias_argument(op), "op: ", name,
              " may return a view of its argument; behind a cast it would be a view of the cast "
              "copy, and what is written through it would be lost; name the op that computes with "
              "the result, or cast it with .to(dtype) where it is read");
}

/// Returns `policy` with one edit in the words of the text form: a verb of OpPolicy's or a
/// category's name.
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

inline OpPolicy edit_in_line(OpPolicy policy, const std::string& line) {
  std::istringstream words(line.substr(0, line.find('#')));
  std::string verb;
  if (!(words >> verb)) {
    return policy;
  }
  std::string op;
  TORCH_CHECK(words >> op, "\"", verb,
              "\" names no op; write the ops behind the verb, as in \"deny aten::bmm\"");
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
    detail::check_category(overload, category);
    edits->set(detail::override_registry().record(overload), category);
  }
  return OpPolicy(std::move(edits));
}

MEZZO_INLINE OpPolicy OpPolicy::allow_banned(std::string_view op) const {
  bool banned = false;
  for (const auto& overload : detail::find_ops(op)) {
    for (const auto device : detail::kPolicyDevices) {
      banned |= category(detail::full_name(overload.operator_name()), device) == OpCategory::banned;
    }
  }
  TORCH_CHECK(banned, "op: ", detail::qualified(op),
              " is banned on no device; to run it in float32 use OpPolicy::deny");
  return set(op, OpCategory::fp32);
}

MEZZO_INLINE OpPolicy OpPolicy::with(const OpPolicy& other) const {
  return OpPolicy(detail::PolicyEdits::nest(edits_, other.edits_));
}

MEZZO_INLINE OpCategory OpPolicy::category(std::string_view op, c10::DeviceType device) const {
  const auto handle = detail::find_ops(op).front();
  const auto* known = detail::override_registry().find(handle);
  const auto edit = known != nullptr && !empty() ? edits_->find(known->slot) : std::nullopt;
  return edit.has_value() ? *edit : detail::override_registry().registered(handle, device);
}

MEZZO_INLINE std::vector<OpEntry> OpPolicy::edits() const {
  std::vector<OpEntry> entries;
  if (empty()) return entries;
  edits_->for_each([&](const auto& edit) { entries.push_back({edit.op->name, edit.category}); });
  std::sort(entries.begin(), entries.end(),
            [](const OpEntry& a, const OpEntry& b) { return a.name < b.name; });
  return entries;
}

MEZZO_INLINE OpPolicy OpPolicy::like(c10::DeviceType device) {
  const OpList wanted = autocast_op_lists(device);
  std::set<std::string> names;
  for (const auto each : detail::kPolicyDevices) {
    const OpList list = autocast_op_lists(each);
    for (const auto& entry : list.entries()) {
      names.insert(entry.name);
    }
  }
  // CUDA runs LSTMs in 16 bits too, by an op of its own that is on no list.
  if (device == c10::DeviceType::CUDA) names.erase("aten::mkldnn_rnn_layer");
  OpPolicy policy;
  for (const auto& name : names) {
    const auto category = wanted.category(name);
    const bool differs = std::any_of(
        detail::kPolicyDevices.begin(), detail::kPolicyDevices.end(),
        [&](c10::DeviceType each) { return OpPolicy().category(name, each) != category; });
    if (differs && category != OpCategory::unknown) {
      policy = policy.set(name, category);
    }
  }
  return policy;
}

MEZZO_INLINE OpPolicy install_op_overrides(OpPolicy policy) {
  if (policy.empty()) return policy;
  policy.edits_->for_each([](const auto& edit) {
    if (edit.op->serves_everywhere(edit.category)) return;  // nothing is put in front
    const auto op = detail::find_op(edit.op->name);
    if (op.has_value()) detail::check_no_other_mezzo_overrides(*op);
  });
  detail::keep_loaded();
  policy.edits_->for_each(
      [](const auto& edit) { detail::override_registry().install(*edit.op, edit.category); });
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
    text += std::string(mezzo::to_string(category)) + " " + name + "\n";
  }
  return text;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const OpPolicy& policy) {
  return stream << policy.to_string();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
