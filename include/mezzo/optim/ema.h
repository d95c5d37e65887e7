/// \file
/// Exponential moving averages of weights, with any optimizer, and a guard that evaluates a model
/// with them.
#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/detail/libtorch_autocast.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/averaged_parameters.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Which averages an Ema keeps.
struct EmaOptions {
  /// The fraction of the average that an update keeps; at least 0 and less than 1.
  double decay = 0.999;
  /// Returns float masters, which are averaged in place of the first parameters: one tensor for
  /// each, in order; undefined, or the parameter itself, for a parameter without master. Called at
  /// construction and at each update, since loading a file replaces masters:
  ///
  ///     mezzo::Ema ema(model->parameters(),
  ///                    {.masters = [&] { return mezzo::master_params(optimizer); }});
  std::function<std::vector<at::Tensor>()> masters = nullptr;
};

/// Keeps an exponential moving average of each parameter. Works with any optimizer.
///
/// \code
///   mezzo::Ema ema(model->parameters(), {.decay = 0.999});
///   ...
///   ema.update(scaler.step(optimizer));  // does nothing if the step was skipped
///   ...
///   {
///     mezzo::EmaScope averaged(ema);
///     evaluate(model);
///   }
/// \endcode
///
/// Averages are float (double for double), on the parameters' device, and start as the weights at
/// construction. An update changes all averages, those of frozen parameters too. Ema computes
/// torch's AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) after one
/// update_parameters(model) at construction. Memory: 4 bytes per element (8 for double).
///
/// To average floating buffers too, as torch's AveragedModel(use_buffers=True) does, append them to
/// the parameters.
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
  /// \throws c10::Error, and changes nothing, if a shape has changed or an EmaScope is alive (the
  ///   parameters then hold averages)
  void update();

  /// Updates if the step ran; changes nothing if it was skipped. Does not wait for the device: if
  /// the device decided on the step, it also decides here, and in each replay of a captured CUDA
  /// graph (update once before the capture). \throws c10::Error as `update()`
  void update(const StepResult& result);

  /// Returns the share of the averages that an update keeps.
  double decay() const noexcept { return options_.decay; }
  /// Returns the averaged parameters.
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Returns the averages, in the order of the parameters.
  const std::vector<at::Tensor>& averages() const noexcept { return averages_; }

 private:
  std::vector<at::Tensor> weights() const;
  void move(const at::Tensor& found_inf);

  std::vector<at::Tensor> parameters_;
  EmaOptions options_;
  std::vector<at::Tensor> averages_;
};

/// Replaces the weights of the parameters by their averages for a scope.
///
/// The constructor gives the parameters other memory, which holds the averages rounded to their
/// dtypes, and takes their gradients away. The destructor gives memory and gradients back,
/// untouched, so training continues bitwise identically, also with whole or split masters. The
/// price is memory for one copy of the weights. Copies and files of the model that are made within
/// the scope have the averaged weights.
///
/// Evaluate within the scope; do not train: what is written to the parameters, and gradients made
/// within the scope, are lost at its end. CheckpointManager (mezzo/checkpoint/checkpoint.h) refuses
/// to save or load such parameters, Ema to update, and another scope to begin on them. Buffers keep
/// their training values: to get batch-norm statistics for the averaged weights, run some batches
/// in training mode, and restore the buffers afterwards. Older views of the parameters and captured
/// CUDA graphs keep using the training weights. No other thread may use the parameters while the
/// guard begins or ends.
class [[nodiscard]] EmaScope {
 public:
  /// \throws c10::Error, and changes nothing, if the shapes of a parameter and its average differ,
  ///   or a parameter holds an average already
  explicit EmaScope(const Ema& ema);
  ~EmaScope();
  EmaScope(const EmaScope&) = delete;
  EmaScope& operator=(const EmaScope&) = delete;

 private:
  /// A parameter, with what it had before.
  struct Lent {
    at::Tensor parameter, memory, gradient;
  };
  std::vector<Lent> lent_;
};

inline Ema::Ema(std::vector<at::Tensor> parameters, EmaOptions options)
    : parameters_(std::move(parameters)), options_(std::move(options)) {
  TORCH_CHECK(detail::is_at_least(options_.decay, 0) && options_.decay < 1, "Ema: decay is ",
              options_.decay, "; it should be at least 0 and less than 1");
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    TORCH_CHECK(parameter.defined() && parameter.layout() == at::kStrided &&
                    at::isFloatingType(parameter.scalar_type()),
                "Ema: parameter ", i, " is ", detail::tensor_words(parameter),
                "; it should be a dense tensor of a floating dtype: leave others out");
  }
  const detail::NoGraphGuard no_graph;
  for (const at::Tensor& weight : weights()) {
    detail::check_is_warm(weight.device(), "an average");
    averages_.push_back(weight.detach().to(detail::wide_dtype(weight), /*non_blocking=*/false,
                                           /*copy=*/true));
  }
}

/// Returns the tensors to average (masters where given), in the order of the parameters.
inline std::vector<at::Tensor> Ema::weights() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TORCH_CHECK(!detail::averaged_parameters().hold(parameters_[i]),
                "Ema: ", detail::parameter_words(i, parameters_[i]),
                " holds its average, for an EmaScope is alive; let that scope end first");
  }
  if (!options_.masters) return parameters_;
  std::vector<at::Tensor> weights = options_.masters();
  TORCH_CHECK(weights.size() <= parameters_.size(), "Ema: options.masters returned ",
              weights.size(), " tensors for ", parameters_.size(),
              " parameters; it should return one for each, undefined where there is no master");
  weights.resize(parameters_.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].defined()) weights[i] = parameters_[i];
    // master_params shows the parameter's gradient at its master, which must not outlive this call.
    const at::Tensor& gradient = weights[i].grad();
    const bool is_shown = gradient.defined() && gradient.is_same(parameters_[i].grad());
    if (is_shown && !weights[i].is_same(parameters_[i])) weights[i].mutable_grad() = at::Tensor();
    TORCH_CHECK(weights[i].sizes() == parameters_[i].sizes(),
                "Ema: ", detail::parameter_words(i, parameters_[i]), " has a master that is ",
                detail::tensor_words(weights[i]),
                "; options.masters should return one of the parameter's shape, or undefined");
  }
  return weights;
}

namespace detail {

/// Computes averages += share * (weights - averages), unless `found_inf` (one element, any device)
/// is nonzero. An undefined `found_inf` means 0. All tensors are of one device and dtype, and the
/// two of a pair have the same layout.
inline void move_averages(const std::vector<at::Tensor>& averages,
                          const std::vector<at::Tensor>& weights, double share,
                          const at::Tensor& found_inf) {
  if (!found_inf.defined()) {
    at::_foreach_lerp_(averages, weights, share);
    return;
  }
  // SGD with the weights as gradients, a weight decay of -1 and a rate of -share is this update.
  // ATen's fused one reads found_inf on the device, and writes nothing where it is 1.
  at::_fused_sgd_(averages, weights, {}, /*weight_decay=*/-1.0, /*momentum=*/0.0, /*lr=*/-share,
                  /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false,
                  /*is_first_step=*/false, /*grad_scale=*/{},
                  found_inf.to(averages.front().device()).ne(0).to(at::kFloat));
  for (const at::Tensor& average : averages) {  // which that does not do
    if (!average.is_inference()) average.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace detail

/// Updates all averages. Weights that need a conversion are updated one at a time, so that only one
/// converted copy exists at any time.
inline void Ema::move(const at::Tensor& found_inf) {
  const detail::NoGraphGuard no_graph;
  const std::vector<at::Tensor> trained = weights();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    TORCH_CHECK(trained[i].sizes() == averages_[i].sizes(),
                "Ema: ", detail::parameter_words(i, trained[i]), " had the shape ",
                averages_[i].sizes(), " when this Ema was made; make a new Ema");
  }
  const double share = 1.0 - options_.decay;
  using Together = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;
  std::map<std::pair<std::string, at::ScalarType>, Together> all;  // by device and dtype
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor weight = trained[i].detach();
    at::Tensor& average = averages_[i];
    average = average.to(weight.device(), detail::wide_dtype(weight));  // if it was moved or cast
    if (weight.scalar_type() != average.scalar_type() || weight.strides() != average.strides()) {
      detail::move_averages({average}, {at::empty_like(average).copy_(weight)}, share, found_inf);
      continue;
    }
    auto& [averages, weights] = all[{average.device().str(), average.scalar_type()}];
    averages.push_back(average);
    weights.push_back(weight);
  }
  for (const auto& [place, some] : all) {
    detail::move_averages(some.first, some.second, share, found_inf);
  }
}

inline void Ema::update() { move({}); }

inline void Ema::update(const StepResult& result) {
  const at::Tensor found_inf = result.found_inf_on_device();
  if (found_inf.defined()) {
    move(found_inf);
  } else if (result.ran()) {
    move({});
  }
}

inline EmaScope::EmaScope(const Ema& ema) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor>& parameters = ema.parameters();
  std::vector<at::Tensor> rounded;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& average = ema.averages()[i];
    TORCH_CHECK(average.sizes() == parameters[i].sizes(),
                "EmaScope: ", detail::parameter_words(i, parameters[i]), " had the shape ",
                average.sizes(), " when its Ema was made; make a new Ema");
    TORCH_CHECK(!detail::averaged_parameters().hold(parameters[i]),
                "EmaScope: ", detail::parameter_words(i, parameters[i]),
                " holds its average already; let the other EmaScope end first");
    rounded.push_back(at::empty_like(parameters[i], parameters[i].options().requires_grad(false)));
    rounded.back().copy_(average);
    lent_.push_back({parameters[i], parameters[i].variable_data(), parameters[i].grad()});
  }
  detail::averaged_parameters().add(parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() = at::Tensor();
    parameters[i].set_data(rounded[i]);  // leaves version and hooks as they are
  }
  detail::drop_weight_casts();
}

/// Does not throw: set_data fails only for a tensor of another kind, and each parameter gets back
/// its own.
inline EmaScope::~EmaScope() {
  const c10::NoGradGuard no_grad;
  for (const Lent& one : lent_) {
    one.parameter.mutable_grad() = at::Tensor();
    one.parameter.set_data(one.memory);
    one.parameter.mutable_grad() = one.gradient;
    detail::averaged_parameters().remove(one.parameter);
  }
  detail::drop_weight_casts();
}

// Templates, as for GradScaler, since the headers of archives take long to compile.

/// Save and load the averages, not the decay: `torch::save(ema, path)`
/// and `torch::load(ema, path)` (include <torch/serialize.h>). Loading \throws c10::Error, and
/// changes nothing, if the shapes differ
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const Ema& ema) {
  archive.write("averages", c10::IValue(ema.averages()));
  return archive;
}

namespace detail {

/// Returns the averages of an archive. \throws c10::Error unless `ema` can take them
template <class Archive>
std::vector<at::Tensor> averages_in(Archive& archive, const Ema& ema) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read("averages", value) && value.isTensorList(),
              "This archive is not that of an Ema: it lacks \"averages\"; load what "
              "torch::save(ema, path) wrote");
  std::vector<at::Tensor> averages = value.toTensorVector();
  const std::vector<at::Tensor>& own = ema.averages();
  TORCH_CHECK(averages.size() == own.size(), "The archive of an Ema has ", averages.size(),
              " averages, and this Ema ", own.size(),
              " parameters; make it with the parameters that it had when it was saved");
  for (std::size_t i = 0; i < averages.size(); ++i) {
    TORCH_CHECK(
        averages[i].sizes() == own[i].sizes() && averages[i].scalar_type() == own[i].scalar_type(),
        "The archive of an Ema has the average ", tensor_words(averages[i]), " for ",
        parameter_words(i, ema.parameters()[i]), ", whose own is ", tensor_words(own[i]),
        "; build the model as it was when the Ema was saved");
  }
  return averages;
}

}  // namespace detail

/// Loads averages; see operator<<.
template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(Archive& archive,
                                                                                   Ema& ema) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> averages = detail::averages_in(archive, ema);
  for (std::size_t i = 0; i < averages.size(); ++i) ema.averages()[i].copy_(averages[i]);
  return archive;
}

/// Throws what loading the archive would throw, and changes nothing.
template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive>
void check_archive(Archive& archive, const Ema& ema) { (void)detail::averages_in(archive, ema); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
