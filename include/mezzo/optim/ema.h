/// \file
/// Exponential moving averages of weights, with any optimizer, and a guard that evaluates a model
/// with them.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/averaged_parameters.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Which averages an Ema keeps.
struct EmaOptions {
  /// The fraction of the average that an update keeps; at least 0 and less than 1.
  double decay = 0.999;
  /// Returns float masters, which are averaged in place of the parameters: one tensor for each
  /// parameter, in order; undefined, or the parameter itself, for a parameter without master.
  /// Called at construction and at each update, since loading a file replaces masters:
  ///
  ///     mezzo::Ema ema(model->parameters(),
  ///                    {.masters = [&] { return mezzo::master_params(optimizer); }});
  std::function<std::vector<at::Tensor>()> masters = nullptr;
  /// Whether an Ema of a model averages its floating buffers too, as torch's
  /// AveragedModel(use_buffers=True) does. Otherwise buffers keep their training values.
  bool buffers = false;
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
/// An Ema of a model (`mezzo::Ema ema(*model)`) also knows the buffers: it averages the floating
/// ones if `buffers` is true, and `copy_to` writes a whole model.
///
/// Holds the parameters, as an optimizer does: they may be written and given other memory.
/// Parameters that are added later need another Ema. Movable, not copyable. One thread at a time.
class Ema {
 public:
  /// \throws c10::Error unless decay is in [0, 1), the parameters are dense and floating, and
  ///   masters, if given, have the same number and shapes
  explicit Ema(std::vector<at::Tensor> parameters, EmaOptions options = {});
  /// Makes an Ema of the parameters of `model`, and of its floating buffers if `options.buffers`.
  /// `options.masters`, if given, returns masters of the parameters only. \throws c10::Error as
  /// above
  explicit Ema(const torch::nn::Module& model, EmaOptions options = {});
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

  /// Writes the averages to another model of the same structure. Buffers that are not averaged are
  /// copied from the training model. For a separate evaluation model, or a file:
  /// `ema.copy_to(*copy); torch::save(copy, path);`.
  /// \throws c10::Error, and changes nothing, if the number or shapes of its parameters or buffers
  ///   differ, or if this Ema was made from parameters and the model has buffers
  void copy_to(const torch::nn::Module& model) const;

  /// Returns the number of updates. Waits for the device if the device decides on steps.
  std::int64_t updates() const;
  /// Returns the share of the averages that an update keeps.
  double decay() const noexcept { return options_.decay; }
  /// Returns the averaged tensors: the parameters, followed by the floating buffers if `buffers`.
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Returns the averages, in the order of the parameters.
  const std::vector<at::Tensor>& averages() const noexcept { return averages_; }

 private:
  std::vector<at::Tensor> weights() const;
  void follow(const std::vector<at::Tensor>& weights);
  void move(const at::Tensor& found_inf);
  void count(const at::Tensor& found_inf);
  void restore(std::int64_t updates, const std::vector<at::Tensor>& averages);

  std::vector<at::Tensor> parameters_;
  EmaOptions options_;
  std::vector<at::Tensor> averages_;
  std::size_t averaged_buffers_ = 0;        // the last of parameters_
  std::vector<at::Tensor> copied_buffers_;  // the model's others
  std::int64_t updates_on_host_ = 0;        // see StepCount
  at::Tensor updates_on_device_;

  /// A checkpoint of several ranks does not compare averages of buffers, which differ by rank.
  friend bool differs_by_rank(const Ema& ema) { return ema.averaged_buffers_ > 0; }

  template <class Archive>
  requires std::same_as<Archive, torch::serialize::InputArchive>
  friend Archive& operator>>(Archive& archive, Ema& ema);
};

/// Replaces the weights of the parameters by their averages for a scope.
///
/// The constructor gives the parameters other memory, which holds the averages rounded to their
/// dtypes. The destructor gives them back their own memory, untouched, so training continues
/// bitwise identically, also with whole or split masters. The price is memory for one copy of the
/// weights. Copies and files of the model that are made within the scope have the averaged weights.
///
/// Evaluate within the scope; do not train. Writes to the parameters are lost at its end, and an
/// optimizer's step would copy the averages into its masters. Inside the scope mezzo's optimizers
/// throw in `step`, in `unscale_` and `master_params` of masters, and when split masters are saved.
/// CheckpointManager
/// (mezzo/checkpoint/checkpoint.h) refuses to save or load such parameters, and Ema refuses to
/// update. Buffers keep their training values: to get batch-norm statistics for the averaged
/// weights, run some batches in training mode, and restore the buffers afterwards. Older views of
/// the parameters and captured CUDA graphs keep using the training weights. Begin and end the scope
/// outside of autocast regions, whose cache would not notice the change. Guards nest, and end in
/// reverse order. No other thread may use the parameters while the guard begins or ends.
class [[nodiscard]] EmaScope {
 public:
  /// \throws c10::Error, and changes nothing, if the shapes of a parameter and its average differ
  explicit EmaScope(const Ema& ema);
  ~EmaScope();
  EmaScope(const EmaScope&) = delete;
  EmaScope& operator=(const EmaScope&) = delete;
  EmaScope(EmaScope&&) = delete;
  EmaScope& operator=(EmaScope&&) = delete;

 private:
  void put_back() noexcept;

  std::vector<detail::LentParameter> lent_;
};

/// Save and load the averages and the number of updates, not the decay: `torch::save(ema, path)`
/// and `torch::load(ema, path)` (include <torch/serialize.h>). Loading \throws c10::Error, and
/// changes nothing, if the shapes differ
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const Ema& ema);

/// Loads averages and the number of updates; see operator<<.
template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(Archive& archive,
                                                                                   Ema& ema);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/ema_impl.h>  // IWYU pragma: export
