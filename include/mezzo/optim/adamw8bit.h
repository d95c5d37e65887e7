/// \file
/// AdamW8bit: AdamW with 8-bit moments, in bitsandbytes' format.
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

/// Options of AdamW8bit for all groups, in addition to each group's torch::optim::AdamWOptions.
struct AdamW8bitStateOptions {
  /// Parameters with float32 moments. Include embeddings, as in the paper: small moments of a row
  /// are quantized to 0 if another row of the same block has larger gradients.
  std::vector<at::Tensor> params_with_fp32_state = {};
  /// Seed of the stochastic rounding of bfloat16 parameters.
  std::uint64_t seed = 0;
};

/// Per-parameter state of AdamW8bit. Moments are uint8 with a float32 absmax for each block of 256
/// elements; or float32 with undefined absmax.
struct AdamW8bitParamState : public torch::optim::AdamWParamState {
  /// Maximum magnitude of each block of exp_avg.
  TORCH_ARG(at::Tensor, exp_avg_absmax);
  /// Maximum magnitude of each block of exp_avg_sq.
  TORCH_ARG(at::Tensor, exp_avg_sq_absmax);

 public:
  /// Returns a copy that shares the tensors.
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<AdamW8bitParamState>(*this);
  }
  /// Reads the state.
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

/// AdamW with 8-bit moments (2 bytes per parameter instead of 8), quantized in blocks of 256
/// elements in the format of bitsandbytes' AdamW8bit (Dettmers et al., "8-bit Optimizers via
/// Block-wise Quantization", 2022).
///
/// Parameters are float32 (10 bytes per parameter, gradient included), or bfloat16 with stochastic
/// rounding (6 bytes). A step computes in float32 and rounds moments to the nearest quantized
/// value. Parameters of fewer than 4,096 elements have float32 moments.
///
/// A `torch::optim::Optimizer`: as with torch's optimizers a GradScaler synchronizes once with a
/// GPU. Supports the CPU, and CUDA with the CMake target mezzo::cuda. Results are bitwise identical
/// for any number of threads.
class AdamW8bit : public detail::TorchOptimizerBase<AdamW8bit, torch::optim::AdamWOptions,
                                                    AdamW8bitParamState> {
 public:
  /// \param defaults  options of groups without options
  /// \throws c10::Error for options out of range, amsgrad included, if there is no parameter or one
  ///   appears twice, or for another tensor in `options.params_with_fp32_state`
  explicit AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const torch::optim::AdamWOptions& defaults = {},
                     const AdamW8bitStateOptions& options = {});
  /// Makes one group of `parameters`.
  explicit AdamW8bit(std::vector<at::Tensor> parameters,
                     const torch::optim::AdamWOptions& defaults = {},
                     const AdamW8bitStateOptions& options = {})
      : AdamW8bit(detail::make_single_group(std::move(parameters), kName), defaults, options) {}

  /// Writes options, state and seed.
  void save(torch::serialize::OutputArchive& archive) const override {
    TorchOptimizerBase::save(archive);
    archive.write("seed", c10::IValue(static_cast<int64_t>(seed_)));
  }
  /// Reads what `save` wrote. Moments keep the format of the archive, 8-bit or float32.
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
    TORCH_CHECK(!options.amsgrad(), "AdamW8bit does not support amsgrad; use mezzo::optim::AdamW");
  }
  static void check_extra_keys(torch::serialize::InputArchive& archive) {
    (void)read_seed(archive);
  }
  static std::uint64_t read_seed(torch::serialize::InputArchive& archive) {
    c10::IValue seed;
    TORCH_CHECK(archive.try_read("seed", seed) && seed.isInt(),
                "AdamW8bit: the archive lacks its seed; it is corrupt: load an earlier one");
    return static_cast<std::uint64_t>(seed.toInt());
  }
  static void check_state_matches(bool matches, const at::Tensor& parameter,
                                  const detail::OptimizerDescription& description) {
    TORCH_CHECK(matches, "AdamW8bit: the state of ", description.describe_param(parameter),
                " is not that of a parameter of this shape, layout and device; load the "
                "optimizer's archive, for a model on the device where it was saved");
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
                            const AdamW8bitStateOptions& options)
    : TorchOptimizerBase(groups, defaults), seed_(options.seed) {
  const std::vector<at::Tensor> all = description().parameters();
  for (std::size_t i = 0; i < options.params_with_fp32_state.size(); ++i) {
    const at::Tensor& param = options.params_with_fp32_state[i];
    const auto is_same = [&](const at::Tensor& parameter) { return parameter.is_same(param); };
    TORCH_CHECK(std::any_of(all.begin(), all.end(), is_same), "AdamW8bit: params_with_fp32_state[",
                i,
                "] is not a parameter of this optimizer; use tensors of its groups, such as "
                "embedding->weight");
    params_with_fp32_state_.insert(param.unsafeGetTensorImpl());
  }
}

/// Checks a parameter, its gradient, and the device of its state.
inline void AdamW8bit::check_gradient(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  const at::ScalarType dtype = parameter.scalar_type();
  TORCH_CHECK(
      detail::kernel_backend(parameter.device()) != detail::KernelBackend::aten,
      "AdamW8bit: ", description().describe_param(parameter),
      " is on a device without mezzo kernels; keep the model on the CPU, or on CUDA and link "
      "the CMake target mezzo::cuda");
  detail::check_dense_gradient(parameter, description());
  TORCH_CHECK(
      (dtype == at::kFloat || dtype == at::kBFloat16) &&
          (gradient.scalar_type() == dtype || gradient.scalar_type() == at::kFloat),
      "AdamW8bit supports float32 and bfloat16 parameters with gradients of the same dtype or "
      "float32, and the gradient of ",
      description().describe_param(parameter), " is ", detail::describe(gradient),
      "; cast the model before the optimizer is constructed");
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found == state_.end()) return;
  const auto* const state = dynamic_cast<const AdamW8bitParamState*>(found->second.get());
  const auto is_on_device = [&](const at::Tensor& tensor) {
    return !tensor.defined() || tensor.device() == parameter.device();
  };
  const bool has_state_here =
      state == nullptr ||
      (is_on_device(state->exp_avg()) && is_on_device(state->exp_avg_sq()) &&
       is_on_device(state->exp_avg_absmax()) && is_on_device(state->exp_avg_sq_absmax()));
  check_state_matches(has_state_here, parameter, description());
}

/// Checks shapes, dtypes and layouts of a state, which may be loaded.
inline void AdamW8bit::check_state(const at::Tensor& parameter, const AdamW8bitParamState& state,
                                   const detail::OptimizerDescription& description) {
  const auto fits = [&](const at::Tensor& moment, const at::Tensor& absmax) {
    if (!moment.defined() || moment.sizes() != parameter.sizes() ||
        moment.layout() != at::kStrided || !detail::same_strides(parameter, moment)) {
      return false;
    }
    if (!absmax.defined()) return moment.scalar_type() == at::kFloat;
    return moment.scalar_type() == at::kByte && absmax.scalar_type() == at::kFloat &&
           absmax.is_contiguous() && absmax.numel() == detail::num_quant_blocks(parameter.numel());
  };
  check_state_matches(fits(state.exp_avg(), state.exp_avg_absmax()) &&
                          fits(state.exp_avg_sq(), state.exp_avg_sq_absmax()) &&
                          state.exp_avg_absmax().defined() == state.exp_avg_sq_absmax().defined(),
                      parameter, description);
}

inline AdamW8bitParamState& AdamW8bit::get_or_create_state(const at::Tensor& parameter) {
  auto& state = state_[parameter.unsafeGetTensorImpl()];
  if (state != nullptr) return static_cast<AdamW8bitParamState&>(*state);
  auto created = std::make_unique<AdamW8bitParamState>();
  const bool has_fp32_moments = parameter.numel() < 4096 ||
                                params_with_fp32_state_.count(parameter.unsafeGetTensorImpl()) != 0;
  const auto options = parameter.options().requires_grad(false);
  for (at::Tensor* const moment : {&created->exp_avg(), &created->exp_avg_sq()}) {
    *moment = at::zeros_like(parameter, options.dtype(has_fp32_moments ? at::kFloat : at::kByte),
                             at::MemoryFormat::Preserve);
  }
  if (!has_fp32_moments) {
    for (at::Tensor* const absmax : {&created->exp_avg_absmax(), &created->exp_avg_sq_absmax()}) {
      *absmax = at::zeros({detail::num_quant_blocks(parameter.numel())}, options.dtype(at::kFloat));
    }
  }
  state = std::move(created);
  return static_cast<AdamW8bitParamState&>(*state);
}

inline void AdamW8bit::update() {
  std::vector<std::pair<at::Device, std::vector<detail::AdamW8bitParamArgs>>> by_device;
  std::vector<at::Tensor> gradients;  // kept alive until the kernels have run
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
      const std::uint64_t current_index = param_index++;
      if (!parameter.grad().defined()) continue;
      AdamW8bitParamState& state = get_or_create_state(parameter);
      state.step(state.step() + 1);
      gradients.push_back(detail::with_strides_of(parameter, parameter.grad()));
      const auto absmax_data = [](at::Tensor& tensor) {
        return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
      };
      auto found = std::find_if(by_device.begin(), by_device.end(), [&](const auto& known) {
        return known.first == parameter.device();
      });
      if (found == by_device.end()) {
        found = by_device.insert(found, {parameter.device(), {}});
      }
      found->second.push_back(
          {{.pointers = {parameter.mutable_data_ptr(),
                         const_cast<void*>(gradients.back().const_data_ptr()),
                         {state.exp_avg().mutable_data_ptr(),
                          state.exp_avg_sq().mutable_data_ptr()},
                         parameter.numel()},
            .param_index = static_cast<std::uint32_t>(current_index),
            .parameter_dtype = parameter.scalar_type(),
            .gradient_dtype = gradients.back().scalar_type()},
           {absmax_data(state.exp_avg_absmax()), absmax_data(state.exp_avg_sq_absmax())},
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
