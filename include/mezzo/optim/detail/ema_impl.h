#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/move_average.h>
#include <mezzo/optim/ema.h>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

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
  const c10::NoGradGuard no_grad;
  averages_.resize(parameters_.size());
  settle(weights());
}

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

inline void Ema::settle(const std::vector<at::Tensor>& weights) {
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor weight = weights[i].detach();
    detail::follow_weight(averages_[i], weight, [&weight] {
      return weight.to(detail::wide_dtype(weight), /*non_blocking=*/false, /*copy=*/true);
    });
  }
}

inline void Ema::update() {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> trained = weights();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    TORCH_CHECK(trained[i].sizes() == averages_[i].sizes(),
                "Ema: ", detail::parameter_words(i, trained[i]), " had the shape ",
                averages_[i].sizes(), " when this Ema was made; make a new Ema");
  }
  settle(trained);
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor weight = trained[i].detach().to(averages_[i].scalar_type());
    detail::move_average(averages_[i], weight, 1.0 - options_.decay);
  }
  ++updates_;
}

inline void Ema::update(const StepResult& result) {
  if (result.ran()) update();
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
  updates_ = updates;
}

inline EmaScope::EmaScope(const torch::optim::Optimizer& optimizer) {
  const auto* const mezzos = dynamic_cast<const optim::OptimizerInterface*>(&optimizer);
  TORCH_CHECK(mezzos != nullptr && mezzos->keeps_averages(),
              "EmaScope: this optimizer keeps no averages; set ema_decay in the options of a "
              "mezzo::optim optimizer, or keep averages beside any other with mezzo::Ema");
  std::vector<std::pair<at::Tensor, at::Tensor>> averages;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      averages.emplace_back(parameter, mezzos->average_of(parameter));
    }
  }
  put_in(averages);
}

inline EmaScope::EmaScope(const Ema& ema) {
  std::vector<std::pair<at::Tensor, at::Tensor>> averages;
  for (std::size_t i = 0; i < ema.parameters().size(); ++i) {
    averages.emplace_back(ema.parameters()[i], ema.averages()[i]);
  }
  put_in(averages);
}

inline EmaScope::~EmaScope() { put_back(); }

/// set_data leaves version, hooks and gradient of a parameter alone, so that nothing that watches
/// it for writes sees one when it has its own memory back.
inline void EmaScope::put_in(const std::vector<std::pair<at::Tensor, at::Tensor>>& averages) {
  const c10::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> rounded;
  for (const auto& [parameter, average] : averages) {
    if (!average.defined()) continue;
    TORCH_CHECK(average.sizes() == parameter.sizes(), "EmaScope: a parameter (",
                detail::tensor_words(parameter), ") has an average of the shape ", average.sizes(),
                "; it is another model's, or older than a resize of the parameter: make a new Ema, "
                "or load the model's own file into its optimizer");
    at::Tensor copy = at::empty_like(parameter, parameter.options().requires_grad(false));
    copy.copy_(average);
    rounded.emplace_back(parameter, std::move(copy));
  }
  lent_.reserve(rounded.size());
  try {
    for (const auto& [parameter, copy] : rounded) {
      lent_.emplace_back(parameter);
      parameter.set_data(copy);
    }
  } catch (...) {
    put_back();
    throw;
  }
}

/// set_data fails for a tensor of another kind, and what comes back is the parameter's own.
inline void EmaScope::put_back() noexcept {
  const c10::NoGradGuard no_grad;
  for (auto lent = lent_.rbegin(); lent != lent_.rend(); ++lent) lent->put_back();
  lent_.clear();
}

// Templates for the reason that GradScaler's are: the archives' headers take long to compile.
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
