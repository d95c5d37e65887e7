/// \file
/// Activation checkpointing (torch.utils.checkpoint in Python): a part of the forward pass keeps
/// only its inputs, and backward computes its activations a second time. Saves memory and costs
/// time (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
///
/// Brings in libtorch's autograd engine, about nine seconds of compile time.
#pragma once

#include <mezzo/autocast/detail/activation_checkpoint/checkpoint_node.h>
#include <mezzo/base/version.h>

#include <c10/core/GradMode.h>

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of a checkpoint.
struct ActivationCheckpointOptions {
  /// Whether the recomputation draws the random numbers of the first run, as dropout needs: from
  /// the default generators of the CPU and of all CUDA devices in use. Without random ops, false
  /// saves some microseconds. Generators of your own are yours to reset.
  bool preserve_random_state = true;
};

/// Calls `function(args...)` and returns its result, but keeps only the arguments and the function
/// until backward, which calls it again to get the activations back.
///
///     x = mezzo::activation_checkpoint(block, x);  // a module or any callable
///     auto [hidden, weights] =
///         mezzo::activation_checkpoint([&](const torch::Tensor& h) { ... }, x);
///     x = mezzo::activation_checkpoint({.preserve_random_state = false}, block, x, mask);
///
/// Gradients are those without the checkpoint, to the bit: the recomputation runs under the first
/// run's autocast state, random state and current CUDA device, and its gradients are added up in
/// the same order. (Two exceptions: autocast's weight cache is not used inside, so a weight that is
/// used several times is cast, and its gradient rounded, once each time, and no region inside may
/// ask for it with `.cache = true`; and gradients of gradients are the same but for the
/// order of sums.) It is part of autograd's graph like any op: checkpoints nest,
/// `torch::autograd::grad` and create_graph work, so does backward from inside a backward, hooks on
/// parameters run once, retain_graph computes anew each time, and what no gradient is asked for is
/// skipped. When grad mode is off, or nothing requires grad, it is a plain call.
///
/// `function` must do the same each time; see the errors. It must have no other lasting effect:
/// batch norm's running statistics, for one, would be updated twice. The second call is made by the
/// thread that runs backward, for CUDA one of the engine's. `function` may use threads of its own
/// only for work that needs no gradient.
///
/// `function` and `args` are copied, or moved from rvalues, and passed to it as lvalues, so that
/// move-only ones work; what they refer to must live until backward. Pass std::ref to avoid a copy.
/// `args` may be anything. The result, which must not be void, holds its tensors as a Tensor, in
/// optionals, containers, pairs, tuples, or in a struct with a member
/// `auto tensors() { return std::tie(logits, loss); }`. A result that shares memory with an
/// argument must not be modified in place.
///
/// Throws c10::Error
/// - when `function` modifies a tensor argument in place, whatever it is for;
/// - in backward, when a tensor that it read was modified in place since, or has other memory than
///   then (set_data, an EmaScope that began or ended in between): an argument, a parameter, frozen
///   or not, a buffer, or whatever else its ops took from outside;
/// - in backward, when the recomputation makes other ops than the first run, ops of other shapes or
///   dtypes, or uses other parameters: the message names the first difference.
/// The tensor's version and storage tell of modifications, as they do for tensors that autograd
/// saves. Backward does not throw, and may compute wrong gradients, after changes that they do not
/// tell of:
/// - writes that bump no version: through `data()`, as torch::optim::SGD steps, by a raw pointer,
///   and in place to tensors of inference mode;
/// - to tensors that `function` reads through `data()`, in other threads or without an op;
/// - to tensors that it modifies itself (counters, for example), or made at its first run and kept.
/// Exceptions of `function` pass through, in backward too. No host sync of its own.
template <class F, class... Args>
auto activation_checkpoint(const ActivationCheckpointOptions& options, F&& function,
                           Args&&... args) {
  using Call = detail::StoredCall<std::decay_t<F>, detail::OwningType<Args>...>;
  static_assert(Call::kCallable,
                "mezzo::activation_checkpoint: the function is called twice, so it must take its "
                "arguments by value, by const reference or as lvalues, and not as rvalues");
  static_assert(
      detail::carries_tensors<typename Call::Result>(),
      "mezzo::activation_checkpoint: no tensors in the function's result; return tensors, or a "
      "struct with a member tensors() that lists them");
  auto call = std::make_unique<Call>(std::forward<F>(function), std::forward<Args>(args)...);
  if (!c10::GradMode::is_enabled()) return (*call)();
  return detail::first_run(std::move(call), options.preserve_random_state);
}

/// Calls `activation_checkpoint` with the default options.
template <class F, class... Args>
auto activation_checkpoint(F&& function, Args&&... args) requires(
    !std::same_as<std::remove_cvref_t<F>, ActivationCheckpointOptions>) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::forward<F>(function),
                               std::forward<Args>(args)...);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
