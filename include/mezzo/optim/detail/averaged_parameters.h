#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_set>

// Records which parameters presently hold averages. A checkpoint saved in that state would present
// the averages as training weights, and weights loaded or trained in that state would be lost when
// the guard restores the training weights. Without this record no such mistake would be noticed.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How many parameters hold averages: 0 spares a step the record below.
C10_EXPORT inline std::atomic<std::int64_t> averaged_parameters_held{0};

class AveragedParameters {
 public:
  bool hold(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    return parameters_.count(parameter.unsafeGetTensorImpl()) != 0;
  }
  void add(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    parameters_.insert(parameter.unsafeGetTensorImpl());
    ++averaged_parameters_held;
  }
  void remove_one(const at::Tensor& parameter) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = parameters_.find(parameter.unsafeGetTensorImpl());
    if (found == parameters_.end()) return;
    parameters_.erase(found);
    --averaged_parameters_held;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_multiset<const c10::TensorImpl*> parameters_;  // guards nest
};

/// The process's record. The guard and the checkpoint may be in different libraries and threads.
C10_EXPORT inline AveragedParameters& averaged_parameters() {
  static AveragedParameters& parameters = *new AveragedParameters;
  return parameters;
}

/// A parameter with its previous contents. Marks the parameter as averaged for this object's life.
class LentParameter {
 public:
  explicit LentParameter(const at::Tensor& parameter)
      : parameter_(parameter), memory_(parameter.variable_data()) {
    averaged_parameters().add(parameter_);
  }
  LentParameter(const LentParameter&) = delete;
  LentParameter& operator=(const LentParameter&) = delete;
  LentParameter(LentParameter&&) noexcept = default;
  LentParameter& operator=(LentParameter&&) = delete;
  ~LentParameter() {
    if (parameter_.defined()) averaged_parameters().remove_one(parameter_);
  }

  void put_back() const { parameter_.set_data(memory_); }

 private:
  at::Tensor parameter_, memory_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
