/// \file
/// AdamW8bit: AdamW with moments of 8 bits, in bitsandbytes' format.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/ordinary_optimizer.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// What AdamW8bit takes beside AdamW's options.
struct AdamW8bitOptions {
  /// Parameters whose moments stay float. Name embeddings here, as the paper does: a row's moments
  /// are lost beside a row with larger gradients in the same block.
  std::vector<at::Tensor> float_moments = {};
  /// Seed of the random bits by which weights of bfloat16 are rounded.
  std::uint64_t seed = 0;
};

/// AdamW8bit's state of a parameter. Moments are codes, in bytes, with a float scale for each block
/// of 256 elements; or floats, with undefined scales.
struct AdamW8bitParamState : public torch::optim::AdamWParamState {
  /// The scales of exp_avg: each is its block's largest magnitude.
  TORCH_ARG(at::Tensor, exp_avg_scales);
  /// The scales of exp_avg_sq.
  TORCH_ARG(at::Tensor, exp_avg_sq_scales);

 public:
  /// Returns a copy that shares the tensors.
  MEZZO_INLINE std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  /// Reads the state of a file.
  MEZZO_INLINE void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes the state.
  MEZZO_INLINE void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// AdamW whose moments take 2 bytes a parameter in place of 8: codes of 8 bits in blocks of 256
/// elements, the codes and scales of bitsandbytes' optimizer of this name (Dettmers et al., "8-bit
/// Optimizers via Block-wise Quantization", 2022).
///
/// \code
///   mezzo::optim::AdamW8bit optimizer(model->parameters(),
///                                     torch::optim::AdamWOptions(2e-5).weight_decay(0.01),
///                                     {.float_moments = embedding->parameters()});
/// \endcode
///
/// Weights are float (10 bytes a parameter, its gradient included), or bfloat16, which each step
/// rounds stochastically (6 bytes). A step computes in float and rounds the moments to the nearest
/// code. Parameters of fewer than 4,096 elements keep float moments.
///
/// An ordinary `torch::optim::Optimizer`: a GradScaler waits once for a GPU, as for torch's
/// optimizers. It steps parameters on the CPU, and on CUDA where the CMake target mezzo::cuda is
/// linked. Bits depend on no number of threads.
class AdamW8bit
    : public detail::OrdinaryOptimizer<AdamW8bit, torch::optim::AdamWOptions, AdamW8bitParamState> {
 public:
  /// Takes param groups with libtorch's AdamWOptions, and options for those that have none.
  /// \throws c10::Error for options out of range, amsgrad among them, if there is no parameter, or
  ///   one is given twice, or `options.float_moments` names another tensor
  MEZZO_INLINE explicit AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                  const torch::optim::AdamWOptions& defaults = {},
                                  const AdamW8bitOptions& options = {});
  /// Takes parameters, as one group.
  explicit AdamW8bit(std::vector<at::Tensor> parameters,
                     const torch::optim::AdamWOptions& defaults = {},
                     const AdamW8bitOptions& options = {})
      : AdamW8bit(std::vector<torch::optim::OptimizerParamGroup>{std::move(parameters)}, defaults,
                  options) {
    detail::check_has_parameters(!param_groups_.front().params().empty(), kName);
  }

  /// Writes options, state and seed.
  MEZZO_INLINE void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads what `save` wrote. A moment goes on as it was saved, in 8 bits or in float.
  MEZZO_INLINE void load(torch::serialize::InputArchive& archive) override;

 private:
  friend OrdinaryOptimizer;
  static constexpr const char* kName = "AdamW8bit";
  static constexpr const char* kOptions = "torch::optim::AdamWOptions";
  MEZZO_INLINE static void check_options(const torch::optim::AdamWOptions& options);
  MEZZO_INLINE void check_gradient(const at::Tensor& parameter);
  MEZZO_INLINE AdamW8bitParamState& made_state(const at::Tensor& parameter);
  MEZZO_INLINE void update();

  std::unordered_set<const c10::TensorImpl*> float_moments_;
  std::uint64_t seed_;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/optim/detail/adamw8bit_impl.h>  // IWYU pragma: export
#endif
