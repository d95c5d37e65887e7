#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/adam_element.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/detail/optimizer_shell.h>
#include <mezzo/optim/detail/param_slot.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <optional>
#include <tuple>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The state that Adam and AdamW keep of a parameter. `Base` is libtorch's.
template <class Own, class Base>
class AdamState : public ParamState<Own, Base> {
 public:
  using ParamState<Own, Base>::ParamState;

  at::Tensor& moment(int k) noexcept override {
    return k == 0 ? Base::exp_avg() : k == 1 ? Base::exp_avg_sq() : Base::max_exp_avg_sq();
  }

 private:
  friend struct MemberTable;
  static auto members(auto& own) {
    return std::tuple{member("exp_avg", own.exp_avg()), member("exp_avg_sq", own.exp_avg_sq()),
                      member("max_exp_avg_sq", own.max_exp_avg_sq())};
  }
};

/// What Adam, and with kIsDecoupled AdamW, says of itself.
template <class Options, class State, bool kIsDecoupled>
struct AdamTraits : OptimizerTraits<AdamTraits<Options, State, kIsDecoupled>, Options, State,
                                    AdamRule<false>, AdamRule<true>> {
  static constexpr const char* kName = kIsDecoupled ? "AdamW" : "Adam";

  static void read(const LibtorchsOr<Options>& options, GroupNumbers& numbers) {
    check_numbers(
        kName,
        {{"lr", options.lr()}, {"eps", options.eps()}, {"weight_decay", options.weight_decay()}},
        options.betas());
    const auto [beta1, beta2] = options.betas();
    numbers.lr = options.lr();
    numbers.constants = AdamConstants{beta1, beta2, options.eps(), options.weight_decay(),
                                      /*is_decoupled=*/kIsDecoupled};
    numbers.is_variant = options.amsgrad();
  }

  static constexpr bool kAtenHasIt = true;
  static void check_for_aten(const GroupNumbers&) {}
  static void aten_step(const GroupNumbers& numbers, const AtenLists& lists,
                        const AtenVerdict& verdict) {
    const auto own = numbers.constants.as<AdamConstants>();
    const auto call = [&](auto step, auto lr) {
      const auto& [means, squares, largest] = lists.moments;
      step(lists.parameters, lists.gradients, means, squares, largest, lists.counts, lr, own.beta1,
           own.beta2, own.weight_decay, own.eps, numbers.is_variant, /*maximize=*/false,
           verdict.grad_scale, verdict.found_inf);
    };
    if (verdict.lr_factor) {
      call(kIsDecoupled ? scheduled_adamw_ : scheduled_adam_, *verdict.lr_factor * numbers.lr);
    } else {
      call(kIsDecoupled ? fused_adamw_ : fused_adam_, numbers.lr);
    }
  }

 private:
  template <class Lr>
  using AtenStep = void (*)(at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                            at::TensorList, at::TensorList, Lr, double, double, double, double,
                            bool, bool, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&);
  static constexpr AtenStep<double> fused_adam_ = &at::_fused_adam_;
  static constexpr AtenStep<double> fused_adamw_ = &at::_fused_adamw_;
  static constexpr AtenStep<const at::Tensor&> scheduled_adam_ = &at::_fused_adam_;
  static constexpr AtenStep<const at::Tensor&> scheduled_adamw_ = &at::_fused_adamw_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
