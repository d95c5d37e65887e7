#pragma once

#include <mezzo/autocast/autocast_op_list.h>
#include <mezzo/autocast/detail/override_registry.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <iomanip>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

MEZZO_INLINE std::size_t AutocastOpList::count(CastPolicy policy) const {
  return static_cast<std::size_t>(std::ranges::count(entries_, policy, &OpEntry::cast_policy));
}

MEZZO_INLINE CastPolicy AutocastOpList::cast_policy(std::string_view name) const {
  const auto entry = std::ranges::lower_bound(
      entries_, name, {}, [](const OpEntry& op) { return std::string_view(op.name); });
  return entry != entries_.end() && entry->name == name ? entry->cast_policy
                                                        : CastPolicy::fallthrough;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const AutocastOpList& list) {
  std::size_t width = 0;
  for (const auto& entry : list.entries()) width = std::max(width, entry.name.size());
  for (const auto& entry : list.entries()) {
    stream << c10::DeviceTypeName(list.device(), /*lower_case=*/true) << "  " << std::left
           << std::setw(static_cast<int>(width)) << entry.name << "  " << entry.cast_policy << '\n';
  }
  return stream;
}

MEZZO_INLINE AutocastOpList autocast_op_list(c10::DeviceType device) {
  detail::check_autocast_device(device);
  const auto key = detail::autocast_key(device);
  std::vector<OpEntry> entries;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNamesForDispatchKey(key)) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op.has_value()) continue;  // a kernel of an op without a schema, which cannot be called
    const auto policy = detail::override_registry().get_registered_policy(*op, device);
    if (policy == CastPolicy::fallthrough) continue;  // the kernel is mezzo's
    entries.push_back({c10::toString(name), policy});
  }
  std::ranges::sort(entries, {}, &OpEntry::name);
  return {device, std::move(entries)};
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
