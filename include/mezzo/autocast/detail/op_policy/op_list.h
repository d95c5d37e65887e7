/// \file
/// OpList's members and autocast_op_lists.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <mezzo/autocast/op_policy.h>

#include <algorithm>
#include <iomanip>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

inline std::size_t OpList::count(OpCategory category) const {
  return static_cast<std::size_t>(
      std::count_if(entries_.begin(), entries_.end(),
                    [category](const OpEntry& entry) { return entry.category == category; }));
}

inline OpCategory OpList::category(std::string_view name) const {
  const auto entry =
      std::lower_bound(entries_.begin(), entries_.end(), name,
                       [](const OpEntry& e, std::string_view wanted) { return e.name < wanted; });
  return entry != entries_.end() && entry->name == name ? entry->category : OpCategory::fallthrough;
}

inline std::ostream& operator<<(std::ostream& stream, const OpList& list) {
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

inline OpList autocast_op_lists(c10::DeviceType device) {
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

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
