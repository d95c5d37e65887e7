#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/optim/detail/member_table.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Parameters of one group, device and dtype, as ATen's fused optimizers take them; entry i of each
/// list belongs to parameter i.
struct AtenLists {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;  ///< of the parameters' dtype
  std::array<std::vector<at::Tensor>, 3> moments;
  std::vector<at::Tensor> counts;  ///< floats, of this step already
};

/// What ATen's kernels divide gradients by, and whether they are to do nothing; and what multiplies
/// the lr, if there is a schedule: a float there, the only dtype in which CUDA's kernels take it.
struct AtenVerdict {
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> lr_factor;
};

/// What ElementwiseOptimizer asks about an optimizer, as most of them answer; `Own` derives from it
/// and says what is its own:
///   kName, and constants(options), the numbers of a group;
///   check(options), beyond what the list of members says of each option;
///   variant(options), whether a step takes VariantRule in place of Rule (adam_element.h);
///   has_state(options), whether anything is remembered of a parameter;
///   begins(options, state), whether what the state counts begins anew with the next step;
///   kAtenHasIt, and if so check_for_aten(options), which refuses what ATen cannot do, and
///   aten_step(options, lists, verdict).
/// Options and State are what libtorch's serialization wants of them.
template <class Own, class OptionsT, class StateT, class Rule, class VariantRule = Rule>
struct OptimizerTraits {
  using Options = OptionsT;
  using State = StateT;
  using Constants = typename Rule::Constants;        ///< of a group
  using Coefficients = typename Rule::Coefficients;  ///< of one step of one parameter

  static void check(const Options&) {}
  static bool variant(const Options&) { return false; }
  static bool has_state(const Options&) { return true; }
  static bool begins(const Options&, State&) { return false; }
  static constexpr bool kAtenHasIt = false;
  /// Whether a file of libtorch's optimizer holds a count of steps.
  static constexpr bool kLibtorchCounts = true;

  /// The CPU's; null where there is none for these types.
  using Loop = StepFunction<Coefficients>;
  static Loop loop(const Options& options, optim::WeightStorage storage, at::ScalarType kept,
                   at::ScalarType gradient, CpuIsa isa) {
    return Own::variant(options) ? step_function<VariantRule>(storage, kept, gradient, isa)
                                 : step_function<Rule>(storage, kept, gradient, isa);
  }

  /// How many there are.
  static int moments(const Options& options) {
    return Own::variant(options) ? int{VariantRule::kMoments} : int{Rule::kMoments};
  }

  /// The k-th in the state's list of members; the last one where that is shorter.
  static at::Tensor& moment(State& state, int k) {
    at::Tensor* moment = nullptr;
    each_member(state, [&](const auto& member) {
      if (k-- >= 0) moment = &member.value;
    });
    return *moment;
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
