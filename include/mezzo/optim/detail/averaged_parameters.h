#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <mutex>
#include <unordered_set>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Records which parameters hold averages, for an EmaScope is alive. A checkpoint saved then would
/// present the averages as training weights.
class AveragedParameters {
 public:
  bool hold(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    return parameters_.count(parameter.unsafeGetTensorImpl()) != 0;
  }
  bool empty() const {
    const std::lock_guard lock(mutex_);
    return parameters_.empty();
  }
  void add(const std::vector<at::Tensor>& parameters) {
    const std::lock_guard lock(mutex_);
    for (const at::Tensor& one : parameters) parameters_.insert(one.unsafeGetTensorImpl());
  }
  void remove(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    parameters_.erase(parameter.unsafeGetTensorImpl());
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_set<const c10::TensorImpl*> parameters_;
};

/// The process's record. The guard and the checkpoint may be in different libraries and threads.
C10_EXPORT inline AveragedParameters& averaged_parameters() {
  static AveragedParameters& parameters = *new AveragedParameters;
  return parameters;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
