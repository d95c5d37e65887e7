/// \file
/// The forward half of a checkpoint: run once, keep nothing, leave a node that can run again.
#pragma once

#include <ATen/core/Tensor.h>
#include <mezzo/autocast/detail/activation_checkpoint/checkpoint_node.h>
#include <mezzo/autocast/detail/activation_checkpoint/read_tensors.h>
#include <mezzo/base/detail/autograd_node.h>
#include <mezzo/base/version.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Starts watching. Materialises the gradient edges too: autograd renews the node of a view whose
/// base was modified when it is first asked for it, and that must not happen during the run.
inline std::vector<WatchedTensor> watch_arguments(const std::vector<at::Tensor>& tensors) {
  std::vector<WatchedTensor> watched;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (tensor.requires_grad()) torch::autograd::impl::gradient_edge(tensor);
    watched.emplace_back(tensor, "a tensor argument");
  }
  return watched;
}

/// Puts one node in the place of the graph that the run since `start` made behind `results`, whose
/// tensors are replaced by ones without that graph. Results that the run did not compute from a
/// tensor that requires grad, or that are such a tensor themselves, stay as they are.
inline void replace_graph(const std::vector<at::Tensor*>& results, const GraphMark& start,
                          Recomputation recomputation) {
  torch::autograd::edge_list roots;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i]->defined() || !results[i]->requires_grad()) continue;
    auto edge = torch::autograd::impl::gradient_edge(*results[i]);
    if (!start.made_since(*edge.function)) continue;
    recomputation.results.push_back(i);
    roots.push_back(std::move(edge));
  }
  if (roots.empty()) return;
  const RunGraph graph(roots, start);
  recomputation.ops = trace(graph);
  recomputation.uses = targets(graph);
  watch_leaves(recomputation.uses, recomputation.watched);
  const auto replaced = recomputation.results;
  const auto node = make_node<CheckpointNode>(std::move(recomputation));
  for (const auto i : replaced) {
    at::Tensor result = results[i]->detach();
    const auto input_nr = node->add_input_metadata(result);
    torch::autograd::impl::set_gradient_edge(result, {node, input_nr});
    *results[i] = std::move(result);
  }
}

/// Runs `call` and replaces the graph of its result.
template <class Call>
auto first_run(std::unique_ptr<Call> call, bool preserve_random_state) {
  auto watched = watch_arguments(call->argument_tensors());
  RunConditions conditions(preserve_random_state);
  const GraphMark start;
  auto result = [&] {
    const WeightCastsUncached uncached;
    const ReadTensors read;
    auto value = (*call)();
    read.watch_unmodified(watched);
    return value;
  }();
  for (const auto& tensor : watched) tensor.check("by the function itself");
  std::vector<at::Tensor*> results;
  for_each_tensor(result, [&](at::Tensor& tensor) { results.push_back(&tensor); });
  replace_graph(results, start,
                {.call = std::move(call),
                 .conditions = std::move(conditions),
                 .watched = std::move(watched)});
  return result;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
