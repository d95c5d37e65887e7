// The reference of random training programs: weights, gradients and optimizers as loops over
// double. randomized_program.h runs the programs.
#pragma once

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/owned_optimizer.h"

namespace randomized_training {

using mezzo::optim::WeightStorage;
using torch::Tensor;
using Vector = std::vector<double>;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed * 0x9e3779b97f4a7c15U + 1) {}
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit));
  }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  T choose(const std::vector<T>& all) {
    return all[static_cast<std::size_t>(below(static_cast<int64_t>(all.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

// --- Numbers -----------------------------------------------------------------------------------

inline double rounded(double value, torch::ScalarType dtype) {
  if (dtype == torch::kDouble) return value;
  const auto single = static_cast<float>(value);
  if (dtype == torch::kBFloat16) return static_cast<float>(c10::BFloat16(single));
  if (dtype == torch::kHalf) return static_cast<float>(c10::Half(single));
  return single;
}

/// The largest relative error of rounding to nearest.
inline double half_ulp(torch::ScalarType dtype) {
  return dtype == torch::kBFloat16 ? 0x1p-8 : dtype == torch::kHalf ? 0x1p-11 : 0x1p-24;
}

inline Vector read_values(const Tensor& tensor) {
  const Tensor dense = tensor.detach().to(torch::kDouble).contiguous();
  const double* const values = dense.const_data_ptr<double>();
  return {values, values + dense.numel()};
}

inline Tensor make_tensor(const Vector& values, torch::ScalarType dtype) {
  return torch::tensor(values, torch::kDouble).to(dtype);
}

inline Tensor make_tensor(const Vector& values, torch::ScalarType dtype, at::IntArrayRef shape) {
  return make_tensor(values, dtype).reshape(shape).clone();  // not a view
}

inline bool all_finite(const Vector& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

inline double norm_sq(const Vector& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum;
}

inline std::string format(const Vector& values) {
  std::ostringstream text;
  text << "{";
  for (std::size_t i = 0; i < values.size(); ++i) text << (i == 0 ? "" : ", ") << values[i];
  text << "}";
  return text.str();
}

inline bool is_16_bit(torch::ScalarType dtype) {
  return dtype == torch::kBFloat16 || dtype == torch::kHalf;
}

/// The factor of clip_grad_norm_ for a finite norm.
inline double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

// --- Weights -----------------------------------------------------------------------------------

/// The contents of `.grad`, scaled or unscaled.
struct ReferenceGradient {
  Vector values;
  torch::ScalarType dtype;
  double tolerance = 0;  ///< relative rounding error of an unspecified summation order
};

inline constexpr double kLr = 0.25;

/// The memory layout of a weight: contiguous, or with the strides of its transpose.
enum class Layout { contiguous, transposed };

/// A weight, its optimizer state and its gradient.
struct ReferenceWeight {
  torch::ScalarType dtype = torch::kFloat;
  bool has_master = false;      ///< a float32 tensor; unscale_ casts the gradient to float32
  bool updates_float32 = true;  ///< instead of the 16-bit weight
  torch::ScalarType new_grad_dtype = torch::kFloat;
  std::vector<int64_t> shape{};
  Layout layout = Layout::contiguous;
  double hook = 1;  ///< factor of a hook for incoming gradients
  double lr = kLr;  ///< of its group
  bool is_frozen = false;
  bool is_tied = false;  ///< used twice in the forward pass
  bool is_late = false;  ///< added after construction of the optimizer
  bool begins_group = false;

  Vector value;
  Vector error;  ///< bound of the rounding error of `value`
  Vector moments[2];
  int64_t count = 0;
  bool is_modified = false;  ///< outside the optimizer, since the last step
  Vector trained{};          ///< the value before the modification

  std::optional<ReferenceGradient> gradient{};
  void zero_gradient(bool set_to_none) {
    if (set_to_none) return gradient.reset();
    if (!gradient) return;
    std::fill(gradient->values.begin(), gradient->values.end(), 0.0);
    gradient->tolerance = 0;
  }
  /// Casts the gradient of a weight with a master to float32, as unscale_ does.
  void cast_gradient_to_float32() {
    if (gradient && has_master && is_16_bit(gradient->dtype)) gradient->dtype = torch::kFloat;
  }
  /// Accumulates a gradient, which has the weight's dtype, as autograd does.
  void accumulate(const Vector& incoming) {
    if (!gradient) gradient = ReferenceGradient{Vector(incoming.size(), 0.0), new_grad_dtype};
    for (std::size_t i = 0; i < incoming.size(); ++i) {
      double& element = gradient->values[i];
      element = rounded(element + rounded(incoming[i], dtype) * hook, gradient->dtype);
    }
  }
  void multiply_gradient(double factor) {
    for (double& one : gradient->values) one = rounded(one * factor, gradient->dtype);
  }
};

// --- Optimizers --------------------------------------------------------------------------------

enum class OptimizerKind { sgd, momentum, adam, adamw, lion, lamb };

inline constexpr double kMomentum = 0.5;
inline constexpr double kBeta1 = 0.5;
inline constexpr double kBeta2 = 0.75;
/// Large, so that a step of Adam depends on the scale of the gradient.
inline constexpr double kEps = 1;
inline constexpr double kDecay = 0.125;

/// One step of one weight.
inline void update(OptimizerKind kind, ReferenceWeight& weight, const Vector& gradient, double lr) {
  const std::size_t size = gradient.size();
  const bool is_low_precision = is_16_bit(weight.dtype) && !weight.updates_float32;
  const double relative = is_low_precision ? 0x1p-4 : 2e-5;
  const auto steps = static_cast<double>(++weight.count);
  for (Vector& moment : weight.moments) moment.resize(size);
  Vector change(size), noise(size);
  for (std::size_t i = 0; i < size; ++i) {
    const double g = gradient[i];
    double& m = weight.moments[0][i];
    double& v = weight.moments[1][i];
    noise[i] = std::abs(m) + std::abs(g);
    switch (kind) {
      case OptimizerKind::sgd:
        change[i] = g;
        break;
      case OptimizerKind::momentum:
        m = steps == 1 ? g : kMomentum * m + g;
        change[i] = m;
        break;
      case OptimizerKind::lion: {
        const double direction = kBeta1 * m + (1 - kBeta1) * g;
        m = kBeta2 * m + (1 - kBeta2) * g;
        change[i] = direction > 0 ? 1 : direction < 0 ? -1 : 0;
        // A float16 moment may underflow.
        const double underflow = is_low_precision && weight.dtype == torch::kHalf ? 0x1p-20 : 0;
        const bool is_unclear = std::abs(direction) <= relative * noise[i] + underflow;
        noise[i] = is_unclear && noise[i] > 0 ? 2 / relative : 0;
        break;
      }
      case OptimizerKind::adam:
      case OptimizerKind::adamw:
      case OptimizerKind::lamb: {
        m = kBeta1 * m + (1 - kBeta1) * g;
        v = kBeta2 * v + (1 - kBeta2) * g * g;
        const double mean = m / (1 - std::pow(kBeta1, steps));
        change[i] = mean / (std::sqrt(v / (1 - std::pow(kBeta2, steps))) + kEps);
        noise[i] = std::min(noise[i], 4.0);
        if (kind == OptimizerKind::adam) break;
        change[i] += kDecay * weight.value[i];
        noise[i] += std::abs(kDecay * weight.value[i]);
        break;
      }
    }
  }
  double ratio = 1;
  if (kind == OptimizerKind::lamb) {
    const double own = std::sqrt(norm_sq(weight.value));
    const double update_norm = std::sqrt(norm_sq(change));
    const double noise_norm = std::sqrt(norm_sq(noise));
    if (own != 0 && update_norm != 0) {
      ratio = own / update_norm;
      for (double& one : noise) one += noise_norm;
    }
  }
  for (std::size_t i = 0; i < size; ++i) {
    weight.value[i] -= lr * ratio * change[i];
    weight.error[i] += relative * lr * ratio * noise[i];
    weight.error[i] += 0x1p-22 * std::abs(weight.value[i]);
  }
  weight.is_modified = false;
}

/// The optimizer class, the weight storage and the weights of an optimizer.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::sgd;
  bool is_mezzo = true;
  bool has_master_weights = false;
  WeightStorage storage = WeightStorage::plain;
  torch::ScalarType dtype = torch::kFloat;
  bool accumulates_in_float32 = false;
  bool last_weight_is_norm = false;  ///< of batch norm
  torch::ScalarType norm_dtype = torch::kFloat;
  std::size_t weights = 2;
  bool has_unusual_shapes = false;  ///< empty, zero-dimensional and non-contiguous weights
  bool has_grad_hooks = false;
  bool has_frozen_weights = false;
  bool has_tied_weights = false;
  bool has_schedule = false;

  bool is_norm(std::size_t i) const { return last_weight_is_norm && i + 1 == weights; }

  std::string text() const {
    const char* const kinds[] = {"SGD", "SGD with momentum", "Adam", "AdamW", "Lion", "LAMB"};
    const char* const storages[] = {"plain", "fp32_master", "split_master", "stochastic_rounding"};
    std::ostringstream text;
    text << (is_mezzo ? "mezzo " : "torch ") << kinds[static_cast<std::size_t>(kind)];
    if (has_master_weights) text << " in MasterWeights";
    if (is_mezzo) text << ", " << storages[static_cast<std::size_t>(storage)];
    text << ", " << weights << " weights of " << c10::toString(dtype);
    if (last_weight_is_norm) text << ", the last of " << c10::toString(norm_dtype);
    if (accumulates_in_float32) text << ", accumulate_in_float";
    if (has_grad_hooks) text << ", with hooks";
    if (has_frozen_weights) text << ", frozen weights";
    if (has_tied_weights) text << ", tied weights";
    if (has_schedule) text << ", with a schedule";
    return text.str();
  }
};

inline OptimizerConfig random_config(Random& random) {
  OptimizerConfig config;
  config.is_mezzo = !random.one_in(3);
  config.kind = static_cast<OptimizerKind>(random.below(5));
  // LAMB is a torch::optim::Optimizer; torch has no Lion.
  if (!config.is_mezzo && config.kind == OptimizerKind::lion) config.kind = OptimizerKind::lamb;
  if (random.one_in(3)) config.kind = OptimizerKind::sgd;  // the most sensitive one
  const std::vector<torch::ScalarType> low{torch::kBFloat16, torch::kHalf};
  if (!config.is_mezzo) {
    config.has_master_weights = !random.one_in(3);
    if (!random.one_in(4)) config.dtype = random.choose(low);
  } else if (!random.one_in(4)) {
    config.storage = static_cast<WeightStorage>(random.below(3));
    if (random.one_in(3)) config.storage = WeightStorage::fp32_master;
    const bool is_split = config.storage == WeightStorage::split_master;
    config.dtype = is_split ? torch::kBFloat16 : random.choose(low);
    config.accumulates_in_float32 = random.one_in(5);
  }
  config.last_weight_is_norm = random.one_in(3);
  config.weights = static_cast<std::size_t>(1 + random.below(3));
  return config;
}

template <class Options>
Options make_options(const OptimizerConfig& config) {
  Options options(kLr);
  if constexpr (requires { options.momentum(kMomentum); }) {
    if (config.kind == OptimizerKind::momentum) options.momentum(kMomentum);
  }
  if constexpr (requires { options.betas({kBeta1, kBeta2}); }) {
    options.betas({kBeta1, kBeta2});
    options.weight_decay(
        config.kind == OptimizerKind::adamw || config.kind == OptimizerKind::lamb ? kDecay : 0);
  }
  if constexpr (requires { options.eps(kEps); }) options.eps(kEps);
  return options;
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const OptimizerConfig& config, const std::vector<Tensor>& parameters) {
  const auto make = [&]<class Optimizer, class Options>() {
    const auto options = make_options<Options>(config);
    const mezzo::optim::WeightStorageOptions weights{.weight_storage = config.storage};
    if constexpr (std::is_constructible_v<Optimizer, std::vector<Tensor>, Options,
                                          mezzo::optim::WeightStorageOptions>) {
      return std::make_unique<Optimizer>(parameters, options, weights);
    } else {
      return std::make_unique<Optimizer>(parameters, options);
    }
  };
  namespace torch_optim = torch::optim;
  namespace mezzo_optim = mezzo::optim;
  const bool is_mezzo = config.is_mezzo;
  switch (config.kind) {
    case OptimizerKind::sgd:
    case OptimizerKind::momentum:
      if (is_mezzo) return make.template operator()<mezzo_optim::SGD, mezzo_optim::SGDOptions>();
      return make.template operator()<torch_optim::SGD, torch_optim::SGDOptions>();
    case OptimizerKind::adam:
      if (is_mezzo) return make.template operator()<mezzo_optim::Adam, mezzo_optim::AdamOptions>();
      return make.template operator()<torch_optim::Adam, torch_optim::AdamOptions>();
    case OptimizerKind::adamw:
      if (is_mezzo)
        return make.template operator()<mezzo_optim::AdamW, mezzo_optim::AdamWOptions>();
      return make.template operator()<torch_optim::AdamW, torch_optim::AdamWOptions>();
    case OptimizerKind::lion:
      return make.template operator()<mezzo_optim::Lion, mezzo_optim::LionOptions>();
    case OptimizerKind::lamb:
      break;
  }
  return make.template operator()<mezzo_optim::LAMB, mezzo_optim::LAMBOptions>();
}

/// The learning-rate schedule of optimizers with has_schedule.
inline constexpr mezzo::LinearCurve kCurve{.total_steps = 6, .min_factor = 0.25};

/// The weights of one optimizer.
struct ReferenceOptimizer {
  OptimizerConfig config;
  std::vector<ReferenceWeight> weights{};
  int64_t applied = 0;

  bool is_mixed_precision() const { return config.is_mezzo || config.has_master_weights; }
  bool is_split() const { return config.storage == WeightStorage::split_master; }
  /// Whether master_params returns tensors.
  bool has_master_params() const {
    return !is_split() ||
           std::none_of(weights.begin(), weights.end(),
                        [](const ReferenceWeight& one) { return is_16_bit(one.dtype); });
  }
  bool has_gradient() const {
    return std::any_of(weights.begin(), weights.end(),
                       [](const ReferenceWeight& one) { return one.gradient.has_value(); });
  }
  bool has_fp16_without_master() const {
    return std::any_of(weights.begin(), weights.end(), [](const ReferenceWeight& one) {
      return one.gradient && one.gradient->dtype == torch::kHalf && !one.has_master;
    });
  }
  bool is_finite() const {
    return std::all_of(weights.begin(), weights.end(), [](const ReferenceWeight& one) {
      return !one.gradient || all_finite(one.gradient->values);
    });
  }
  double norm() const {
    double sum = 0;
    for (const ReferenceWeight& one : weights) {
      if (one.gradient) sum += norm_sq(one.gradient->values);
    }
    return std::sqrt(sum);
  }
  void zero_grad(bool set_to_none) {
    for (ReferenceWeight& one : weights) one.zero_gradient(set_to_none);
  }

  /// Steps with the gradients multiplied by `factor`.
  void step(double factor) {
    const double lr_factor = config.has_schedule ? kCurve.factor(applied) : 1;
    for (ReferenceWeight& one : weights) {
      if (!one.gradient) continue;
      Vector gradient = one.gradient->values;
      for (double& g : gradient) g *= factor;
      update(config.kind, one, gradient, one.lr * lr_factor);
    }
    ++applied;
  }

  /// Clips gradients, as clip_grad_norm_ does.
  void clip_norm(double norm, double max_norm) {
    const double factor = clip_factor(norm, max_norm);
    double tolerance = 2e-5;  // libtorch's norm has the gradients' dtype
    for (const ReferenceWeight& one : weights) {
      if (one.gradient && is_16_bit(one.gradient->dtype)) tolerance = 0x1p-5;
    }
    for (ReferenceWeight& one : weights) {
      if (!one.gradient) continue;
      for (double& g : one.gradient->values) g *= factor;
      one.gradient->tolerance = tolerance;
    }
  }
  void clip_value(double limit) {
    for (ReferenceWeight& one : weights) {
      if (!one.gradient) continue;
      for (double& g : one.gradient->values) {
        g = std::isnan(g) ? g : std::clamp(g, -limit, limit);
      }
    }
  }
};

inline Vector random_weight_values(Random& random, std::size_t size) {
  Vector values;
  for (std::size_t i = 0; i < size; ++i) {
    values.push_back(static_cast<double>(random.below(33) - 16) / 4);
  }
  return values;
}

inline void set_weight_storage(const OptimizerConfig& config, torch::ScalarType dtype,
                               ReferenceWeight& weight) {
  weight.dtype = dtype;
  const bool is_low = is_16_bit(dtype);
  weight.has_master =
      is_low && (config.has_master_weights || config.storage == WeightStorage::fp32_master);
  weight.updates_float32 =
      !is_low || weight.has_master || config.storage == WeightStorage::split_master;
  weight.new_grad_dtype = is_low && config.accumulates_in_float32 ? torch::kFloat : dtype;
}

inline ReferenceWeight make_reference_weight(const OptimizerConfig& config, torch::ScalarType dtype,
                                             Random& random) {
  ReferenceWeight weight;
  set_weight_storage(config, dtype, weight);
  auto size = static_cast<std::size_t>(1 + random.below(3));
  weight.shape = {static_cast<int64_t>(size)};
  if (config.has_unusual_shapes && random.one_in(2)) {
    const std::vector<std::vector<int64_t>> shapes{{0, 2}, {}, {2, 2}, {3}};
    weight.shape = random.choose(shapes);
    size = static_cast<std::size_t>(c10::multiply_integers(weight.shape));
    if (size == 4) weight.layout = Layout::transposed;
  }
  if (config.has_grad_hooks && random.one_in(2)) weight.hook = random.one_in(2) ? 2 : 0.5;
  weight.is_frozen = config.has_frozen_weights && random.one_in(3);
  weight.is_tied = config.has_tied_weights && random.one_in(2);
  weight.value = random_weight_values(random, size);
  weight.error.assign(size, 0.0);
  return weight;
}

inline ReferenceOptimizer make_reference(const OptimizerConfig& config, Random& random) {
  ReferenceOptimizer side{config};
  for (std::size_t i = 0; i < config.weights; ++i) {
    side.weights.push_back(make_reference_weight(
        config, config.is_norm(i) ? config.norm_dtype : config.dtype, random));
  }
  return side;
}

/// Returns a new weight that replaces `old`.
inline ReferenceWeight make_replacement(const OptimizerConfig& config, const ReferenceWeight& old,
                                        Random& random) {
  ReferenceWeight weight = make_reference_weight(config, old.dtype, random);
  weight.is_tied = old.is_tied;
  weight.is_late = old.is_late;
  weight.begins_group = old.begins_group;
  weight.lr = old.lr;
  return weight;
}

/// Adds a weight after the others, in a new group if the last weight is in its own group.
inline ReferenceWeight& add_reference_weight(ReferenceOptimizer& side, torch::ScalarType dtype,
                                             Random& random) {
  const bool in_new_group = side.weights.back().begins_group || random.one_in(2);
  ReferenceWeight& weight =
      side.weights.emplace_back(make_reference_weight(side.config, dtype, random));
  weight.is_late = true;
  weight.begins_group = in_new_group;
  if (in_new_group && random.one_in(2)) weight.lr = kLr / 2;
  return weight;
}

/// Sets a weight to values that differ from those of its parameter and its master: a master keeps
/// its value if the parameter is set to the rounded master.
inline void write_reference_weight(ReferenceWeight& weight, const Vector& present, Random& random) {
  if (!weight.is_modified) weight.trained = weight.value;
  // A split weight keeps its low bits.
  const bool is_split = weight.updates_float32 && !weight.has_master && is_16_bit(weight.dtype);
  for (std::size_t k = 0; k < present.size(); ++k) {
    weight.value[k] = static_cast<double>(random.below(33) - 16) / 4;
    const auto is_close = [&](double other) { return std::abs(weight.value[k] - other) < 0.125; };
    while (is_close(present[k]) || is_close(weight.trained[k])) weight.value[k] += 1;
    weight.error[k] = is_split ? half_ulp(weight.dtype) * std::abs(weight.value[k]) : 0;
  }
  weight.is_modified = true;
}

// --- Tensors -----------------------------------------------------------------------------------

inline Tensor make_parameter(const ReferenceWeight& one, torch::ScalarType dtype) {
  Tensor parameter = make_tensor(one.value, dtype, one.shape);
  if (one.layout == Layout::transposed) {
    parameter = torch::empty_strided(one.shape, {1, 2}, dtype).copy_(parameter);
  }
  parameter.requires_grad_();
  if (one.hook != 1) {
    parameter.register_hook([hook = one.hook](const Tensor& gradient) { return gradient * hook; });
  }
  return parameter.requires_grad_(!one.is_frozen);
}

/// Sets grad_dtype, which the optimizer would set only at its next step for a parameter that is
/// added to its groups directly.
inline Tensor make_late_parameter(const ReferenceWeight& one) {
  const Tensor parameter = make_parameter(one, one.dtype);
  if (one.new_grad_dtype != one.dtype) parameter.set_grad_dtype(one.new_grad_dtype);
  return parameter;
}

/// Returns a group of one parameter, with options if its learning rate is not the default.
inline torch::optim::OptimizerParamGroup make_group(const ReferenceWeight& weight,
                                                    const Tensor& parameter,
                                                    const torch::optim::OptimizerOptions& options,
                                                    bool has_options = false) {
  torch::optim::OptimizerParamGroup group({parameter});
  if (!has_options && weight.lr == kLr) return group;
  group.set_options(options.clone());
  group.options().set_lr(weight.lr);
  return group;
}

/// Adds a group by the function of the optimizer's class. It is not virtual, and since 2.12
/// torch::optim's replaces options of classes that are not torch's.
inline void add_param_group(torch::optim::Optimizer& optimizer,
                            const torch::optim::OptimizerParamGroup& group) {
  if (auto* const lion = dynamic_cast<mezzo::optim::Lion*>(&optimizer)) {
    lion->add_param_group(group);
  } else if (auto* const lamb = dynamic_cast<mezzo::optim::LAMB*>(&optimizer)) {
    lamb->add_param_group(group);
  } else {
    optimizer.add_param_group(group);
  }
}

/// Resets `parameter` in an optimizer's groups, and returns a reference to it. Erases its state,
/// except for mezzo's optimizers, which must detect the removal.
inline Tensor& clear_parameter_slot(torch::optim::Optimizer& optimizer, const Tensor& parameter,
                                    bool is_mezzo) {
  for (auto& group : optimizer.param_groups()) {
    for (Tensor& slot : group.params()) {
      if (!slot.is_same(parameter)) continue;
      if (!is_mezzo) optimizer.state().erase(slot.unsafeGetTensorImpl());
      slot = Tensor();  // so that a new parameter may get the same address
      return slot;
    }
  }
  throw std::logic_error("the parameter is in no group");
}

/// Moves the gradients that have the dtype of the first one into a flat tensor, as
/// DistributedDataParallel does.
inline void move_grads_to_bucket(const std::vector<Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> owners;
  std::vector<Tensor> flat;
  for (const Tensor& one : parameters) {
    if (!one.grad().defined()) continue;
    if (!owners.empty() && owners[0].grad().scalar_type() != one.grad().scalar_type()) continue;
    owners.push_back(one);
    flat.push_back(one.grad().reshape({-1}));
  }
  if (owners.empty()) return;
  const Tensor bucket = torch::cat(flat);
  int64_t at = 0;
  for (const Tensor& one : owners) {
    const Tensor part = bucket.narrow(0, at, one.numel()).view(one.sizes());
    one.mutable_grad() = torch::empty({0}, bucket.options())  // not a view: zero_grad detaches it
                             .set_(bucket.storage(), at, part.sizes(), part.strides());
    at += one.numel();
  }
}

/// Returns a gradient for which every step throws: of another dtype or shape.
inline Tensor make_bad_gradient(const Tensor& parameter, bool has_shape) {
  return has_shape ? torch::ones_like(parameter.detach(), torch::kInt)
                   : torch::ones({7}, parameter.scalar_type());
}

/// Small numbers whose sums are exact in 16 bits: multiples of 1/8 up to 15/8.
inline Vector random_gradient(Random& random, std::size_t size, bool with_inf) {
  Vector gradient;
  for (std::size_t i = 0; i < size; ++i) {
    gradient.push_back(static_cast<double>(random.below(31) - 15) / 8);
  }
  const double inf = std::numeric_limits<double>::infinity();
  const double bad[] = {inf, -inf, std::nan("")};
  if (with_inf && size > 0) gradient[0] = bad[random.below(3)];
  return gradient;
}

// --- Comparison --------------------------------------------------------------------------------

/// The lines of a program, and its failures.
class Report {
 public:
  template <class... Parts>
  void line(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    lines_.push_back(text.str());
  }
  template <class... Parts>
  void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    lines_.push_back("FAILED: " + text.str());
    failed_ = true;
  }
  bool failed() const { return failed_; }
  std::string text() const {
    std::string all;
    for (const std::string& line : lines_) all += "  " + line + "\n";
    return all;
  }

 private:
  std::vector<std::string> lines_;
  bool failed_ = false;
};

inline bool is_close(double actual, double expected, double tolerance) {
  if (std::isnan(expected)) return std::isnan(actual);
  if (!std::isfinite(expected)) return actual == expected;
  return std::abs(actual - expected) <= tolerance;
}

inline bool are_close(const Vector& actual, const Vector& expected, const Vector& tolerance) {
  if (actual.size() != expected.size()) return false;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!is_close(actual[i], expected[i], tolerance[i])) return false;
  }
  return true;
}

/// Returns the float32 value that a mezzo optimizer stores for `parameter`, if any.
inline std::optional<Vector> read_fp32_value(const torch::optim::Optimizer& optimizer,
                                             const Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return std::nullopt;
  const auto* const slot =
      dynamic_cast<const mezzo::detail::FusedParamStateBase*>(found->second.get());
  if (slot == nullptr) return std::nullopt;
  if (slot->master.defined()) return read_values(slot->master);
  if (!slot->low_bits.defined()) return std::nullopt;
  return read_values(mezzo::detail::combine_with_low_bits(parameter, slot->low_bits));
}

/// Compares the float32 value, and continues from the actual one.
inline void compare_value(ReferenceWeight& plain, const Vector& actual, Report& report,
                          const std::string& name) {
  Vector tolerance = plain.error;
  for (std::size_t i = 0; i < tolerance.size(); ++i) {
    tolerance[i] += 0x1p-22 * std::abs(plain.value[i]) + 1e-7;
  }
  if (!are_close(actual, plain.value, tolerance)) {
    report.fail(name, " is ", format(actual), "; expected ", format(plain.value), ", within ",
                format(tolerance));
  }
  plain.value = actual;
  std::fill(plain.error.begin(), plain.error.end(), 0.0);
}

inline void compare_weight(ReferenceWeight& plain, const Tensor& parameter,
                           const torch::optim::Optimizer& optimizer, Report& report,
                           const std::string& name) {
  const Vector actual = read_values(parameter);
  Vector tolerance = plain.error;
  const double unit = half_ulp(plain.dtype);
  for (std::size_t i = 0; i < tolerance.size(); ++i) {
    // One ulp for 16-bit weights without a float32 value, half an ulp for others.
    const double ulps = plain.updates_float32 ? 1.01 : 2.02;
    tolerance[i] += ulps * unit * (std::abs(plain.value[i]) + tolerance[i]) + 1e-7;
  }
  if (parameter.scalar_type() != plain.dtype || !are_close(actual, plain.value, tolerance)) {
    report.fail(name, " is ", format(actual), " of ", c10::toString(parameter.scalar_type()),
                "; expected ", format(plain.value), ", within ", format(tolerance));
  }
  if (!plain.updates_float32 || !is_16_bit(plain.dtype)) {
    plain.value = actual;
    std::fill(plain.error.begin(), plain.error.end(), 0.0);
  } else if (const auto kept = read_fp32_value(optimizer, parameter); kept && !plain.is_modified) {
    compare_value(plain, *kept, report, "what " + name + " is rounded from");
  }
}

inline void compare_gradient(ReferenceWeight& plain, const Tensor& parameter, Report& report,
                             const std::string& name) {
  const Tensor& gradient = parameter.grad();
  if (gradient.defined() != plain.gradient.has_value()) {
    return report.fail(name, ".grad is ",
                       gradient.defined() ? format(read_values(gradient)) : "none", "; expected ",
                       plain.gradient ? format(plain.gradient->values) : "none");
  }
  if (!gradient.defined()) return;
  const Vector actual = read_values(gradient);
  Vector tolerance(actual.size(), 0.0);
  for (std::size_t i = 0; i < actual.size() && plain.gradient->tolerance > 0; ++i) {
    tolerance[i] = plain.gradient->tolerance * std::abs(plain.gradient->values[i]) + 1e-7;
  }
  if (gradient.scalar_type() != plain.gradient->dtype ||
      !are_close(actual, plain.gradient->values, tolerance)) {
    report.fail(name, ".grad is ", format(actual), " of ", c10::toString(gradient.scalar_type()),
                "; expected ", format(plain.gradient->values), " of ",
                c10::toString(plain.gradient->dtype), ", within ", format(tolerance));
  }
  plain.gradient->values = actual;
}

}  // namespace randomized_training
