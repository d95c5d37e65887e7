/// \file
/// Ema: exponential moving averages of weights.
#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_groups.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/optim/detail/ema_params.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of Ema.
struct EmaOptions {
  /// Coefficient of the average in an update; in [0, 1).
  double decay = 0.999;
  /// Returns the float32 masters to average instead of the parameters, in their order; undefined,
  /// or the parameter, for one without a master. Parameters beyond the returned ones have none.
  /// Called at construction and at each update, since `load` replaces masters. Usually
  /// `[&] { return mezzo::master_params(optimizer); }`.
  std::function<std::vector<at::Tensor>()> masters = nullptr;
};

/// Exponential moving average of each parameter, with any optimizer:
/// `ema.update(scaler.step(optimizer))` after each step.
///
/// Averages are float32 (float64 for float64), on the parameters' device, and start as the weights
/// at construction. An update changes all averages, frozen parameters included. Equals torch's
/// AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) after one
/// update_parameters(model). To average floating buffers, as torch's use_buffers=True, append them
/// to the parameters.
///
/// Holds the parameters, as an optimizer; their values and storage may change. Parameters added
/// later need another Ema. Movable, not copyable. Not thread-safe.
class Ema {
 public:
  /// \throws c10::Error unless decay is in [0, 1), the parameters are dense and floating, and
  ///   masters have the parameters' shapes
  explicit Ema(std::vector<at::Tensor> parameters, EmaOptions options = {});
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;
  /// Moves the averages.
  Ema(Ema&&) = default;
  /// Moves the averages.
  Ema& operator=(Ema&&) = default;
  ~Ema() = default;

  /// Computes averages = decay * averages + (1 - decay) * weights. Asynchronous.
  /// \throws c10::Error, with the strong exception guarantee, if a shape has changed or an EmaGuard
  ///   is alive
  void update();

  /// Updates if the step was applied. Asynchronous: if the device decided the step, it also decides
  /// the update, and that of each replay of a captured CUDA graph (update once before the capture).
  /// \throws c10::Error as `update()`
  void update(const StepResult& result);

  /// Returns the averaged parameters.
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Returns the averages, in the order of the parameters.
  const std::vector<at::Tensor>& averages() const noexcept { return averages_; }

 private:
  friend class EmaGuard;
  void check_parameters() const;
  std::vector<at::Tensor> get_weights() const;
  void lerp_averages(const std::vector<at::Tensor>& averages,
                     const std::vector<at::Tensor>& weights, const at::Tensor& found_inf) const;
  void lerp_all_averages(const at::Tensor& found_inf);

  std::vector<at::Tensor> parameters_;
  EmaOptions options_;
  std::vector<at::Tensor> averages_;
};

inline Ema::Ema(std::vector<at::Tensor> parameters, EmaOptions options)
    : parameters_(std::move(parameters)), options_(std::move(options)), averages_(parameters_) {
  TORCH_CHECK(detail::is_at_least(options_.decay, 0) && options_.decay < 1, "Ema: decay is ",
              options_.decay, "; it should be at least 0 and less than 1");
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    TORCH_CHECK(parameter.defined() && parameter.layout() == at::kStrided &&
                    at::isFloatingType(parameter.scalar_type()),
                "Ema: parameter ", i, " is ", detail::describe(parameter),
                "; it should be a dense tensor of a floating dtype: omit others");
  }
  const detail::NoGradInferenceGuard no_grad;
  const std::vector<at::Tensor> initial = get_weights();
  for (std::size_t i = 0; i < initial.size(); ++i) {
    detail::check_not_capturing(initial[i].device(), "an average");
    averages_[i] = initial[i].detach().to(detail::accum_dtype(initial[i]), /*non_blocking=*/false,
                                          /*copy=*/true);
  }
}

/// \throws c10::Error if a parameter has another shape than its average, or an EmaGuard is alive
inline void Ema::check_parameters() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TORCH_CHECK(!detail::is_averaged(parameters_[i]),
                "Ema: ", detail::describe_param(i, parameters_[i]),
                " holds its average while an EmaGuard is alive; end its scope first");
    TORCH_CHECK(parameters_[i].sizes() == averages_[i].sizes(),
                "Ema: ", detail::describe_param(i, parameters_[i]), " had the shape ",
                averages_[i].sizes(), " when this Ema was constructed; construct a new Ema");
  }
}

/// Returns the tensors to average: the master of each parameter that has one, else the parameter.
inline std::vector<at::Tensor> Ema::get_weights() const {
  check_parameters();
  if (!options_.masters) return parameters_;
  std::vector<at::Tensor> weights = options_.masters();
  TORCH_CHECK(weights.size() <= parameters_.size(), "Ema: options.masters returned ",
              weights.size(), " tensors for ", parameters_.size(),
              " parameters; it should return one for each, undefined where there is no master");
  weights.resize(parameters_.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!weights[i].defined()) weights[i] = parameter;
    if (weights[i].is_same(parameter)) continue;
    // master_params sets the master's gradient, which must not outlive this call.
    if (weights[i].grad().is_same(parameter.grad())) weights[i].mutable_grad() = at::Tensor();
    TORCH_CHECK(weights[i].sizes() == parameter.sizes(),
                "Ema: ", detail::describe_param(i, parameter), " has a master that is ",
                detail::describe(weights[i]),
                "; options.masters should return one of the parameter's shape, or undefined");
  }
  return weights;
}

/// Computes averages += (1 - decay) * (weights - averages) unless `found_inf` (a scalar on any
/// device, or undefined) is nonzero. All tensors have one device and dtype; each pair has the same
/// strides.
inline void Ema::lerp_averages(const std::vector<at::Tensor>& averages,
                               const std::vector<at::Tensor>& weights,
                               const at::Tensor& found_inf) const {
  const double lerp_weight = 1.0 - options_.decay;
  if (!found_inf.defined()) {
    at::_foreach_lerp_(averages, weights, lerp_weight);
    return;
  }
  // This update is SGD with the weights as gradients, weight_decay -1 and lr -lerp_weight. ATen's
  // fused SGD reads found_inf on the device, and writes nothing if it is 1.
  at::_fused_sgd_(averages, weights, {}, /*weight_decay=*/-1.0, /*momentum=*/0.0,
                  /*lr=*/-lerp_weight,
                  /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false,
                  /*is_first_step=*/false, /*grad_scale=*/{},
                  found_inf.to(averages.front().device()).ne(0).to(at::kFloat));
  for (const at::Tensor& average : averages) {  // _fused_sgd_ does not bump versions
    if (!average.is_inference()) average.unsafeGetTensorImpl()->bump_version();
  }
}

/// Updates all averages. Weights that need a conversion are updated one at a time, so that only one
/// copy exists at a time.
inline void Ema::lerp_all_averages(const at::Tensor& found_inf) {
  const detail::NoGradInferenceGuard no_grad;
  const std::vector<at::Tensor> current = get_weights();
  using TensorGroup = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;
  detail::TensorGroups<TensorGroup> groups;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor weight = current[i].detach();
    at::Tensor& average = averages_[i];
    average = average.to(weight.device(),
                         detail::accum_dtype(weight));  // if the parameter was moved or cast
    if (weight.scalar_type() != average.scalar_type() || weight.strides() != average.strides()) {
      lerp_averages({average}, {at::empty_like(average).copy_(weight)}, found_inf);
      continue;
    }
    auto& [averages, weights] = groups.get(average);
    averages.push_back(average);
    weights.push_back(weight);
  }
  for (const auto& [device, dtype, pairs] : groups) {
    lerp_averages(pairs.first, pairs.second, found_inf);
  }
}

inline void Ema::update() { lerp_all_averages({}); }

inline void Ema::update(const StepResult& result) {
  const at::Tensor found_inf = result.found_inf_on_device();
  if (found_inf.defined() || result.applied()) lerp_all_averages(found_inf);
}

/// `torch::save(ema, path)` and `torch::load(ema, path)` save and load the averages, not the decay
/// (include <torch/serialize.h>). Loading throws c10::Error, with the strong exception guarantee,
/// if shapes or dtypes differ.
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const Ema& ema) {
  archive.write("averages", c10::IValue(ema.averages()));
  return archive;
}

namespace detail {

/// Returns the averages of an archive. \throws c10::Error unless they match `ema`
inline std::vector<at::Tensor> read_averages(torch::serialize::InputArchive& archive,
                                             const Ema& ema) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read("averages", value) && value.isTensorList(),
              "This archive is not that of an Ema: it lacks \"averages\"; load what "
              "torch::save(ema, path) wrote");
  std::vector<at::Tensor> averages = value.toTensorVector();
  const std::vector<at::Tensor>& current = ema.averages();
  TORCH_CHECK(averages.size() == current.size(), "The archive of an Ema has ", averages.size(),
              " averages, and this Ema has ", current.size(),
              " parameters; construct it with the parameters that it had when it was saved");
  for (std::size_t i = 0; i < averages.size(); ++i) {
    TORCH_CHECK(averages[i].sizes() == current[i].sizes() &&
                    averages[i].scalar_type() == current[i].scalar_type(),
                "size mismatch for the average of ", describe_param(i, ema.parameters()[i]), ": ",
                describe(averages[i]), " in the checkpoint, ", describe(current[i]),
                " in the current model; build the model as it was when the Ema was saved");
  }
  return averages;
}

}  // namespace detail

/// Loads averages; see operator<<.
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  Ema& ema) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> averages = detail::read_averages(archive, ema);
  for (std::size_t i = 0; i < averages.size(); ++i) ema.averages()[i].copy_(averages[i]);
  return archive;
}

/// Throws what loading the archive would throw, and changes nothing.
inline void check_archive(torch::serialize::InputArchive& archive, const Ema& ema) {
  (void)detail::read_averages(archive, ema);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
