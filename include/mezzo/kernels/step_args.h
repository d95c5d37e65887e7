#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr int kMaxMoments = 3;

/// The update rules. Some have a second loop (amsgrad, momentum).
enum class OptimizerKind : std::uint8_t { adam, sgd, lion };

/// Memory for a rule's own struct of numbers: the coefficients of one step of one parameter, or the
/// constants of a group. It has one size for all rules.
class FunctorArgs {
 public:
  FunctorArgs() = default;
  template <class Own>
  requires std::is_trivially_copyable_v<Own> FunctorArgs(const Own& own) {
    static_assert(sizeof(Own) <= sizeof(bytes_));
    static_assert(alignof(Own) <= alignof(double));
    std::memcpy(bytes_, &own, sizeof(Own));
  }
  template <class Own>
  C10_HOST_DEVICE Own as() const {
    Own own;
    std::memcpy(&own, bytes_, sizeof(Own));
    return own;
  }

 private:
  alignas(double) std::byte bytes_[64] = {};
};

/// A stretch of one parameter with its gradient and state, each of any alignment.
struct ParamPointers {
  void* parameter = nullptr;
  void* gradient = nullptr;
  void* moments[kMaxMoments] = {};  ///< null beyond the rule's number of moments
  int64_t numel = 0;
  /// SplitWeightFormat: their lower halves. Masters: the weight of 16 bits.
  void* low_bits_or_model_param = nullptr;
  /// The number, in the parameter, of the first element; on the CPU a multiple of
  /// kMinChunkElements.
  int64_t first = 0;
};

/// One parameter's part of a step, as the CPU's loops and the CUDA kernels take it.
struct ParamArgs {
  ParamPointers pointers{};
  float* state_step = nullptr;    ///< number of steps applied so far, where a device counts them
  std::uint32_t group = 0;        ///< number of the parameter's group
  std::uint32_t param_index = 0;  ///< number of the parameter in the optimizer
  bool has_extra_moment =
      false;  ///< selects the second loop of a rule that has two (amsgrad, momentum)
  bool model_param_is_fp16 = false;  ///< a copy of the parameter is half, not bfloat16
  optim::WeightStorage storage = optim::WeightStorage::plain;
  at::ScalarType parameter_dtype = at::kFloat;  ///< of the trained values: float for a master
  at::ScalarType gradient_dtype = at::kFloat;

  C10_HOST_DEVICE int64_t elements() const { return pointers.numel; }
};

/// The two factors of gradients in a step, applied one after the other.
struct GradMultipliers {
  double first = 1.0;
  double second = 1.0;
};

/// Returns {inv_scale * clip, 1}, or {inv_scale, clip} if the product is a subnormal float, which
/// would lose bits.
C10_HOST_DEVICE inline GradMultipliers grad_multipliers(double inv_scale, double clip) {
  const double product = inv_scale * clip;
  constexpr double kLeastNormal = 0x1p-126;
  if (product < kLeastNormal) return {inv_scale, clip};
  return {product, 1.0};
}

/// Options of a step that are not part of the update rule.
struct StepArgs {
  GradMultipliers multipliers{};               ///< of gradients, before use
  bool model_param_is_fp16 = false;            ///< copies of floats are half's, not bfloat16's
  at::ScalarType gradient_dtype = at::kFloat;  ///< where no row has it
  bool zeroes_grad = false;                    ///< on the CPU: sets gradients to zero on the way
  // Stochastic rounding only:
  uint64_t seed = 0;
  uint64_t step = 1;         ///< 1 in the first step
  uint64_t param_index = 0;  ///< its number in the optimizer
};

/// A rule's loop for one way of keeping a parameter; null for a dtype that has none.
using StepKernelFn = void (*)(const ParamPointers&, const FunctorArgs&, const StepArgs&);

/// Returns the factor that clip_grad_norm_ applies to gradients with this sum of squares. A NaN
/// gives NaN, as in clip_grad_norm_.
C10_HOST_DEVICE inline double clip_coefficient(double norm_sq, double max_norm) {
  if (max_norm == HUGE_VAL) return 1.0;
  const double coefficient = max_norm / (::sqrt(norm_sq) + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
