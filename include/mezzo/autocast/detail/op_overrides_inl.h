/// \file
/// The members of AutocastOpList and OpOverrides, and the text form of a overrides.
#pragma once

#include <mezzo/autocast/detail/override_registry.h>
#include <mezzo/autocast/op_overrides.h>

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
struct OverrideVerb {
  std::string_view word;
  CastPolicy cast_policy;
  OpOverrides (OpOverrides::*edit)(std::string_view op) const;
};
inline constexpr std::array<OverrideVerb, 4> kOverrideVerbs{
    {{"allow", CastPolicy::lower_precision_fp, &OpOverrides::allow},
     {"deny", CastPolicy::fp32, &OpOverrides::deny},
     {"promote", CastPolicy::promote, &OpOverrides::promote},
     {"ignore", CastPolicy::fallthrough, &OpOverrides::ignore}}};

inline OpOverrides parse_line(OpOverrides overrides, const std::string& line) {
  std::istringstream words(line.substr(0, line.find('#')));
  std::string verb;
  if (!(words >> verb)) {
    return overrides;
  }
  const auto known = std::find_if(kOverrideVerbs.begin(), kOverrideVerbs.end(),
                                  [&verb](const OverrideVerb& one) { return one.word == verb; });
  TORCH_CHECK(known != kOverrideVerbs.end(), "\"", verb,
              "\" is no edit; use allow, deny, promote or ignore");
  std::string op;
  TORCH_CHECK(words >> op, "\"", verb,
              "\" names no op; write the ops behind the verb, as in \"deny aten::bmm\"");
  do {
    overrides = (overrides.*known->edit)(op);
  } while (words >> op);
  return overrides;
}

inline OpOverrides parse_op_overrides(std::istream& text, const std::string& source) {
  OpOverrides overrides;
  std::string line;
  for (int number = 1; std::getline(text, line); ++number) {
    try {
      overrides = parse_line(std::move(overrides), line);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, source, ", line ", number, ": ", error.what_without_backtrace());
    }
  }
  return overrides;
}

}  // namespace detail

MEZZO_INLINE std::size_t AutocastOpList::count(CastPolicy cast_policy) const {
  return static_cast<std::size_t>(std::count_if(
      entries_.begin(), entries_.end(),
      [cast_policy](const OpEntry& entry) { return entry.cast_policy == cast_policy; }));
}

MEZZO_INLINE CastPolicy AutocastOpList::cast_policy(std::string_view name) const {
  const auto entry =
      std::lower_bound(entries_.begin(), entries_.end(), name,
                       [](const OpEntry& e, std::string_view wanted) { return e.name < wanted; });
  return entry != entries_.end() && entry->name == name ? entry->cast_policy
                                                        : CastPolicy::fallthrough;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const AutocastOpList& list) {
  std::size_t width = 0;
  for (const auto& entry : list.entries()) {
    width = std::max(width, entry.name.size());
  }
  for (const auto& entry : list.entries()) {
    stream << c10::DeviceTypeName(list.device(), /*lower_case=*/true) << "  " << std::left
           << std::setw(static_cast<int>(width)) << entry.name << "  "
           << to_string(entry.cast_policy) << '\n';
  }
  return stream;
}

MEZZO_INLINE AutocastOpList autocast_op_list(c10::DeviceType device) {
  const auto key = detail::autocast_key(device);
  std::vector<OpEntry> entries;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNamesForDispatchKey(key)) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op.has_value()) {
      continue;  // a kernel for an op that nobody defined: it cannot be called
    }
    const auto cast_policy = detail::override_registry().registered(*op, device);
    if (cast_policy != CastPolicy::fallthrough) {  // else the kernel is mezzo's own
      entries.push_back({detail::to_full_name(name), cast_policy});
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const OpEntry& a, const OpEntry& b) { return a.name < b.name; });
  return {device, std::move(entries)};
}

MEZZO_INLINE OpOverrides OpOverrides::set(std::string_view op, CastPolicy cast_policy) const {
  auto edits = empty() ? std::make_shared<detail::OpOverrideMap>()
                       : std::make_shared<detail::OpOverrideMap>(*edits_);
  for (const auto& overload : detail::find_ops(op)) {
    TORCH_CHECK(
        cast_policy == CastPolicy::fallthrough || !detail::has_view_result(overload.schema()),
        "op: ", detail::to_full_name(overload.operator_name()),
        " may return a view of its argument; behind a cast it would be a view of the cast "
        "copy, and what is written through it would be lost; name the op that computes "
        "with the result, or cast it with .to(dtype) where it is read");
    edits->cast_policies[&detail::override_registry().record(overload)] = cast_policy;
  }
  return OpOverrides(std::move(edits));
}

MEZZO_INLINE OpOverrides OpOverrides::with(const OpOverrides& other) const {
  return OpOverrides(detail::OpOverrideMap::nest(edits_, other.edits_));
}

MEZZO_INLINE CastPolicy OpOverrides::cast_policy(std::string_view op,
                                                 c10::DeviceType device) const {
  const auto handle = detail::find_ops(op).front();
  detail::OverrideRegistry& registry = detail::override_registry();
  const auto edit = empty() ? std::nullopt : edits_->find(registry.record(handle));
  return edit.has_value() ? *edit : registry.registered(handle, device);
}

MEZZO_INLINE std::vector<OpEntry> OpOverrides::entries() const {
  std::vector<OpEntry> entries;
  if (empty()) return entries;
  for (const auto& [op, cast_policy] : edits_->cast_policies)
    entries.push_back({op->name, cast_policy});
  std::sort(entries.begin(), entries.end(),
            [](const OpEntry& a, const OpEntry& b) { return a.name < b.name; });
  return entries;
}

MEZZO_INLINE OpOverrides install_op_overrides(OpOverrides overrides) {
  if (overrides.empty()) return overrides;
  detail::pin_this_library();
  for (const auto& edit : overrides.edits_->cast_policies)
    detail::override_registry().install(*edit.first);
  return overrides;
}

MEZZO_INLINE OpOverrides OpOverrides::parse(std::string_view text) {
  std::istringstream stream{std::string(text)};
  return detail::parse_op_overrides(stream, "op overrides");
}

MEZZO_INLINE OpOverrides OpOverrides::from_file(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file.is_open(), path,
              ": cannot be opened; name op overrides's text file that exists and may be read");
  OpOverrides overrides = detail::parse_op_overrides(file, path);
  TORCH_CHECK(file.eof() && !file.bad(), path,
              ": could not be read to its end; is it a folder, or the disk damaged?");
  return overrides;
}

MEZZO_INLINE std::string OpOverrides::to_string() const {
  std::string text;
  for (const auto& [name, cast_policy] : entries()) {
    for (const detail::OverrideVerb& verb : detail::kOverrideVerbs) {
      if (verb.cast_policy == cast_policy) text += std::string(verb.word) + " " + name + "\n";
    }
  }
  return text;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const OpOverrides& overrides) {
  return stream << overrides.to_string();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
