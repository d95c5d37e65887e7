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

/// Optimizers with CUDA kernels.
enum class OptimizerKind : std::uint8_t { adam, sgd, lion };

/// Type-erased arguments of a functor: HyperParams of a group, or Coefficients of one step.
class FunctorArgs {
 public:
  FunctorArgs() = default;
  template <class Args>
  requires std::is_trivially_copyable_v<Args> FunctorArgs(const Args& args) {
    static_assert(sizeof(Args) <= sizeof(bytes_));
    static_assert(alignof(Args) <= alignof(double));
    std::memcpy(bytes_, &args, sizeof(Args));
  }
  template <class Args>
  C10_HOST_DEVICE Args as() const {
    Args args;
    std::memcpy(&args, bytes_, sizeof(Args));
    return args;
  }

 private:
  alignas(double) std::byte bytes_[64] = {};
};

/// Consecutive elements of a parameter with its gradient and state, each of any alignment.
struct ParamPointers {
  void* parameter = nullptr;
  void* gradient = nullptr;
  void* moments[kMaxMoments] = {};  ///< null beyond the functor's kNumMoments
  int64_t numel = 0;
  void* low_bits_or_model_param = nullptr;  ///< int16 of SplitWeightFormat, or a master's weight
  int64_t first_index = 0;                  ///< of the first element; on the CPU a multiple of 256
};

/// Kernel arguments of one parameter.
struct ParamArgs {
  ParamPointers pointers{};
  float* state_step = nullptr;       ///< applied steps, if a device counts them
  std::uint32_t group = 0;           ///< index of the param group
  std::uint32_t param_index = 0;     ///< index among the optimizer's parameters
  bool has_extra_moment = false;     ///< selects the functor with amsgrad or momentum
  bool model_param_is_fp16 = false;  ///< a master's weight is float16; otherwise bfloat16
  optim::WeightStorage storage = optim::WeightStorage::plain;
  at::ScalarType parameter_dtype = at::kFloat;  ///< float32 for a master
  at::ScalarType gradient_dtype = at::kFloat;

  C10_HOST_DEVICE int64_t num_elements() const { return pointers.numel; }
};

/// Factors by which a step multiplies gradients, one after the other.
struct GradMultipliers {
  double first = 1.0;
  double second = 1.0;
};

/// Returns {inv_scale * clip, 1}, or {inv_scale, clip} if the product is subnormal in float32 and
/// would lose bits of precision.
C10_HOST_DEVICE inline GradMultipliers grad_multipliers(double inv_scale, double clip) {
  const double product = inv_scale * clip;
  constexpr double kLeastNormal = 0x1p-126;
  if (product < kLeastNormal) return {inv_scale, clip};
  return {product, 1.0};
}

/// Arguments of a CPU step that all parameters of a group share.
struct StepArgs {
  GradMultipliers multipliers{};
  bool zero_grad = false;  ///< sets gradients to zero after reading them
  uint64_t seed = 0;       ///< of stochastic rounding
  uint64_t step = 1;       ///< 1 in the first step; for stochastic rounding
};

/// A CPU kernel that steps `param` with a functor's Coefficients.
using StepKernelFn = void (*)(const ParamArgs& param, const FunctorArgs& coefficients,
                              const StepArgs& args);

/// Returns the factor that clip_grad_norm_ applies to gradients of this squared norm; NaN for NaN.
C10_HOST_DEVICE inline double clip_coefficient(double norm_sq, double max_norm) {
  if (max_norm == HUGE_VAL) return 1.0;
  const double coefficient = max_norm / (::sqrt(norm_sq) + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
