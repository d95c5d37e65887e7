/// \file
/// An exponential moving average of weights, kept beside any optimizer, and put into a model for
/// evaluation.
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

struct EmaOptions {
  /// How much of the average an update keeps: at least 0 and less than 1.
  double decay = 0.999;
  /// Returns what is averaged in place of the parameters, in their order, where an optimizer keeps
  /// masters in float; undefined, or the parameter itself, where there is no master. Called at
  /// construction and at each update, for loading a file replaces masters:
  ///
  ///     mezzo::Ema ema(model->parameters(),
  ///                    {.masters = [&] { return mezzo::master_params(optimizer); }});
  std::function<std::vector<at::Tensor>()> masters = nullptr;
  /// Of an Ema of a model: averages its buffers of a floating dtype too, as torch's
  /// AveragedModel(use_buffers=True) does. Otherwise they stay as training leaves them.
  bool buffers = false;
};

/// Keeps an exponential moving average of each parameter, beside any optimizer.
///
/// \code
///   mezzo::Ema ema(model->parameters(), {.decay = 0.999});
///   ...
///   ema.update(scaler.step(optimizer));  // a skipped step moves no average
///   ...
///   {
///     mezzo::EmaScope averaged(ema);
///     evaluate(model);
///   }
/// \endcode
///
/// Averages are float (double for double), lie on the parameters' device, and begin as the weights
/// at construction. An update moves all of them, those of frozen parameters too: Ema is torch's
/// AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) after an update_parameters(model)
/// at construction. Memory: 4 bytes an element (8 of double).
///
/// Made from the model (`mezzo::Ema ema(*model)`), it knows the buffers as well: averages those of
/// a floating dtype if the options say so, and writes a whole model with `copy_to`.
///
/// Holds the parameters, as an optimizer does: they may be written and given other memory. For
/// parameters that join later make another Ema. Moved, and not copied,
/// for a copy would share the averages. One thread at a time.
class Ema {
 public:
  /// \throws c10::Error unless decay is in [0, 1), parameters are dense and of floating point, and
  ///   masters, where given, are as many, and of the same shapes
  explicit Ema(std::vector<at::Tensor> parameters, EmaOptions options = {});
  /// An Ema of the parameters of `model`, and of its buffers if `options.buffers`. The masters of
  /// the options, where given, are those of the parameters. \throws c10::Error as above
  explicit Ema(const torch::nn::Module& model, EmaOptions options = {});
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;
  Ema(Ema&&) = default;
  Ema& operator=(Ema&&) = default;
  ~Ema() = default;

  /// Computes averages = decay * averages + (1 - decay) * weights. Does not wait for a device.
  /// \throws c10::Error, and changes nothing, where a shape has changed, or where an EmaScope is
  ///   alive: the parameters then hold averages
  void update();

  /// Updates if the step ran, and leaves all bits as they are if it was skipped. Does not wait for
  /// the device: where the device decided on the step, it also decides here, and in each replay of
  /// a captured CUDA graph (update once before the capture). \throws c10::Error as `update()`
  void update(const StepResult& result);

  /// Writes the averages to a model that is built as the averaged one is: its parameters, and its
  /// buffers, of which those that are not averaged are copied from the training model. For an
  /// evaluation model beside training, or a file: `ema.copy_to(*copy); torch::save(copy, path);`.
  /// \throws c10::Error, and changes nothing, where its parameters or buffers are not as many or
  ///   have other shapes, and where this Ema was made from parameters and the model has buffers
  void copy_to(const torch::nn::Module& model) const;

  /// Returns how many updates there were. Waits for the device if that decides on steps.
  std::int64_t updates() const;
  double decay() const noexcept { return options_.decay; }
  /// Returns what is averaged: the parameters and, with `buffers`, the floating buffers behind
  /// them.
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

/// Puts averaged weights into the model for as long as it lives.
///
/// The parameters are given other memory, which holds the averages rounded to their dtypes; at the
/// end they get back their own, untouched. Training goes on bitwise identical, with masters whole
/// and split; the price is the memory of one copy of the weights. Copies of a model that are made
/// meanwhile, and files of it, have the averaged weights: that is how to export them.
///
/// Meanwhile evaluate, and do not train: what is written to the parameters is gone at the end, and
/// a step of an optimizer would make its masters follow the averages. CheckpointManager
/// (mezzo/checkpoint/checkpoint.h) refuses to save or load such parameters, and Ema to update from
/// them. Buffers stay as training left them: for batch norm's statistics of the averaged weights
/// run some batches through the model in training mode, and restore the buffers afterwards. Views
/// of parameters that were made before, and captured CUDA graphs, keep to the training weights.
/// Begin and end it outside of autocast regions, whose cache would not notice. Guards nest, and end
/// in reverse order, exceptions included. One thread: no other may use the parameters when it
/// begins or ends.
class [[nodiscard]] EmaScope {
 public:
  /// \throws c10::Error, and changes nothing, where a parameter's shape is not its average's
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
