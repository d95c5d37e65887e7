/// \file
/// Activation checkpointing (torch.utils.checkpoint in Python): a part of the forward pass keeps
/// only its inputs, and backward computes its activations a second time. Saves memory and costs
/// time (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
///
/// Brings in libtorch's autograd engine, about nine seconds of compile time.
#pragma once

#include <mezzo/autocast/detail/recompute_node.h>
#include <mezzo/base/version.h>

#include <concepts>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of a checkpoint.
struct ActivationCheckpointOptions {
  /// Whether the recomputation draws the random numbers of the first run, as dropout needs: from
  /// the default generators of the CPU and of all CUDA devices in use. Without random ops, false
  /// saves some microseconds. Generators of your own are yours to reset.
  bool preserve_rng_state = true;
};

/// Calls `function(args...)` and returns its result, but keeps only the arguments and the function
/// until backward, which calls it again to get the activations back. docs/guide.md says more.
///
///     x = mezzo::activation_checkpoint(block, x);  // a module or any callable
///     auto [hidden, weights] =
///         mezzo::activation_checkpoint([&](const torch::Tensor& h) { ... }, x);
///     x = mezzo::activation_checkpoint({.preserve_rng_state = false}, block, x, mask);
///
/// Gradients equal those without the checkpoint to the bit, with one exception (docs/guide.md),
/// also where checkpoints nest, in `torch::autograd::grad` and with retain_graph. Gradients of
/// gradients are refused. When grad mode is off, or nothing requires grad, this is a plain call. No
/// host sync of its own.
///
/// `function` must compute the same each time, so that what it reads must not change before
/// backward, and have no other lasting effect: batch norm, for example, would update its running
/// statistics twice. It and `args`, which may be anything, are
/// copied, or moved from rvalues; what they refer to must live until backward. Pass std::ref to
/// avoid a copy. The result holds its tensors as a Tensor, in optionals, containers, pairs, tuples,
/// or in a struct with a member `auto tensors() { return std::tie(logits, loss); }`.
///
/// \throws c10::Error when `function` modifies a tensor argument in place; in backward, when a
///   tensor argument was modified in place since, when the second run uses other tensors that
///   require grad than the first, and for create_graph. Exceptions of `function` pass through, in
///   backward too.
template <class F, class... Args>
auto activation_checkpoint(const ActivationCheckpointOptions& options, F&& function,
                           Args&&... args) {
  static_assert(detail::RecomputableCallable<std::decay_t<F>, detail::OwningType<Args>...>,
                "mezzo::activation_checkpoint: the function is called twice, so it must take its "
                "arguments by value, by const reference or as lvalues, and not as rvalues");
  // Stored as std::bind_front stores them, but for a TensorList, which would dangle.
  return detail::checkpointed_forward(std::make_shared<std::decay_t<F>>(std::forward<F>(function)),
                                      std::make_shared<std::tuple<detail::OwningType<Args>...>>(
                                          detail::to_owning(std::forward<Args>(args))...),
                                      options.preserve_rng_state);
}

/// Calls `activation_checkpoint` with the default options.
template <class F, class... Args>
auto activation_checkpoint(F&& function, Args&&... args) requires(
    !std::same_as<std::remove_cvref_t<F>, ActivationCheckpointOptions>) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::forward<F>(function),
                               std::forward<Args>(args)...);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
