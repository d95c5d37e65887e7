#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/cast_cache.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/step_count.h>
#include <mezzo/optim/ema.h>

#include <ATen/core/ivalue.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

/// Returns the floating, or else the other, buffers of a model, in order.
inline std::vector<at::Tensor> buffers_of(const torch::nn::Module& model, bool is_floating) {
  std::vector<at::Tensor> buffers = model.buffers();
  std::erase_if(buffers, [is_floating](const at::Tensor& buffer) {
    return !buffer.defined() || at::isFloatingType(buffer.scalar_type()) != is_floating;
  });
  return buffers;
}

inline std::vector<at::Tensor> joined(std::vector<at::Tensor> first,
                                      const std::vector<at::Tensor>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Returns `options` with undefined masters appended for the buffers.
inline EmaOptions with_buffers(EmaOptions options, std::size_t buffers) {
  if (options.masters && buffers > 0) {
    options.masters = [masters = std::move(options.masters), buffers] {
      return joined(masters(), std::vector<at::Tensor>(buffers));
    };
  }
  options.buffers = false;
  return options;
}

}  // namespace detail

inline Ema::Ema(const torch::nn::Module& model, EmaOptions options)
    : Ema(options.buffers ? detail::joined(model.parameters(), detail::buffers_of(model, true))
                          : model.parameters(),
          detail::with_buffers(options,
                               options.buffers ? detail::buffers_of(model, true).size() : 0)) {
  averaged_buffers_ = options.buffers ? detail::buffers_of(model, true).size() : 0;
  copied_buffers_ = detail::buffers_of(model, false);
  if (!options.buffers) {
    copied_buffers_ = detail::joined(detail::buffers_of(model, true), copied_buffers_);
  }
}

inline Ema::Ema(std::vector<at::Tensor> parameters, EmaOptions options)
    : parameters_(std::move(parameters)), options_(std::move(options)) {
  TORCH_CHECK(!options_.buffers,
              "Ema: options.buffers is for an Ema of a model; make it with Ema(*model, options), "
              "or append the buffers to the parameters");
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
  TORCH_CHECK(weights.size() == parameters_.size(), "Ema: options.masters returned ",
              weights.size(), " tensors; it should return ", parameters_.size(),
              ", one for each parameter, undefined where there is no master");
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].defined()) weights[i] = parameters_[i];
    TORCH_CHECK(weights[i].sizes() == parameters_[i].sizes(),
                "Ema: ", detail::parameter_words(i, parameters_[i]), " has a master that is ",
                detail::tensor_words(weights[i]),
                "; options.masters should return one of the parameter's shape, or undefined");
  }
  return weights;
}

/// Converts averages whose weights have moved to another device or dtype.
inline void Ema::follow(const std::vector<at::Tensor>& weights) {
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    averages_[i] = averages_[i].to(weights[i].device(), detail::wide_dtype(weights[i]));
  }
}

/// Buffers are ordered floating ones first, in both models.
inline void Ema::copy_to(const torch::nn::Module& model) const {
  const std::vector<at::Tensor> from = detail::joined(averages_, copied_buffers_);
  const std::vector<at::Tensor> parameters = model.parameters();
  const std::vector<at::Tensor> buffers =
      detail::joined(detail::buffers_of(model, true), detail::buffers_of(model, false));
  const std::size_t own_parameters = parameters_.size() - averaged_buffers_;
  TORCH_CHECK(parameters.size() == own_parameters, "Ema::copy_to: the model has ",
              parameters.size(), " parameters, and this Ema averages ", own_parameters,
              "; give a model that is built as the averaged one is");
  TORCH_CHECK(buffers.size() == from.size() - own_parameters, "Ema::copy_to: the model has ",
              buffers.size(), " buffers, and this Ema knows ", from.size() - own_parameters,
              "; make the Ema from the model, Ema(*model), and give a model that is built alike");
  const std::vector<at::Tensor> to = detail::joined(parameters, buffers);
  for (std::size_t i = 0; i < to.size(); ++i) {
    TORCH_CHECK(to[i].sizes() == from[i].sizes(),
                "Ema::copy_to: ", i < own_parameters ? "parameter " : "buffer ",
                i < own_parameters ? i : i - own_parameters, " is ", detail::tensor_words(to[i]),
                " in the model, and ", detail::tensor_words(from[i]),
                " here; give a model that is built as the averaged one is");
  }
  const detail::NoGraphGuard no_graph;
  for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  detail::drop_weight_casts();
}

namespace detail {

/// Averages and weights of one device and dtype, which ATen updates together. The two tensors of a
/// pair have the same layout.
struct AveragedTogether {
  std::vector<at::Tensor> averages, weights;

  bool takes(const at::Tensor& average) const {
    return averages.front().device() == average.device() &&
           averages.front().scalar_type() == average.scalar_type();
  }

  /// Computes averages += share * (weights - averages), unless `found_inf` (one element, any
  /// device) is nonzero. An undefined `found_inf` means 0.
  void move(double share, const at::Tensor& found_inf) const {
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
};

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
  follow(trained);
  const double share = 1.0 - options_.decay;
  std::vector<detail::AveragedTogether> all;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor weight = trained[i].detach();
    const bool fits = weight.scalar_type() == averages_[i].scalar_type() &&
                      weight.strides() == averages_[i].strides();
    if (!fits) {
      const at::Tensor converted = at::empty_like(averages_[i]).copy_(weight);
      detail::AveragedTogether{{averages_[i]}, {converted}}.move(share, found_inf);
      continue;
    }
    const auto together = std::find_if(all.begin(), all.end(),
                                       [&](const auto& some) { return some.takes(averages_[i]); });
    auto& some = together != all.end() ? *together : all.emplace_back();
    some.averages.push_back(averages_[i]);
    some.weights.push_back(weight);
  }
  for (const detail::AveragedTogether& some : all) some.move(share, found_inf);
  count(found_inf);
}

/// Counts one more update unless `found_inf` is nonzero. Once the device decides, it also counts.
inline void Ema::count(const at::Tensor& found_inf) {
  const detail::StepCount updates(updates_on_host_, updates_on_device_);
  if (found_inf.defined() && !found_inf.is_cpu() && !updates_on_device_.defined()) {
    detail::check_is_warm(found_inf.device(), "a number of updates");
    const auto options = found_inf.options().dtype(at::kFloat);
    updates.move_to(at::full({}, updates_on_host_, options));  // a copy from the host would wait
  }
  const at::Tensor& decides = found_inf.defined() ? found_inf : updates_on_device_;
  detail::count_step(updates, decides.defined() ? decides.device() : at::Device(at::kCPU),
                     found_inf);
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

inline std::int64_t Ema::updates() const {
  return detail::steps_counted(updates_on_host_, updates_on_device_);
}

inline void Ema::restore(std::int64_t updates, const std::vector<at::Tensor>& averages) {
  TORCH_CHECK(updates >= 0, "The archive of an Ema has ", updates,
              " updates; it is damaged: load an earlier file");
  TORCH_CHECK(averages.size() == averages_.size(), "The archive of an Ema has ", averages.size(),
              " averages, and this Ema ", averages_.size(),
              " parameters; make it with the parameters that it had when it was saved");
  for (std::size_t i = 0; i < averages.size(); ++i) {
    TORCH_CHECK(averages[i].sizes() == averages_[i].sizes() &&
                    averages[i].scalar_type() == averages_[i].scalar_type(),
                "The archive of an Ema has the average ", detail::tensor_words(averages[i]),
                " for ", detail::parameter_words(i, parameters_[i]), ", whose own is ",
                detail::tensor_words(averages_[i]),
                "; build the model as it was when the Ema was saved");
  }
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < averages.size(); ++i) averages_[i].copy_(averages[i]);
  detail::StepCount(updates_on_host_, updates_on_device_).overwrite(updates);
}

/// set_data leaves a parameter's version, hooks and gradient unchanged. After the scope, code that
/// watches the parameter for writes therefore sees none.
inline EmaScope::EmaScope(const Ema& ema) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor>& parameters = ema.parameters();
  std::vector<at::Tensor> rounded;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& average = ema.averages()[i];
    TORCH_CHECK(average.sizes() == parameters[i].sizes(),
                "EmaScope: ", detail::parameter_words(i, parameters[i]), " had the shape ",
                average.sizes(), " when its Ema was made; make a new Ema");
    rounded.push_back(at::empty_like(parameters[i], parameters[i].options().requires_grad(false)));
    rounded.back().copy_(average);
  }
  lent_.reserve(rounded.size());
  try {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      lent_.emplace_back(parameters[i]);
      parameters[i].set_data(rounded[i]);
    }
    detail::drop_weight_casts();
  } catch (...) {
    put_back();
    throw;
  }
}

inline EmaScope::~EmaScope() { put_back(); }

/// Does not throw: set_data fails only for a tensor of another kind, and each parameter gets back
/// its own.
inline void EmaScope::put_back() noexcept {
  const c10::NoGradGuard no_grad;
  for (auto lent = lent_.rbegin(); lent != lent_.rend(); ++lent) lent->put_back();
  lent_.clear();
  detail::drop_weight_casts();
}

// Templates, as for GradScaler, since the headers of archives take long to compile.
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const Ema& ema) {
  archive.write("updates", c10::IValue(ema.updates()));
  archive.write("averages", c10::IValue(ema.averages()));
  return archive;
}

template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(Archive& archive,
                                                                                   Ema& ema) {
  c10::IValue updates, averages;
  TORCH_CHECK(archive.try_read("updates", updates) && archive.try_read("averages", averages) &&
                  updates.isInt() && averages.isTensorList(),
              "This archive is not that of an Ema: it lacks \"updates\" or \"averages\"; load what "
              "torch::save(ema, path) wrote");
  ema.restore(updates.toInt(), averages.toTensorVector());
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
