/// \file
/// Exponential moving averages of weights, with any optimizer, and a guard that evaluates a model
/// with them.
#pragma once

#include <mezzo/base/detail/autocast_mode.h>
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

/// Which averages an Ema keeps.
struct EmaOptions {
  /// The fraction of the average that an update keeps; at least 0 and less than 1.
  double decay = 0.999;
  /// Returns float masters, which are averaged in place of the first parameters: one tensor for
  /// each, in order; undefined, or the parameter itself, for a parameter without master. Called at
  /// construction and at each update, since loading a file replaces masters: usually
  /// `[&] { return mezzo::master_params(optimizer); }`.
  std::function<std::vector<at::Tensor>()> masters = nullptr;
};

/// Keeps an exponential moving average of each parameter, beside any optimizer:
/// `ema.update(scaler.step(optimizer))` after each step.
///
/// Averages are float (double for double), on the parameters' device, and start as the weights at
/// construction. An update changes all averages, those of frozen parameters too. Ema computes
/// torch's AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) after one
/// update_parameters(model) at construction. To average floating buffers too, as torch's
/// use_buffers=True does, append them to the parameters.
///
/// Holds the parameters, as an optimizer does: they may be written and given other memory.
/// Parameters that are added later need another Ema. Movable, not copyable. One thread at a time.
class Ema {
 public:
  /// \throws c10::Error unless decay is in [0, 1), the parameters are dense and floating, and
  ///   masters, if given, are no more than the parameters and of their shapes
  explicit Ema(std::vector<at::Tensor> parameters, EmaOptions options = {});
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;
  /// Takes the averages over.
  Ema(Ema&&) = default;
  /// Takes the averages over, and drops its own.
  Ema& operator=(Ema&&) = default;
  ~Ema() = default;

  /// Computes averages = decay * averages + (1 - decay) * weights. Does not wait for a device.
  /// \throws c10::Error, and changes nothing, if a shape has changed or an EmaGuard is alive (the
  ///   parameters then hold averages)
  void update();

  /// Updates if the step ran; changes nothing if it was skipped. Does not wait for the device: if
  /// the device decided on the step, it also decides here, and in each replay of a captured CUDA
  /// graph (update once before the capture). \throws c10::Error as `update()`
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
                "; it should be a dense tensor of a floating dtype: leave others out");
  }
  const detail::NoGradInferenceGuard no_graph;
  const std::vector<at::Tensor> begin = get_weights();
  for (std::size_t i = 0; i < begin.size(); ++i) {
    detail::check_not_capturing(begin[i].device(), "an average");
    averages_[i] = begin[i].detach().to(detail::accum_dtype(begin[i]), /*non_blocking=*/false,
                                        /*copy=*/true);
  }
}

/// \throws c10::Error if a parameter has another shape than its average, or holds it
inline void Ema::check_parameters() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TORCH_CHECK(!detail::is_averaged(parameters_[i]),
                "Ema: ", detail::describe_param(i, parameters_[i]),
                " holds its average, for an EmaGuard is alive; let that scope end first");
    TORCH_CHECK(parameters_[i].sizes() == averages_[i].sizes(),
                "Ema: ", detail::describe_param(i, parameters_[i]), " had the shape ",
                averages_[i].sizes(), " when this Ema was made; make a new Ema");
  }
}

/// Returns the tensors to average (masters where given), in the order of the parameters.
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
    // master_params shows the parameter's gradient at its master, which must not outlive this call.
    if (weights[i].grad().is_same(parameter.grad())) weights[i].mutable_grad() = at::Tensor();
    TORCH_CHECK(weights[i].sizes() == parameter.sizes(),
                "Ema: ", detail::describe_param(i, parameter), " has a master that is ",
                detail::describe(weights[i]),
                "; options.masters should return one of the parameter's shape, or undefined");
  }
  return weights;
}

/// Computes averages += lerp_weight * (weights - averages), unless `found_inf` (one element, any
/// device) is nonzero. An undefined `found_inf` means 0. All tensors are of one device and dtype,
/// and the two of a pair have the same layout.
inline void Ema::lerp_averages(const std::vector<at::Tensor>& averages,
                               const std::vector<at::Tensor>& weights,
                               const at::Tensor& found_inf) const {
  const double lerp_weight = 1.0 - options_.decay;
  if (!found_inf.defined()) {
    at::_foreach_lerp_(averages, weights, lerp_weight);
    return;
  }
  // SGD with the weights as gradients, a weight decay of -1 and a rate of -lerp_weight is this
  // update. ATen's fused one reads found_inf on the device, and writes nothing where it is 1.
  at::_fused_sgd_(averages, weights, {}, /*weight_decay=*/-1.0, /*momentum=*/0.0,
                  /*lr=*/-lerp_weight,
                  /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false,
                  /*is_first_step=*/false, /*grad_scale=*/{},
                  found_inf.to(averages.front().device()).ne(0).to(at::kFloat));
  for (const at::Tensor& average : averages) {  // which that does not do
    if (!average.is_inference()) average.unsafeGetTensorImpl()->bump_version();
  }
}

/// Updates all averages. Weights that need a conversion are updated one at a time, so that only one
/// converted copy exists at any time.
inline void Ema::lerp_all_averages(const at::Tensor& found_inf) {
  const detail::NoGradInferenceGuard no_graph;
  const std::vector<at::Tensor> trained = get_weights();
  using TensorGroup = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;
  detail::TensorGroups<TensorGroup> all;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor weight = trained[i].detach();
    at::Tensor& average = averages_[i];
    average = average.to(weight.device(), detail::accum_dtype(weight));  // if it was moved or cast
    if (weight.scalar_type() != average.scalar_type() || weight.strides() != average.strides()) {
      lerp_averages({average}, {at::empty_like(average).copy_(weight)}, found_inf);
      continue;
    }
    auto& [averages, weights] = all.get(average);
    averages.push_back(average);
    weights.push_back(weight);
  }
  for (const auto& [device, dtype, some] : all) lerp_averages(some.first, some.second, found_inf);
}

inline void Ema::update() { lerp_all_averages({}); }

inline void Ema::update(const StepResult& result) {
  const at::Tensor found_inf = result.found_inf_on_device();
  if (found_inf.defined() || result.applied()) lerp_all_averages(found_inf);
}

/// Replaces the weights of the parameters by their averages for a scope.
///
/// The constructor gives the parameters other memory, which holds the averages rounded to their
/// dtypes, and takes their gradients away. The destructor gives memory and gradients back,
/// untouched, so training continues bitwise identically, also with whole or split masters. The
/// price is memory for one copy of the weights.
///
/// Evaluate within the scope; do not train: what is written to the parameters, and gradients made
/// within the scope, are lost at its end. CheckpointManager (mezzo/checkpoint/checkpoint.h) refuses
/// to save or load such parameters, Ema to update, and another scope to begin on them. Buffers keep
/// their training values: to get batch-norm statistics for the averaged weights, run some batches
/// in training mode, and restore the buffers afterwards. Older views of the parameters and captured
/// CUDA graphs keep using the training weights. No other thread may use the parameters while the
/// guard begins or ends.
class [[nodiscard]] EmaGuard {
 public:
  /// \throws c10::Error, and changes nothing, if the shapes of a parameter and its average differ,
  ///   or a parameter holds an average already
  explicit EmaGuard(const Ema& ema) {
    const c10::NoGradGuard no_grad;
    ema.check_parameters();
    std::vector<at::Tensor> rounded;
    for (std::size_t i = 0; i < ema.parameters().size(); ++i) {
      const at::Tensor& parameter = ema.parameters()[i];
      rounded.push_back(at::empty_like(parameter, parameter.options().requires_grad(false)));
      rounded.back().copy_(ema.averages()[i]);
      saved_.push_back({parameter, parameter.variable_data(), parameter.grad()});
    }
    detail::averaged_parameters().withLock([&](auto& all) {
      for (const SavedTensors& tensors : saved_)
        all.insert(tensors.parameter.unsafeGetTensorImpl());
    });
    for (std::size_t i = 0; i < rounded.size(); ++i) {
      saved_[i].parameter.mutable_grad() = at::Tensor();
      saved_[i].parameter.set_data(rounded[i]);  // leaves version and hooks as they are
    }
    detail::clear_autocast_cache();
  }
  /// Does not throw: set_data fails only for a tensor of another kind, and each parameter gets back
  /// its own.
  ~EmaGuard() {
    const c10::NoGradGuard no_grad;
    for (const SavedTensors& tensors : saved_) {
      tensors.parameter.mutable_grad() = at::Tensor();
      tensors.parameter.set_data(tensors.memory);
      tensors.parameter.mutable_grad() = tensors.gradient;
    }
    detail::averaged_parameters().withLock([&](auto& all) {
      for (const SavedTensors& tensors : saved_) all.erase(tensors.parameter.unsafeGetTensorImpl());
    });
    detail::clear_autocast_cache();
  }
  EmaGuard(const EmaGuard&) = delete;
  EmaGuard& operator=(const EmaGuard&) = delete;

 private:
  /// A parameter, with what it had before.
  struct SavedTensors {
    at::Tensor parameter, memory, gradient;
  };
  std::vector<SavedTensors> saved_;
};

/// Save and load the averages, not the decay: `torch::save(ema, path)` and `torch::load(ema, path)`
/// (include <torch/serialize.h>). Loading \throws c10::Error, and changes nothing, if the shapes
/// differ
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const Ema& ema) {
  archive.write("averages", c10::IValue(ema.averages()));
  return archive;
}

namespace detail {

/// Returns the averages of an archive. \throws c10::Error unless `ema` can take them
inline std::vector<at::Tensor> read_averages(torch::serialize::InputArchive& archive,
                                             const Ema& ema) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read("averages", value) && value.isTensorList(),
              "This archive is not that of an Ema: it lacks \"averages\"; load what "
              "torch::save(ema, path) wrote");
  std::vector<at::Tensor> averages = value.toTensorVector();
  const std::vector<at::Tensor>& current = ema.averages();
  TORCH_CHECK(averages.size() == current.size(), "The archive of an Ema has ", averages.size(),
              " averages, and this Ema ", current.size(),
              " parameters; make it with the parameters that it had when it was saved");
  for (std::size_t i = 0; i < averages.size(); ++i) {
    TORCH_CHECK(averages[i].sizes() == current[i].sizes() &&
                    averages[i].scalar_type() == current[i].scalar_type(),
                "The archive of an Ema has the average ", describe(averages[i]), " for ",
                describe_param(i, ema.parameters()[i]), ", whose own is ", describe(current[i]),
                "; build the model as it was when the Ema was saved");
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
