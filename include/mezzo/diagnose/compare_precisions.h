/// \file
/// Which precision should this model use? Runs it in float32 and in each candidate, on the same
/// weights, batches and random numbers, and says what differs:
///
///     auto loss = [](auto& net, const Batch& batch) { return criterion(net(batch.x), batch.y); };
///     auto comparison = mezzo::compare_precisions(model, loss, batches);
///     std::cout << comparison;                                   // a table, and what costs most
///     std::ofstream("policy.txt") << comparison.proposal().setting.policy;
///     // in the training program:
///     auto policy = mezzo::install_op_overrides(mezzo::OpPolicy::from_file("policy.txt"));
#pragma once

#include <mezzo/autocast/op_policy.h>
#include <mezzo/base/loss_scale.h>
#include <mezzo/base/matmul_precision.h>
#include <mezzo/base/model_list.h>
#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// One way to train: everything about precision that a training program chooses.
struct PrecisionSetting {
  std::string name;  ///< its row is called so
  /// What autocast lowers to: half or bfloat16. Unset: no autocast.
  std::optional<at::ScalarType> autocast = std::nullopt;
  OpPolicy policy = {};  ///< edits to autocast's op lists
  /// How float32 matrices are multiplied. With another than HIGHEST cuDNN may use TF32 too.
  at::Float32MatmulPrecision float32 = at::Float32MatmulPrecision::HIGHEST;
  /// What weights are cast to. Without autocast all floating parameters and buffers, as by
  /// `model->to(dtype)`. With autocast those of two dimensions or more: norms and biases stay in
  /// float32, as Apex's O2 keeps batch norms. Unset: as they are.
  std::optional<at::ScalarType> weights = std::nullopt;
  /// How the optimizer keeps weights of 16 bits from step to step.
  optim::WeightStorage weight_storage = optim::WeightStorage::plain;
  LossScale loss_scale = LossScale::none();  ///< the GradScaler's scale
};

/// What is tried unless the caller says otherwise: TF32 (on CUDA), autocast to bfloat16, autocast
/// to half under a dynamic loss scale, and bfloat16 weights with autocast, once with masters in
/// float, and once with stochastic rounding.
std::vector<PrecisionSetting> candidate_precisions(c10::DeviceType device);

/// What compare_precisions runs, and for how long.
struct ComparisonOptions {
  /// A setting is proposed if its gradient error is at most this.
  double max_gradient_error = 0.05;
  /// Of how many batches, from the first, gradients are compared; float32's are kept in memory
  /// meanwhile. At most as many as there are.
  std::size_t gradient_batches = 2;
  /// The rate of the AdamW that trains; its other options are the defaults.
  double learning_rate = 1e-4;
  /// Whether to look for what causes the error, and for a policy that repairs it. Takes a forward
  /// and backward pass for each op and each module that ran in low precision.
  bool rank_causes = true;
};

/// How far the gradient of one parameter is from float32's.
struct ParameterError {
  std::string name;  ///< of the parameter, in the model
  /// |g - g32| / |g32|. Of a parameter whose true gradient is zero, as the bias of attention's keys
  /// has it, this is large and means nothing: see `share`.
  double relative_error = 0;
  double cosine = 1;  ///< of the angle between g and g32
  double share = 0;   ///< its part of the squared error of all parameters, 0 to 1
};

/// An op, or a module by its name in the model, and the gradient error that is left when it alone
/// runs in float32.
struct PrecisionCause {
  std::string name;          ///< "aten::bmm", or "encoder.0"
  double error_without = 0;  ///< relative to the norm of the float32 gradient
  /// Calls of ops on no list of autocast's that then run in float32 too, because they read its
  /// result: what they cost in low precision is gone as well, and the cause may be theirs.
  std::int64_t others = 0;
};

/// What one setting came to.
struct PrecisionRow {
  PrecisionSetting setting;  ///< that was run
  /// |g - g32| / |g32| of all gradients as one vector, at the model's weights. Infinity: there is
  /// an inf or NaN in them, at every loss scale.
  double gradient_error = 0;
  double cosine = 1;                            ///< of the angle between the two vectors
  std::vector<ParameterError> parameters = {};  ///< the largest share first; none of float32
  std::vector<double> losses = {};              ///< of the steps that trained, one a batch
  double loss_difference = 0;  ///< mean |loss - loss32| / mean |loss32| over the steps
  double skipped = 0;          ///< share of steps that an inf or NaN skipped
  double step_seconds = 0;     ///< median over the steps, of which the first does not count
  /// Most bytes in use at a time in training: weights, gradients, activations and the optimizer's
  /// state, on all devices. Unset under libtorch's profiler.
  std::optional<int64_t> peak_bytes = std::nullopt;
  /// Whether a matrix product runs in another precision than float32's; if not it cannot be faster.
  bool lowers_products = true;
  double single_batch_error = 0;  ///< gradient_error of the first batch: what the causes are of
  std::vector<PrecisionCause> ops = {};      ///< where autocast is on: the costliest first
  std::vector<PrecisionCause> modules = {};  ///< likewise, by module
  std::string failure = {};  ///< what the model threw under this setting; empty if it ran
};

/// All settings side by side. Printing it gives a table.
struct PrecisionComparison {
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< where all settings ran
  double max_gradient_error = 0;                           ///< the options' bound
  /// float32 first, then the settings in their order, each followed by its repair where there is
  /// one: the same setting with a policy that keeps the costliest ops in float32.
  std::vector<PrecisionRow> rows;

  /// The fastest row that lowers products, whose gradient error is at most `max_gradient_error` and
  /// whose losses are finite; float32's if there is no other. `setting.policy` is an OpPolicy:
  /// `to_string` and `from_file` save and load it.
  const PrecisionRow& proposal() const;
};

/// Prints a table of the rows, the proposal, and the costliest ops and modules of each row.
inline std::ostream& operator<<(std::ostream& stream, const PrecisionComparison& comparison);

namespace detail {

/// No torch::jit::Module: under autocast libtorch's executor keeps the casts of its first call.
template <class M>
concept ComparableModel =
    ModelHandle<std::remove_cvref_t<M>> || ModuleVariable<std::remove_reference_t<M>>;

}  // namespace detail

/// Runs `model` in float32 and in each of `settings` (candidate_precisions if empty).
///
/// Gradients are compared at the model's present weights, batch by batch, so that they differ by
/// precision alone; a dynamic loss scale backs off first, on the same batch, until they are finite.
/// Then each setting trains a step a batch with AdamW, which gives losses, skipped steps, time and
/// memory. The costliest ops and modules are found by running one at a time in float32, forward and
/// backward, on the first batch; a module counts through ops that read its own parameters.
///
/// \param model  a torch::nn::Module, a module holder or a std::shared_ptr to one, and of a script
///   its mezzo::ScriptModule; in the mode (`train()`, `eval()`) in which it is to be compared. Its
///   parameters are float32 or double. On CUDA dropout may draw other masks in other dtypes, which
///   counts as error: use `eval()` there.
/// \param loss  called as `loss(model, batch)` with autocast set as the setting says; returns a
///   tensor of one element. Whatever else it changes is not put back
/// \param batches  a range that can be walked more than once, on the model's device; ten batches or
///   more give a time and losses worth reading
///
/// Parameters, buffers, gradients, their memory and versions, and the default random generators are
/// afterwards what they were, to the bit, also when it throws; optimizers that hold the parameters
/// do not notice. Meanwhile the model holds copies: 4 bytes a parameter more, and what AdamW takes.
///
/// Ask on a quiet machine. Waits for the device. No other thread may use the model, or multiply
/// matrices, meanwhile (MatmulPrecisionGuard). With `rank_causes` it installs overrides of the ops
/// that it tries (see install_op_overrides): call it before other threads run ops.
/// \throws c10::Error for a model without parameters to train or of another dtype, for no batches,
///   for options out of range, inside an autocast region or inference mode, while GradBuckets,
///   DataParallel or other hooks stand on the parameters, and what float32 throws. What another
///   setting throws is its row's `failure`
template <detail::ComparableModel Model, class Loss, class Batches>
PrecisionComparison compare_precisions(Model&& model, const Loss& loss, const Batches& batches,
                                       const std::vector<PrecisionSetting>& settings = {},
                                       const ComparisonOptions& options = {});

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/compare_precisions_impl.h>  // IWYU pragma: export
