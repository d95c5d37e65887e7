/// \file
/// What ops were given so far. Not for several threads: see WeightStore.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <mezzo/base/version.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Guesses, which cost a cast or a copy when wrong: the address of what died may be another
/// tensor's by now.
class SeenTensors {
 public:
  /// Whether an op was given this tensor, as it is now, already once: a weight comes back, an
  /// activation is gone.
  bool comes_back(const at::Tensor& tensor) {
    static constexpr std::size_t kMostCandidates = 4096;
    const std::pair now(tensor.const_data_ptr(), tensor._version());
    const auto [found, first] = candidates_.try_emplace(tensor.unsafeGetTensorImpl(), now);
    if (!first && found->second == now) {
      candidates_.erase(found);
      return true;
    }
    found->second = now;
    if (candidates_.size() > kMostCandidates) {
      candidates_.clear();
    }
    return false;
  }

  /// Notes that an op asked for a copy of a weight.
  void ask_for(const at::Tensor& weight, at::ScalarType dtype) {
    static constexpr std::size_t kMost = 65536;
    if (asked_for_.size() >= kMost) asked_for_.clear();  // of dead weights; the others come again
    asked_for_.emplace(weight.unsafeGetTensorImpl(), dtype);
  }

  bool is_asked_for(const at::Tensor& weight, at::ScalarType dtype) const {
    return asked_for_.count({weight.unsafeGetTensorImpl(), dtype}) != 0;
  }

 private:
  std::unordered_map<const void*, std::pair<const void*, std::int64_t>> candidates_;
  std::set<std::pair<const c10::TensorImpl*, at::ScalarType>> asked_for_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
