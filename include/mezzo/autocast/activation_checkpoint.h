/// \file
/// Activation checkpointing (torch.utils.checkpoint): stores the inputs of a part of the forward
/// pass and recomputes its activations in backward. Saves memory and costs time (Chen et al. 2016,
/// "Training Deep Nets with Sublinear Memory Cost"). Includes libtorch's autograd engine, which
/// takes nine seconds to compile.
#pragma once

#include <mezzo/autocast/detail/recompute_node.h>
#include <mezzo/base/version.h>

#include <concepts>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of activation_checkpoint.
struct ActivationCheckpointOptions {
  /// Whether the recomputation uses the random numbers of the forward, as dropout needs: of the
  /// default generators of the CPU and of all CUDA devices in use. False saves some microseconds
  /// without random ops. Reset other generators yourself.
  bool preserve_rng_state = true;
};

/// Returns `function(args...)`, and calls it again in backward instead of storing its activations.
///
///     x = mezzo::activation_checkpoint(block, x);  // a module or any callable
///     auto [hidden, weights] =
///         mezzo::activation_checkpoint([&](const torch::Tensor& h) { ... }, x);
///     x = mezzo::activation_checkpoint({.preserve_rng_state = false}, block, x, mask);
///
/// Gradients are bitwise identical to those without the checkpoint, with one exception
/// (docs/guide.md), also for nested checkpoints, in `torch::autograd::grad` and with retain_graph.
/// Double backward throws. Without grad mode, or if nothing requires grad, only calls the function.
/// No host sync.
///
/// `function` must compute the same each time: what it reads must not change before backward, and
/// it must have no other lasting effect (batch norm would update its running statistics twice). It
/// and `args` are copied, or moved from rvalues; references in them must stay valid until backward.
/// Pass std::ref to avoid a copy. The result has its tensors as a Tensor, in optionals, containers,
/// pairs, tuples, or in a struct with a member `auto tensors() { return std::tie(logits, loss); }`.
///
/// \throws c10::Error if `function` modifies a tensor argument in place; in backward, if a tensor
///   argument was modified in place since, if the recomputation uses other tensors that require
///   grad, and for create_graph. Rethrows exceptions of `function`, also in backward.
template <class F, class... Args>
auto activation_checkpoint(const ActivationCheckpointOptions& options, F&& function,
                           Args&&... args) {
  static_assert(detail::RecomputableCallable<std::decay_t<F>, detail::OwningType<Args>...>,
                "mezzo::activation_checkpoint: the function is called twice, so it must take its "
                "arguments by value, by const reference or as lvalues, and not as rvalues");
  // Stored as std::bind_front does, except a TensorList, which would dangle.
  return detail::checkpointed_forward(std::make_shared<std::decay_t<F>>(std::forward<F>(function)),
                                      std::make_shared<std::tuple<detail::OwningType<Args>...>>(
                                          detail::to_owning(std::forward<Args>(args))...),
                                      options.preserve_rng_state);
}

/// Calls activation_checkpoint with default options.
template <class F, class... Args>
auto activation_checkpoint(F&& function, Args&&... args) requires(
    !std::same_as<std::remove_cvref_t<F>, ActivationCheckpointOptions>) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::forward<F>(function),
                               std::forward<Args>(args)...);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
