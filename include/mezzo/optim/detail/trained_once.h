#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/optim/detail/optimizer_words.h>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

// Refusing weights that a step would train twice, and noticing when parameters are not those of the
// last step.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Names two tensors of `dense` that share memory, for a message.
inline std::string overlap_words(const std::vector<at::Tensor>& dense,
                                 const OptimizerWords& optimizer) {
  for (std::size_t i = 0; i < dense.size(); ++i) {
    for (std::size_t other = 0; other < i; ++other) {
      if (!may_overlap({dense[i], dense[other]})) continue;
      return c10::str(optimizer.parameter(dense[other]), " and ", optimizer.parameter(dense[i]));
    }
  }
  return "two parameters";
}

/// \throws c10::Error where a parameter is given twice or two share memory: two threads would step
///   the same memory at once, or two masters would be rounded into it
inline void refuse_duplicates(const std::vector<at::Tensor>& all, const OptimizerWords& optimizer) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& parameter : all) {
    TORCH_CHECK(known.insert(parameter.unsafeGetTensorImpl()).second, optimizer, ": ",
                optimizer.parameter(parameter),
                " is given twice, as model->parameters() gives a weight that two modules share; "
                "give it once");
    const bool is_dense = parameter.layout() == at::kStrided;
    if (is_dense && parameter.is_non_overlapping_and_dense()) dense.push_back(parameter);
  }
  TORCH_CHECK(!may_overlap(dense), optimizer, ": ", overlap_words(dense, optimizer),
              " share memory, which a step would change twice; give the tensor once that both are "
              "views of, or clone() one of them");
}

/// Compares the tensors of a walk with those of the walk before:
///
///   seen.begin();
///   for (const at::Tensor& tensor : tensors) seen.see(tensor);
///   const bool are_others = seen.end();
///
/// Weak references keep the tensors' addresses, so that no later tensor is taken for an earlier
/// one. A tensor that was given other memory counts as another.
class WalkedTensors {
 public:
  void begin() noexcept {
    next_ = 0;
    is_same_ = true;
  }
  void see(const at::Tensor& tensor) {
    const bool is_new = next_ == seen_.size();
    if (is_new || !seen_[next_].is(tensor)) {
      is_same_ = false;
      if (is_new) {
        seen_.emplace_back(tensor);
      } else {
        seen_[next_] = One(tensor);
      }
    }
    ++next_;
  }
  bool end() {
    is_same_ = is_same_ && next_ == seen_.size();
    seen_.erase(seen_.begin() + static_cast<std::ptrdiff_t>(next_), seen_.end());
    return !is_same_;
  }

  /// Makes the next walk find others, after the tensors of this one were refused.
  void forget() noexcept { seen_.clear(); }

 private:
  struct One {
    explicit One(const at::Tensor& tensor)
        : address(tensor.getIntrusivePtr()), count(tensor.numel()) {
      if (!tensor.has_storage()) return;
      storage = tensor.storage().unsafeGetStorageImpl();
      offset = tensor.storage_offset();
    }
    bool is(const at::Tensor& tensor) const {
      if (address._unsafe_get_target() != tensor.unsafeGetTensorImpl()) return false;
      if (count != tensor.numel()) return false;
      if (!tensor.has_storage()) return storage == nullptr;
      return storage == tensor.storage().unsafeGetStorageImpl() &&
             offset == tensor.storage_offset();
    }

    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> address;
    const void* storage = nullptr;
    int64_t offset = 0;
    int64_t count = 0;
  };

  std::vector<One> seen_;
  std::size_t next_ = 0;
  bool is_same_ = true;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
