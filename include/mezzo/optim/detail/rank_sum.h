#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

// A gradient that was added up over the ranks stands for their average. The division is left to
// whoever multiplies the gradient anyway, with the inverse loss scale say; until then the parameter
// knows that its gradient is a sum, so that every reader finds out, and no two divide.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What a parameter knows of its gradient. Means nothing while that is undefined: `zero_grad` has
/// taken the sum away.
struct RankSum {
  int ranks = 1;         ///< as many times too large is the gradient
  bool is_taken = true;  ///< somebody who divides has asked
};

/// Among the parameter's hooks, which run before autograd adds to its gradient: a sum that is
/// reduced once more with what is added would count once for each rank, an average would not.
class RankSumHook {
 public:
  explicit RankSumHook(const at::Tensor& parameter)
      : parameter_(parameter.getIntrusivePtr()), sum_(std::make_shared<RankSum>()) {}

  at::TensorBase operator()(const at::TensorBase& /*gradient*/) const {
    if (sum_->ranks > 1) average(at::Tensor(parameter_.lock()), *sum_);
    return {};  // leaves what comes as it is
  }

  /// Null where no gradient of `parameter` has been a sum yet.
  static RankSum* find(const at::Tensor& parameter) {
    const auto* const meta = torch::autograd::impl::get_autograd_meta(parameter);
    if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return nullptr;
    for (auto& hook : *meta->cpp_hooks_list_) {
      if (const auto* const own = hook.template target<RankSumHook>()) return own->sum_.get();
    }
    return nullptr;
  }

  /// `parameter` requires grad.
  static RankSum& find_or_make(const at::Tensor& parameter) {
    if (RankSum* const known = find(parameter)) return *known;
    const RankSumHook hook(parameter);
    static_cast<const at::TensorBase&>(parameter).register_hook(hook);
    return *hook.sum_;
  }

  static void average(const at::Tensor& parameter, RankSum& sum) {
    const int ranks = std::exchange(sum.ranks, 1);
    if (!parameter.grad().defined()) return;
    const c10::NoGradGuard no_grad;
    parameter.mutable_grad().mul_(1. / ranks);
    sum.is_taken = true;
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter_;
  std::shared_ptr<RankSum> sum_;  // hooks are copied
};

/// `parameter`'s gradient is a sum over so many ranks from here on. Returns whether somebody had
/// taken the last one.
inline bool note_rank_sum(const at::Tensor& parameter, int ranks) {
  RankSum& sum = RankSumHook::find_or_make(parameter);
  sum.ranks = ranks;
  return std::exchange(sum.is_taken, false);
}

/// The gradients of `parameters` have been divided, or are zero.
inline void forget_rank_sums(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (RankSum* const sum = RankSumHook::find(parameter)) sum->ranks = 1;
  }
}

/// Divides in place what is still to be divided.
inline void average_rank_sum(const at::Tensor& parameter) {
  RankSum* const sum = RankSumHook::find(parameter);
  if (sum != nullptr && sum->ranks > 1) RankSumHook::average(parameter, *sum);
}
inline void average_rank_sums(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) average_rank_sum(parameter);
}

/// What the gradients of `parameters` are to be multiplied by: 1 / ranks, where all that there are
/// are sums over as many ranks; otherwise 1, and those that were sums have been divided in place.
/// Whoever multiplies in place says so with `forget_rank_sums`.
inline double rank_sum_factor(const std::vector<at::Tensor>& parameters) {
  int ranks = 0;
  bool is_one = true;
  std::vector<RankSum*> sums;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    RankSum* const sum = RankSumHook::find(parameter);
    const int own = sum == nullptr ? 1 : sum->ranks;
    is_one = is_one && (ranks == 0 || ranks == own);
    ranks = own;
    if (sum != nullptr) sums.push_back(sum);
  }
  if (!is_one) {
    average_rank_sums(parameters);
    return 1.;
  }
  for (RankSum* const sum : sums) sum->is_taken = true;
  return ranks > 1 ? 1. / ranks : 1.;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
