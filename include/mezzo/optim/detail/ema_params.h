#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>
#include <c10/util/Synchronized.h>

#include <unordered_set>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Process-wide set of the parameters that hold averages while an EmaGuard is alive, so that no
/// checkpoint saves averages as weights. Guard and checkpoint may be in different libraries and
/// threads.
C10_EXPORT inline auto& averaged_parameters() {
  static auto& parameters = *new c10::Synchronized<std::unordered_set<const c10::TensorImpl*>>;
  return parameters;
}

/// Returns whether an EmaGuard has replaced the value of `parameter` by its average.
inline bool is_averaged(const at::Tensor& parameter) {
  return averaged_parameters().withLock(
      [&](const auto& all) { return all.count(parameter.unsafeGetTensorImpl()) != 0; });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
