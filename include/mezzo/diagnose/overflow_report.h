/// \file
/// Why was that step skipped? One line for a GradScaler that names the parameters whose gradients
/// were inf or NaN:
///
///     scaler.on_skip(mezzo::OverflowReport(*model));
///
/// Then a skipped step writes the scaler's line, and a second one that names the cause:
///
///     Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss scale to 32768.0
///       head.weight and 3 more, in 2 of 6 layers: head.weight has 3 inf and 1 NaN in 512 gradients,
///       the first, inf, at [0, 17], found after the backward pass; ...
#pragma once

#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/scaling/skipped_step.h>

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// All parameters of a floating dtype, as `named_parameters` orders them, each once.
NamedTensors name_parameters(const torch::nn::Module& model);

/// A model with a name of its own among several.
struct NamedModel {
  std::string name;  ///< in front of the names of its parameters
  std::reference_wrapper<const torch::nn::Module> model;  ///< outlives what it is given to
};

/// All parameters of a floating dtype of `models`, each once: "generator.0.weight".
NamedTensors name_parameters(const std::vector<NamedModel>& models);

/// One parameter whose gradient is not finite.
struct OverflowedParameter {
  std::string name;                      ///< in the model
  std::int64_t elements = 0;             ///< of the gradient; of a sparse one those that it has
  std::int64_t infs = 0;                 ///< how many values are inf or -inf
  std::int64_t nans = 0;                 ///< how many values are NaN
  std::vector<std::int64_t> first = {};  ///< index of the first that is inf or NaN
  double value = 0;                      ///< which it is: inf, -inf or NaN
  /// Whether the gradient is finite, and inf after division by a loss scale below 1. False where
  /// `unscale_` has divided already.
  bool by_unscaling = false;
};

/// The 2-norm of the gradients of a layer (a module with parameters of its own), inf and NaN left
/// out. As `.grad` holds them: they carry the loss scale, unless `unscale_` took it off.
struct LayerNorm {
  std::string layer;  ///< its name in the model
  double norm = 0;    ///< 0 of a layer whose gradients are all inf or NaN
};

/// What the gradients of a skipped step look like.
struct Overflow {
  SkippedStep step = {};                   ///< what the GradScaler told of the step
  std::optional<int> rank = std::nullopt;  ///< of the process, where it was told
  /// The parameters whose gradient was inf or NaN on this rank, before ranks were averaged, at any
  /// time since the last report. Unset unless OverflowReportOptions::own_gradients asks for it.
  std::optional<std::vector<std::string>> own = std::nullopt;
  /// The one that the model registers last comes first. A backward pass comes from there, so that
  /// it is most often where the inf or NaN began.
  std::vector<OverflowedParameter> parameters = {};
  std::vector<LayerNorm> layers = {};  ///< those that have gradients, in the model's order

  /// The layers of `parameters`, each once, in their order.
  std::vector<std::string> overflowed_layers() const;

  /// One line without an end; also where there is nothing to be seen any more, and why.
  std::string cause() const;
};

/// Reads the gradients that `parameters` have now. Writes nothing. Reads all once, and those that
/// are not finite a second time; waits for the device.
/// \param loss_scale  that the gradients carry, or carried
Overflow find_overflow(const NamedTensors& parameters, double loss_scale = 1);

/// What an OverflowReport reads, and whom it tells.
struct OverflowReportOptions {
  std::ostream* stream = &std::cerr;  ///< gets two lines; null: none. Lives as long as the report
  std::function<void(const Overflow&)> callback = {};  ///< called with each skip that is told
  /// Of this process in a job of several: lines are written on rank 0 alone, and name it; the
  /// callback hears on all.
  std::optional<int> rank = std::nullopt;
  /// To know which rank it was. Ranks that average their gradients all have the same ones in
  /// `.grad`; with this, hooks look at each gradient before, which costs one more read of the
  /// gradients a step, and no host sync. Then a rank whose own gradients were inf or NaN writes
  /// too, whichever it is.
  bool own_gradients = false;
};

namespace detail {
class OwnGradients;
}

/// For `GradScaler::on_skip`. One report takes all models that a scaler serves, and names their
/// parameters "generator.0.weight": two reports would write each skip twice.
///
///     scaler.on_skip(mezzo::OverflowReport({{"generator", *g}, {"discriminator", *d}}));
///
/// Costs nothing until a step is skipped, and then a find_overflow. Of
/// steps that are skipped at the same scale again and again it tells the first three and then every
/// 1000th, so that a run that is lost does not fill a disk.
///
/// A report sees what `.grad` holds when the scaler tells of the skip, at `update`. Then `.grad` is
/// as the skipped step left it, but
/// - with StepOptions::zero_grad it is zero, and the report says only that;
/// - on a device the scaler tells some steps late, because nothing waits, and `.grad` is a later
///   step's. To know of the very step, ask before the gradients are cleared:
///
///       if (!result.ran()) std::cerr << mezzo::find_overflow(names, result.scale()).cause();
///
///   `ran()` waits for the device;
/// - ranks that average their gradients all have the same ones: an inf of one rank is in all. Which
///   rank's it was, OverflowReportOptions::own_gradients says, and an AnomalyWatch on each rank.
class OverflowReport {
 public:
  /// Keeps the parameters, not the model. Parameters that are registered later are not seen.
  explicit OverflowReport(const torch::nn::Module& model, OverflowReportOptions options = {});
  /// Keeps the parameters of several models, under the models' names.
  explicit OverflowReport(const std::vector<NamedModel>& models,
                          OverflowReportOptions options = {});

  /// Reads the gradients of a skipped step; for GradScaler::on_skip.
  void operator()(const SkippedStep& step);

 private:
  OverflowReport(NamedTensors parameters, OverflowReportOptions options);

  NamedTensors parameters_;
  std::shared_ptr<detail::OwnGradients> own_;  // null unless it is asked for
  OverflowReportOptions options_;
  std::int64_t skips_at_scale_ = 0;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/diagnose/detail/overflow_report_impl.h>  // IWYU pragma: export
#endif
