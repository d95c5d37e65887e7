/// \file
/// Ema: exponential moving averages of weights.
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
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Limits the decay of the first updates, while the averages are still those of early weights. n is
/// the number of the update, from 1, skipped steps not counted.
enum class EmaWarmup {
  none,         ///< decay
  num_updates,  ///< min(decay, (1 + n) / (10 + n)): TensorFlow's num_updates, diffusers' default
  power         ///< min(decay, 1 - (1 + n / inv_gamma)^-power): diffusers' use_ema_warmup
};

/// Options of Ema.
struct EmaOptions {
  /// Coefficient of the average in an update; in [0, 1).
  double decay = 0.999;
  EmaWarmup warmup = EmaWarmup::none;  ///< how the decay rises
  double inv_gamma = 1;                ///< of EmaWarmup::power
  double power = 2.0 / 3;              ///< of EmaWarmup::power
  /// Returns the decay of update n, from 0 to 1, instead of `decay` and `warmup`. `update` then
  /// synchronizes if a device decided the step, and cannot be captured.
  std::function<double(int64_t n)> decay_function = nullptr;
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
/// update_parameters(model), and diffusers' EMAModel after one step(). To average floating buffers,
/// as torch's use_buffers=True, append them to the parameters.
///
/// Holds the parameters, as an optimizer; their values and storage may change. Parameters added
/// later need another Ema. Movable, not copyable. Not thread-safe.
class Ema {
 public:
  /// \throws c10::Error unless decay is in [0, 1), inv_gamma and power are positive, the parameters
  ///   are dense and floating, and masters have the parameters' shapes; for a warmup and a
  ///   decay_function
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
  /// Returns the number of updates; 0 with a constant decay, which does not depend on it.
  /// Synchronizes if a device decided a step.
  int64_t num_updates() const { return num_updates_.item<int64_t>(); }

  /// Copies the averages into `destination`, a model with the names and shapes of `model`, rounded
  /// to its dtypes. Copies tensors of `model` without an average, such as buffers, as they are: the
  /// result is torch's `AveragedModel.module`. Asynchronous.
  /// \throws c10::Error, with the strong exception guarantee, if names or shapes differ, `model`
  ///   has no averaged parameter, or an EmaGuard is alive
  void copy_to(const torch::nn::Module& model, torch::nn::Module& destination) const;

  /// Loads averages; see operator<<.
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    Ema& ema);

 private:
  friend class EmaGuard;
  bool has_constant_decay() const {
    return options_.warmup == EmaWarmup::none && !options_.decay_function;
  }
  at::Tensor compute_lerp_weight(at::ScalarType dtype) const;
  void check_parameters() const;
  std::vector<at::Tensor> get_weights() const;
  void lerp_averages(const std::vector<at::Tensor>& averages,
                     const std::vector<at::Tensor>& weights, const at::Tensor& lerp_weight,
                     const at::Tensor& found_inf) const;
  void lerp_all_averages(const at::Tensor& lerp_weight, const at::Tensor& found_inf = {});
  void update_on_device(const at::Tensor& found_inf);

  std::vector<at::Tensor> parameters_;
  EmaOptions options_;
  std::vector<at::Tensor> averages_;
  at::Tensor num_updates_;  // an int64 scalar on the device that decides steps
};

inline Ema::Ema(std::vector<at::Tensor> parameters, EmaOptions options)
    : parameters_(std::move(parameters)), options_(std::move(options)), averages_(parameters_) {
  TORCH_CHECK(detail::is_at_least(options_.decay, 0) && options_.decay < 1, "Ema: decay is ",
              options_.decay, "; it should be at least 0 and less than 1");
  for (const auto& [name, value] :
       {std::pair("inv_gamma", options_.inv_gamma), std::pair("power", options_.power)}) {
    TORCH_CHECK(detail::is_above(value, 0) && !detail::is_nonfinite(value), "Ema: ", name, " is ",
                value, "; it should be positive and finite");
  }
  TORCH_CHECK(!options_.decay_function || options_.warmup == EmaWarmup::none,
              "Ema: warmup and decay_function are both set; set one of them");
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    TORCH_CHECK(parameter.defined() && parameter.layout() == at::kStrided &&
                    at::isFloatingType(parameter.scalar_type()),
                "Ema: parameter ", i, " is ", detail::describe(parameter),
                "; it should be a dense tensor of a floating dtype: omit others");
  }
  const detail::NoGradInferenceGuard no_grad;
  num_updates_ = at::scalar_tensor(0, at::kLong);
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

/// Returns 1 - decay of the next update: on the device of the count, or on the CPU if constant.
inline at::Tensor Ema::compute_lerp_weight(at::ScalarType dtype) const {
  if (has_constant_decay()) return at::scalar_tensor(1.0 - options_.decay, at::kDouble);
  const at::Tensor n = num_updates_.to(dtype).add(1);
  const at::Tensor weight = options_.warmup == EmaWarmup::num_updates
                                ? n.add(10).reciprocal().mul(9)
                                : n.div(options_.inv_gamma).add(1).pow(-options_.power);
  return weight.clamp_min(1.0 - options_.decay);
}

/// Computes averages += lerp_weight * (weights - averages) unless `found_inf` (a scalar on any
/// device, or undefined) is nonzero. All tensors have one device and dtype; each pair has the same
/// strides.
inline void Ema::lerp_averages(const std::vector<at::Tensor>& averages,
                               const std::vector<at::Tensor>& weights,
                               const at::Tensor& lerp_weight, const at::Tensor& found_inf) const {
  if (!found_inf.defined()) {
    at::_foreach_lerp_(averages, weights, lerp_weight.item());
    return;
  }
  // This update is SGD with the weights as gradients, weight_decay -1 and lr -lerp_weight. ATen's
  // fused SGD reads found_inf on the device, and writes nothing if it is 1.
  const at::Device device = averages.front().device();
  const auto step = [&](const auto& lr) {
    at::_fused_sgd_(averages, weights, {}, /*weight_decay=*/-1.0, /*momentum=*/0.0, lr,
                    /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false,
                    /*is_first_step=*/false, /*grad_scale=*/{},
                    found_inf.to(device).ne(0).to(at::kFloat));
  };
  has_constant_decay() ? step(-lerp_weight.item<double>()) : step(lerp_weight.to(device).neg());
  for (const at::Tensor& average : averages) {  // _fused_sgd_ does not bump versions
    if (!average.is_inference()) average.unsafeGetTensorImpl()->bump_version();
  }
}

/// Updates all averages. Weights that need a conversion are updated one at a time, so that only one
/// copy exists at a time.
inline void Ema::lerp_all_averages(const at::Tensor& lerp_weight, const at::Tensor& found_inf) {
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
      lerp_averages({average}, {at::empty_like(average).copy_(weight)}, lerp_weight, found_inf);
      continue;
    }
    auto& [averages, weights] = groups.get(average);
    averages.push_back(average);
    weights.push_back(weight);
  }
  for (const auto& [device, dtype, pairs] : groups) {
    lerp_averages(pairs.first, pairs.second, lerp_weight, found_inf);
  }
}

inline void Ema::update() {
  if (has_constant_decay()) return lerp_all_averages(compute_lerp_weight(at::kDouble));
  if (!options_.decay_function && !num_updates_.is_cpu()) {
    return update_on_device(at::zeros({}, num_updates_.options().dtype(at::kFloat)));
  }
  TORCH_CHECK(averages_.empty() || detail::current_capture_id(averages_.front().device()) == 0,
              "Ema: each replay of the captured CUDA graph would repeat this update's decay; pass "
              "the result of a step that the device decides, or update after the replay");
  const int64_t n = num_updates() + 1;
  at::Tensor lerp_weight;
  if (options_.decay_function) {
    const double decay = options_.decay_function(n);
    TORCH_CHECK(detail::is_at_least(decay, 0) && decay <= 1, "Ema: decay_function(", n,
                ") returned ", decay, "; it should return a decay from 0 to 1");
    lerp_weight = at::scalar_tensor(1.0 - decay, at::kDouble);
  } else {
    lerp_weight = compute_lerp_weight(at::kDouble);
  }
  lerp_all_averages(lerp_weight);
  num_updates_.fill_(n);
}

inline void Ema::update(const StepResult& result) {
  const at::Tensor found_inf = result.found_inf_on_device();
  if (found_inf.defined() && !options_.decay_function) return update_on_device(found_inf);
  if (result.applied()) update();
}

/// Updates unless `found_inf` is nonzero. Asynchronous.
inline void Ema::update_on_device(const at::Tensor& found_inf) {
  const detail::NoGradInferenceGuard no_grad;
  if (!has_constant_decay() && num_updates_.device() != found_inf.device()) {
    detail::check_not_capturing(found_inf.device(), "the count of updates");
    num_updates_ =
        at::full({}, num_updates(), at::device(found_inf.device()).dtype(at::kLong));  // no sync
  }
  lerp_all_averages(compute_lerp_weight(at::kFloat), found_inf);
  if (!has_constant_decay()) num_updates_.add_(found_inf.reshape({}).eq(0));
}

inline void Ema::copy_to(const torch::nn::Module& model, torch::nn::Module& destination) const {
  const c10::NoGradGuard no_grad;
  check_parameters();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  bool has_average = false;
  const auto add = [&](const auto& from, const auto& to) {
    TORCH_CHECK(from.size() == to.size(), "Ema::copy_to: the model has ", from.size(),
                " parameters or buffers, and the destination ", to.size(),
                "; construct the destination as the model");
    for (const auto& item : from) {
      const at::Tensor* const target = to.find(item.key());
      TORCH_CHECK(target != nullptr && target->sizes() == item.value().sizes(),
                  "Ema::copy_to: the destination has no ", item.key(), " of the shape ",
                  item.value().sizes(), "; construct the destination as the model");
      const auto found = std::ranges::find_if(parameters_, [&](const at::Tensor& parameter) {
        return parameter.is_same(item.value());
      });
      has_average |= found != parameters_.end();
      copies.emplace_back(*target,
                          found == parameters_.end()
                              ? item.value()
                              : averages_[static_cast<std::size_t>(found - parameters_.begin())]);
    }
  };
  add(model.named_parameters(), destination.named_parameters());
  add(model.named_buffers(), destination.named_buffers());
  TORCH_CHECK(has_average,
              "Ema::copy_to: the model has no parameter of this Ema; pass the model whose "
              "parameters are averaged, then the destination");
  for (const auto& [to, from] : copies) to.copy_(from);
  detail::clear_autocast_cache();
}

/// `torch::save(ema, path)` and `torch::load(ema, path)` save and load the averages and the number
/// of updates, not the options (include <torch/serialize.h>). Loading throws c10::Error, with the
/// strong exception guarantee, if shapes or dtypes differ.
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const Ema& ema) {
  archive.write("averages", c10::IValue(ema.averages()));
  archive.write("num_updates", c10::IValue(ema.num_updates()));
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

inline int64_t read_num_updates(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read("num_updates", value) && value.isInt() && value.toInt() >= 0,
              "The archive of an Ema has no \"num_updates\"; it is corrupt: load an earlier one");
  return value.toInt();
}

}  // namespace detail

inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  Ema& ema) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> averages = detail::read_averages(archive, ema);
  const int64_t num_updates = detail::read_num_updates(archive);
  for (std::size_t i = 0; i < averages.size(); ++i) ema.averages()[i].copy_(averages[i]);
  ema.num_updates_.fill_(num_updates);
  return archive;
}

/// Throws what loading the archive would throw, and changes nothing.
inline void check_archive(torch::serialize::InputArchive& archive, const Ema& ema) {
  (void)detail::read_averages(archive, ema);
  (void)detail::read_num_updates(archive);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
