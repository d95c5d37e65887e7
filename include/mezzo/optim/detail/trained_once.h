#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/dense_memory.h>
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

// What would train a weight twice in a step, or with another scale than it has.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The message for two of `dense` that share memory.
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

/// Two threads would step the same memory at once; or two masters would be rounded into it.
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

/// The parameters that an optimizer was last seen to have: the tensors, whose addresses stay theirs
/// though their memory may go, so that no later tensor can be taken for one of them; and where they
/// lie, for a tensor may be given another's memory.
class SeenParameters {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  SeenParameters() = default;
  explicit SeenParameters(const Groups& groups) { (void)look(groups); }

  /// Whether they are others than at the last look.
  bool look(const Groups& groups) {
    begin();
    for (const auto& group : groups) {
      for (const at::Tensor& parameter : group.params()) see(parameter);
    }
    return end();
  }

  /// The same, for who walks over the parameters anyway: `see` takes each in turn.
  void begin() noexcept {
    next_ = 0;
    is_same_ = true;
  }
  void see(const at::Tensor& parameter) {
    if (next_ == seen_.size()) {
      seen_.emplace_back(parameter);
      is_same_ = false;
    } else if (!seen_[next_].is(parameter)) {
      seen_[next_] = One(parameter);
      is_same_ = false;
    }
    ++next_;
  }
  bool end() {
    is_same_ = is_same_ && next_ == seen_.size();
    seen_.erase(seen_.begin() + static_cast<std::ptrdiff_t>(next_), seen_.end());
    return !is_same_;
  }

  /// So that the next look finds others: what was seen was refused.
  void forget() noexcept { seen_.clear(); }

  /// Whether `groups` hold any of them, in whatever place; of none, whether they hold none. Usually
  /// one comparison, of the first.
  bool any_in(const Groups& groups) const {
    std::unordered_set<const c10::TensorImpl*> known;
    for (const auto& group : groups) {
      for (const at::Tensor& parameter : group.params()) {
        if (seen_.empty()) return false;
        if (seen_.front().address() == parameter.unsafeGetTensorImpl()) return true;
        if (known.empty()) {
          for (const One& one : seen_) known.insert(one.address());
        }
        if (known.count(parameter.unsafeGetTensorImpl()) != 0) return true;
      }
    }
    return seen_.empty();
  }

 private:
  class One {
   public:
    explicit One(const at::Tensor& parameter)
        : tensor_(parameter.getIntrusivePtr()), count_(parameter.numel()) {
      if (!parameter.has_storage()) return;
      storage_ = parameter.storage().unsafeGetStorageImpl();
      offset_ = parameter.storage_offset();
    }
    const c10::TensorImpl* address() const { return tensor_._unsafe_get_target(); }
    bool is(const at::Tensor& parameter) const {
      if (address() != parameter.unsafeGetTensorImpl() || count_ != parameter.numel()) return false;
      if (!parameter.has_storage()) return storage_ == nullptr;
      return storage_ == parameter.storage().unsafeGetStorageImpl() &&
             offset_ == parameter.storage_offset();
    }

   private:
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
    const void* storage_ = nullptr;
    int64_t offset_ = 0;
    int64_t count_ = 0;
  };

  std::vector<One> seen_;
  std::size_t next_ = 0;
  bool is_same_ = true;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
