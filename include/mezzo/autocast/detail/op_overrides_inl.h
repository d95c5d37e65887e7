#pragma once

#include <mezzo/autocast/detail/override_registry.h>
#include <mezzo/autocast/op_overrides.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A verb of the text form.
struct OverrideVerb {
  std::string_view verb;
  CastPolicy policy;
  OpOverrides (OpOverrides::*method)(std::string_view op) const;
};
inline constexpr std::array<OverrideVerb, 4> kOverrideVerbs{
    {{"allow", CastPolicy::lower_precision_fp, &OpOverrides::allow},
     {"deny", CastPolicy::fp32, &OpOverrides::deny},
     {"promote", CastPolicy::promote, &OpOverrides::promote},
     {"ignore", CastPolicy::fallthrough, &OpOverrides::ignore}}};

inline OpOverrides parse_line(OpOverrides overrides, const std::string& line) {
  std::istringstream words(line.substr(0, line.find('#')));
  std::string verb;
  if (!(words >> verb)) return overrides;
  const auto known = std::ranges::find(kOverrideVerbs, verb, &OverrideVerb::verb);
  TORCH_CHECK(known != kOverrideVerbs.end(), "unexpected \"", verb,
              "\"; use allow, deny, promote or ignore");
  std::string op;
  TORCH_CHECK(words >> op, "\"", verb,
              "\" names no op; write the ops after it, as in \"deny aten::bmm\"");
  do {
    overrides = (overrides.*known->method)(op);
  } while (words >> op);
  return overrides;
}

inline OpOverrides parse_op_overrides(std::istream& text, const std::string& source) {
  OpOverrides overrides;
  std::string line;
  for (int line_number = 1; std::getline(text, line); ++line_number) {
    try {
      overrides = parse_line(std::move(overrides), line);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, source, ", line ", line_number, ": ", error.what_without_backtrace());
    }
  }
  return overrides;
}

}  // namespace detail

MEZZO_INLINE OpOverrides OpOverrides::set(std::string_view op, CastPolicy policy) const {
  auto map = empty() ? std::make_shared<detail::OpOverrideMap>()
                     : std::make_shared<detail::OpOverrideMap>(*map_);
  for (const auto& overload : detail::find_ops(op)) {
    TORCH_CHECK(policy == CastPolicy::fallthrough || !detail::has_view_result(overload.schema()),
                "op: ", c10::toString(overload.operator_name()),
                " may return a view of its argument; with a cast it would be a view of the copy, "
                "and writes through it would be lost; name the op that computes with the result, "
                "or cast it with .to(dtype) where it is read");
    map->cast_policies[&detail::override_registry().get_op(overload)] = policy;
  }
  return OpOverrides(std::move(map));
}

MEZZO_INLINE OpOverrides OpOverrides::with(const OpOverrides& other) const {
  return OpOverrides(detail::OpOverrideMap::merge(map_, other.map_));
}

MEZZO_INLINE CastPolicy OpOverrides::cast_policy(std::string_view op,
                                                 c10::DeviceType device) const {
  const auto handle = detail::find_ops(op).front();
  detail::OverrideRegistry& registry = detail::override_registry();
  const auto policy = empty() ? std::nullopt : map_->find(registry.get_op(handle));
  return policy.has_value() ? *policy : registry.get_registered_policy(handle, device);
}

MEZZO_INLINE std::vector<OpEntry> OpOverrides::entries() const {
  std::vector<OpEntry> entries;
  if (empty()) return entries;
  for (const auto& [op, policy] : map_->cast_policies) entries.push_back({op->name, policy});
  std::ranges::sort(entries, {}, &OpEntry::name);
  return entries;
}

MEZZO_INLINE OpOverrides install_op_overrides(OpOverrides overrides) {
  const OpOverridesHandle map = overrides;
  if (map == nullptr) return overrides;
  detail::pin_this_library();
  for (const auto& [op, policy] : map->cast_policies) detail::override_registry().install(*op);
  return overrides;
}

MEZZO_INLINE OpOverrides OpOverrides::parse(std::string_view text) {
  std::istringstream stream{std::string(text)};
  return detail::parse_op_overrides(stream, "op overrides");
}

MEZZO_INLINE OpOverrides OpOverrides::from_file(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file.is_open(), path, ": cannot be opened; pass the path of a readable text file");
  OpOverrides overrides = detail::parse_op_overrides(file, path);
  TORCH_CHECK(file.eof() && !file.bad(), path,
              ": could not be read to its end; is it a directory, or the disk damaged?");
  return overrides;
}

MEZZO_INLINE std::string OpOverrides::to_string() const {
  std::string text;
  for (const auto& [name, policy] : entries()) {
    const auto verb =
        std::ranges::find(detail::kOverrideVerbs, policy, &detail::OverrideVerb::policy);
    text += std::string(verb->verb) + " " + name + "\n";
  }
  return text;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const OpOverrides& overrides) {
  return stream << overrides.to_string();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
