/// \file
/// An exponential moving average of weights: kept beside any optimizer, and put into a model for
/// evaluation, whether it is this one or that of mezzo's optimizers.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/averaged_parameters.h>
#include <mezzo/optim/optimizer_interface.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

struct EmaOptions {
  /// How much of the average an update keeps: at least 0 and less than 1.
  double decay = 0.999;
  /// Gives what is trained in place of the parameters, in their order, where somebody keeps masters
  /// in float: averages are of these, and go, rounded, into the parameters. Undefined, or the
  /// parameter itself, where there is none. Asked at construction and at each update, since who
  /// loads a file has other masters from then on:
  ///
  ///     mezzo::Ema ema(model->parameters(),
  ///                    {.masters = [&] { return mezzo::master_params(optimizer); }});
  std::function<std::vector<at::Tensor>()> masters = nullptr;
};

/// Averages of parameters, for optimizers that keep none: torch::optim's, or your own.
///
/// \code
///   mezzo::Ema ema(model->parameters(), {.decay = 0.999});
///   ...
///   ema.update(scaler.step(optimizer));  // a step that was skipped is not averaged
///   ...
///   {
///     mezzo::EmaScope averaged(ema);
///     evaluate(model);
///   }
/// \endcode
///
/// With an optimizer of mezzo's set `ema_decay` in its options instead
/// (mezzo/optim/fused_options.h): that costs no pass over memory and no host sync. Both follow one
/// rule, that of torch's AveragedModel: every parameter, frozen ones too, in every applied step.
/// Their stores and files are two: an optimizer's average is written in the pass that writes the
/// weight, so it lies, and is saved, with the parameter's other state. An Ema has no such state to
/// join, and stands beside any optimizer, so its file is its own list.
///
/// Averages are in float (double for double) on the parameters' device, and begin as the weights at
/// construction. Holds the parameters, as an optimizer does: they may be written and given other
/// memory; for parameters that are added to an optimizer later make an Ema of their own. Buffers
/// are not averaged: batch norm's statistics in the model are those of the training weights; run
/// some batches through the averaged model in training mode to have its own. One thread at a time.
class Ema {
 public:
  /// \throws c10::Error unless decay is in [0, 1), parameters are dense and of floating point, and
  ///   masters, where given, are as many, and of the same shapes
  explicit Ema(std::vector<at::Tensor> parameters, EmaOptions options = {});

  /// averages = decay * averages + (1 - decay) * weights.
  /// \throws c10::Error, and changes nothing, where a shape has changed, or where an EmaScope is
  ///   alive: the parameters then hold averages
  void update();

  /// The same if the step ran. Waits to know: not at all with an optimizer of libtorch's, for the
  /// device with one of mezzo's that steps there.
  void update(const StepResult& result);

  /// How often there was an update.
  std::int64_t updates() const noexcept { return updates_; }
  double decay() const noexcept { return options_.decay; }
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// In the order of the parameters.
  const std::vector<at::Tensor>& averages() const noexcept { return averages_; }

 private:
  /// What is averaged, in the order of the parameters.
  std::vector<at::Tensor> weights() const;
  /// Averages begin, or follow their weights to another device.
  void settle(const std::vector<at::Tensor>& weights);
  void restore(std::int64_t updates, const std::vector<at::Tensor>& averages);

  std::vector<at::Tensor> parameters_;
  EmaOptions options_;
  std::vector<at::Tensor> averages_;
  std::int64_t updates_ = 0;

  template <class Archive>
  requires std::same_as<Archive, torch::serialize::InputArchive>
  friend Archive& operator>>(Archive& archive, Ema& ema);
};

/// Averaged weights in the model, as long as it lives.
///
/// The parameters are given other memory, which holds the averages rounded to their dtypes; at the
/// end they get back their own, untouched. So training goes on bitwise identical, with masters
/// whole and split; the price is the memory of one copy of the weights. Parameters without an
/// average (of a group without ema_decay, or before the first step) stay as they are. Copies of a
/// model that are made meanwhile, and files of it, have the averaged weights: that is how to export
/// them.
///
/// Meanwhile evaluate, and do not train: what is written to the parameters is gone at the end, and
/// a step of an optimizer would make its masters follow the averages. CheckpointManager
/// (mezzo/checkpoint/checkpoint.h) refuses to save or load such parameters, and Ema to update from
/// them. Views of parameters that were made before, and captured CUDA graphs, keep to the training
/// weights. Begin and end it outside of autocast regions, whose cache would not notice. Guards
/// nest, and end in reverse order, exceptions included. One thread: no other may use the parameters
/// when it begins or ends.
class [[nodiscard]] EmaScope {
 public:
  /// The averages of one of mezzo's optimizers with `ema_decay`. Before the first step they are the
  /// weights. \throws c10::Error if it keeps none
  explicit EmaScope(const torch::optim::Optimizer& optimizer);
  explicit EmaScope(const Ema& ema);
  ~EmaScope();
  EmaScope(const EmaScope&) = delete;
  EmaScope& operator=(const EmaScope&) = delete;
  EmaScope(EmaScope&&) = delete;
  EmaScope& operator=(EmaScope&&) = delete;

 private:
  void put_in(const std::vector<std::pair<at::Tensor, at::Tensor>>& averages);
  void put_back() noexcept;

  std::vector<detail::LentParameter> lent_;
};

/// `torch::save(ema, path)` and `torch::load(ema, path)`: averages and their number of updates, not
/// the decay (include <torch/serialize.h>). \throws c10::Error, and changes nothing, where the
/// parameters have other shapes
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const Ema& ema);

template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(Archive& archive,
                                                                                   Ema& ema);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/ema_impl.h>  // IWYU pragma: export
