/// \file
/// The node that stands in autograd's graph for everything that a checkpointed call computed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <mezzo/autocast/detail/activation_checkpoint/checkpointed_call.h>
#include <mezzo/autocast/detail/activation_checkpoint/run_conditions.h>
#include <mezzo/autocast/detail/activation_checkpoint/run_graph.h>
#include <mezzo/autocast/detail/activation_checkpoint/temporary_edges.h>
#include <mezzo/autocast/detail/activation_checkpoint/watched_tensor.h>
#include <mezzo/base/version.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// All that a recomputation takes.
struct Recomputation {
  std::unique_ptr<CheckpointedCall> call;
  RunConditions conditions;
  std::vector<WatchedTensor> watched;
  std::vector<std::size_t> results{};  ///< which of the result's tensors the node stands for
  GraphTrace ops{};                    ///< what the first run did
  torch::autograd::edge_list uses{};   ///< where its boundary edges led
};

/// The gradient edges of the results that the node stands for.
inline torch::autograd::edge_list result_edges(const std::vector<at::Tensor>& tensors,
                                               const std::vector<std::size_t>& results) {
  torch::autograd::edge_list edges;
  for (const auto i : results) {
    TORCH_CHECK(i < tensors.size() && tensors[i].defined() && tensors[i].requires_grad(),
                "checkpoint: result ", i,
                " of the first run is missing from the recomputation, or "
                "does not require grad there.",
                kSameEachTime);
    edges.push_back(torch::autograd::impl::gradient_edge(tensors[i]));
  }
  return edges;
}

/// Its inputs are the results of the call. It has one next edge for each *use* of a tensor from
/// outside, in the order in which the call's own graph would deliver the gradients: they are then
/// summed up in that order too, and come out the same to the bit. (Inside another checkpoint its
/// own next edges are replaced for a while, which is why the uses are kept apart from them.)
class CheckpointNode final : public torch::autograd::Node {
 public:
  explicit CheckpointNode(Recomputation recomputation)
      : recomputation_(std::make_shared<Recomputation>(std::move(recomputation))) {
    for (const auto& use : recomputation_->uses) add_next_edge(use);
  }

  std::string name() const override { return "mezzo::activation_checkpoint"; }

  /// Runs the call again and sends the gradients through its graph. The engine calls this, in the
  /// thread of the node's device; another call of the engine inside is what libtorch calls a
  /// reentrant backward.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const auto again = recomputation();
    if (std::ranges::none_of(gradients, &at::Tensor::defined)) {
      return torch::autograd::variable_list(num_outputs());
    }
    torch::autograd::edge_list roots;
    const RunGraph graph = run_again(*again, roots);
    torch::autograd::variable_list root_gradients;
    torch::autograd::edge_list given;
    for (std::size_t i = 0; i < roots.size(); ++i) {
      if (!gradients[i].defined()) continue;
      given.push_back(std::move(roots[i]));
      root_gradients.push_back(std::move(gradients[i]));
    }
    return backward(graph, given, root_gradients);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    recomputation_.reset();
  }

 private:
  /// Shared with the caller: nothing is locked while the user's function runs, since a device
  /// thread may meet this node again, for another backward pass, while it waits for this one.
  std::shared_ptr<Recomputation> recomputation() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(recomputation_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    return recomputation_;
  }

  RunGraph run_again(const Recomputation& again, torch::autograd::edge_list& roots) const {
    for (const auto& tensor : again.watched) tensor.check("between its forward and its backward");
    const RunConditions::Scope scope(again.conditions);
    const GraphMark start;
    roots = result_edges(again.call->result_tensors(), again.results);
    RunGraph graph(roots, start);
    check_same_ops(again.ops, trace(graph));
    check_same_targets(again.uses, targets(graph));
    return graph;
  }

  torch::autograd::variable_list backward(const RunGraph& graph,
                                          const torch::autograd::edge_list& roots,
                                          const torch::autograd::variable_list& gradients) const {
    const bool create_graph = c10::GradMode::is_enabled();
    std::vector<bool> wanted;
    for (std::size_t i = 0; i < num_outputs(); ++i) wanted.push_back(task_should_compute_output(i));
    TemporaryEdges edges(graph);
    edges.drop_unwanted(wanted);
    GradientTaps taps(edges);
    torch::autograd::Engine::get_default_engine().execute(
        roots, gradients, /*keep_graph=*/create_graph, create_graph, /*accumulate_grad=*/true);
    return taps.take();
  }

  std::shared_ptr<Recomputation> recomputation_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
