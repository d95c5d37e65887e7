/// \file
/// AdamW8bit: AdamW with moments of 8 bits, in bitsandbytes' format.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/adamw8bit_cpu.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/optim/detail/torch_optimizer_base.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/arg.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
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
  std::vector<at::Tensor> params_with_fp32_state = {};
  /// Seed of the random bits by which weights of bfloat16 are rounded.
  std::uint64_t seed = 0;
};

/// AdamW8bit's state of a parameter. Moments are codes, in bytes, with a float scale for each block
/// of 256 elements; or floats, with undefined scales.
struct AdamW8bitParamState : public torch::optim::AdamWParamState {
  /// The scales of exp_avg: each is its block's largest magnitude.
  TORCH_ARG(at::Tensor, exp_avg_absmax);
  /// The scales of exp_avg_sq.
  TORCH_ARG(at::Tensor, exp_avg_sq_absmax);

 public:
  /// Returns a copy that shares the tensors.
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<AdamW8bitParamState>(*this);
  }
  /// Reads the state of a file.
  void serialize(torch::serialize::InputArchive& archive) override {
    AdamWParamState::serialize(archive);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_absmax);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq_absmax);
  }
  /// Writes the state.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    AdamWParamState::serialize(archive);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_absmax);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq_absmax);
  }
};

/// AdamW whose moments take 2 bytes a parameter in place of 8: codes of 8 bits in blocks of 256
/// elements, the codes and scales of bitsandbytes' optimizer of this name (Dettmers et al., "8-bit
/// Optimizers via Block-wise Quantization", 2022).
///
/// Weights are float (10 bytes a parameter, its gradient included), or bfloat16, which each step
/// rounds stochastically (6 bytes). A step computes in float and rounds the moments to the nearest
/// code. Parameters of fewer than 4,096 elements keep float moments.
///
/// An ordinary `torch::optim::Optimizer`: a GradScaler waits once for a GPU, as for torch's
/// optimizers. It steps parameters on the CPU, and on CUDA where the CMake target mezzo::cuda is
/// linked. Bits depend on no number of threads.
class AdamW8bit : public detail::TorchOptimizerBase<AdamW8bit, torch::optim::AdamWOptions,
                                                    AdamW8bitParamState> {
 public:
  /// Takes param groups with libtorch's AdamWOptions, and options for those that have none.
  /// \throws c10::Error for options out of range, amsgrad among them, if there is no parameter, or
  ///   one is given twice, or `options.params_with_fp32_state` names another tensor
  explicit AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const torch::optim::AdamWOptions& defaults = {},
                     const AdamW8bitOptions& options = {});
  /// Takes parameters, as one group.
  explicit AdamW8bit(std::vector<at::Tensor> parameters,
                     const torch::optim::AdamWOptions& defaults = {},
                     const AdamW8bitOptions& options = {})
      : AdamW8bit(detail::make_single_group(std::move(parameters), kName), defaults, options) {}

  /// Writes options, state and seed.
  void save(torch::serialize::OutputArchive& archive) const override {
    TorchOptimizerBase::save(archive);
    archive.write("seed", c10::IValue(static_cast<int64_t>(seed_)));
  }
  /// Reads what `save` wrote. A moment goes on as it was saved, in 8 bits or in float.
  void load(torch::serialize::InputArchive& archive) override {
    TorchOptimizerBase::load(archive);
    seed_ = read_seed(archive);
  }

 private:
  friend TorchOptimizerBase;
  static constexpr const char* kName = "AdamW8bit";
  static constexpr const char* kOptionsName = "torch::optim::AdamWOptions";
  static void check_options(const torch::optim::AdamWOptions& options) {
    detail::check_hyperparams(
        kName,
        {{"lr", options.lr()}, {"eps", options.eps()}, {"weight_decay", options.weight_decay()}},
        options.betas());
    TORCH_CHECK(!options.amsgrad(),
                "AdamW8bit: amsgrad is true, for which there is no format of 8 bits; use "
                "mezzo::optim::AdamW");
  }
  static void check_extra_keys(torch::serialize::InputArchive& archive) {
    (void)read_seed(archive);
  }
  static std::uint64_t read_seed(torch::serialize::InputArchive& archive) {
    c10::IValue seed;
    TORCH_CHECK(archive.try_read("seed", seed) && seed.isInt(),
                "AdamW8bit: the archive lacks its seed; it is damaged: load an earlier file");
    return static_cast<std::uint64_t>(seed.toInt());
  }
  static void check_state_fits(bool fits, const at::Tensor& parameter,
                               const detail::OptimizerDescription& description) {
    TORCH_CHECK(fits, "AdamW8bit: the state of ", description.describe(parameter),
                " is not that of a parameter of this shape, layout and device; load the "
                "optimizer's own file, for a model that is where it was");
  }
  inline void check_gradient(const at::Tensor& parameter);
  inline static void check_state(const at::Tensor& parameter, const AdamW8bitParamState& state,
                                 const detail::OptimizerDescription& description);
  inline AdamW8bitParamState& get_or_create_state(const at::Tensor& parameter);
  inline void update();

  std::unordered_set<const c10::TensorImpl*> params_with_fp32_state_;
  std::uint64_t seed_;
};

inline AdamW8bit::AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                            const torch::optim::AdamWOptions& defaults,
                            const AdamW8bitOptions& options)
    : TorchOptimizerBase(groups, defaults), seed_(options.seed) {
  const std::vector<at::Tensor> all = description().parameters();
  for (std::size_t i = 0; i < options.params_with_fp32_state.size(); ++i) {
    const at::Tensor& named = options.params_with_fp32_state[i];
    const auto is_named = [&](const at::Tensor& parameter) { return parameter.is_same(named); };
    TORCH_CHECK(std::any_of(all.begin(), all.end(), is_named), "AdamW8bit: params_with_fp32_state[",
                i,
                "] is no parameter of this optimizer; name tensors of its groups, such as "
                "embedding->weight");
    params_with_fp32_state_.insert(named.unsafeGetTensorImpl());
  }
}

/// Checks a parameter that has a gradient, and where its state is.
inline void AdamW8bit::check_gradient(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  const at::ScalarType dtype = parameter.scalar_type();
  TORCH_CHECK(detail::kernel_backend(parameter.device()) != detail::KernelBackend::aten,
              "AdamW8bit: ", description().describe(parameter),
              " is on a device without mezzo's kernels; keep the "
              "model on the CPU, or on CUDA and link the CMake target mezzo::cuda");
  detail::check_dense_gradient(parameter, description());
  TORCH_CHECK((dtype == at::kFloat || dtype == at::kBFloat16) &&
                  (gradient.scalar_type() == dtype || gradient.scalar_type() == at::kFloat),
              "AdamW8bit takes parameters of float32 or bfloat16 with gradients of the same dtype "
              "or float32, and that of ",
              description().describe(parameter), " is ", detail::describe(gradient),
              "; cast the model before its optimizer is made");
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found == state_.end()) return;
  const auto* const state = dynamic_cast<const AdamW8bitParamState*>(found->second.get());
  const auto fits = [&](const at::Tensor& tensor) {
    return !tensor.defined() || tensor.device() == parameter.device();
  };
  const bool is_here =
      state == nullptr || (fits(state->exp_avg()) && fits(state->exp_avg_sq()) &&
                           fits(state->exp_avg_absmax()) && fits(state->exp_avg_sq_absmax()));
  check_state_fits(is_here, parameter, description());
}

/// Checks a state, which a file may have brought.
inline void AdamW8bit::check_state(const at::Tensor& parameter, const AdamW8bitParamState& state,
                                   const detail::OptimizerDescription& description) {
  const auto fits = [&](const at::Tensor& moment, const at::Tensor& scales) {
    if (!moment.defined() || moment.sizes() != parameter.sizes() ||
        moment.layout() != at::kStrided || !detail::same_strides(parameter, moment)) {
      return false;
    }
    if (!scales.defined()) return moment.scalar_type() == at::kFloat;
    return moment.scalar_type() == at::kByte && scales.scalar_type() == at::kFloat &&
           scales.is_contiguous() && scales.numel() == detail::num_quant_blocks(parameter.numel());
  };
  check_state_fits(fits(state.exp_avg(), state.exp_avg_absmax()) &&
                       fits(state.exp_avg_sq(), state.exp_avg_sq_absmax()) &&
                       state.exp_avg_absmax().defined() == state.exp_avg_sq_absmax().defined(),
                   parameter, description);
}

inline AdamW8bitParamState& AdamW8bit::get_or_create_state(const at::Tensor& parameter) {
  auto& state = state_[parameter.unsafeGetTensorImpl()];
  if (state != nullptr) return static_cast<AdamW8bitParamState&>(*state);
  auto created = std::make_unique<AdamW8bitParamState>();
  const bool has_floats = parameter.numel() < 4096 ||
                          params_with_fp32_state_.count(parameter.unsafeGetTensorImpl()) != 0;
  const auto options = parameter.options().requires_grad(false);
  for (at::Tensor* const moment : {&created->exp_avg(), &created->exp_avg_sq()}) {
    *moment = at::zeros_like(parameter, options.dtype(has_floats ? at::kFloat : at::kByte),
                             at::MemoryFormat::Preserve);
  }
  if (!has_floats) {
    for (at::Tensor* const scales : {&created->exp_avg_absmax(), &created->exp_avg_sq_absmax()}) {
      *scales = at::zeros({detail::num_quant_blocks(parameter.numel())}, options.dtype(at::kFloat));
    }
  }
  state = std::move(created);
  return static_cast<AdamW8bitParamState&>(*state);
}

inline void AdamW8bit::update() {
  std::vector<std::pair<at::Device, std::vector<detail::AdamW8bitParamArgs>>> by_device;
  std::vector<at::Tensor> gradients;  // kept alive
  std::uint64_t param_index = 0;
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    const auto [beta1, beta2] = options.betas();
    const detail::AdamHyperParams hyper_params{.beta1 = beta1,
                                               .beta2 = beta2,
                                               .eps = options.eps(),
                                               .weight_decay = options.weight_decay(),
                                               .is_decoupled = true};
    for (const at::Tensor& parameter : group.params()) {
      const std::uint64_t own_number = param_index++;
      if (!parameter.grad().defined()) continue;
      AdamW8bitParamState& state = get_or_create_state(parameter);
      state.step(state.step() + 1);
      gradients.push_back(detail::with_strides_of(parameter, parameter.grad()));
      const auto scales = [](at::Tensor& tensor) {
        return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
      };
      auto found = std::find_if(by_device.begin(), by_device.end(), [&](const auto& known) {
        return known.first == parameter.device();
      });
      if (found == by_device.end()) {
        found = by_device.insert(found, {parameter.device(), {}});
      }
      found->second.push_back({{.pointers = {parameter.mutable_data_ptr(),
                                             const_cast<void*>(gradients.back().const_data_ptr()),
                                             {state.exp_avg().mutable_data_ptr(),
                                              state.exp_avg_sq().mutable_data_ptr()},
                                             parameter.numel()},
                                .param_index = static_cast<std::uint32_t>(own_number),
                                .parameter_dtype = parameter.scalar_type(),
                                .gradient_dtype = gradients.back().scalar_type()},
                               {scales(state.exp_avg_absmax()), scales(state.exp_avg_sq_absmax())},
                               hyper_params.coefficients(options.lr(), state.step()),
                               {.seed = seed_, .step = static_cast<std::uint64_t>(state.step())}});
      detail::bump_version(parameter);
    }
  }
  for (const auto& [device, steps] : by_device) {
    if (detail::kernel_backend(device) == detail::KernelBackend::cuda) {
      detail::cuda_kernels()->step_adamw8bit_(device, steps);
    } else {
      detail::step_adamw8bit_cpu(steps);
    }
  }
}

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
