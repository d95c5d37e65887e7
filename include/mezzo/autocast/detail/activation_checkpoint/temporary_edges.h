/// \file
/// A run's graph cut off from everything outside, and its gradients caught at the cuts.
#pragma once

#include <ATen/core/Tensor.h>
#include <mezzo/autocast/detail/activation_checkpoint/run_graph.h>
#include <mezzo/base/detail/autograd_node.h>
#include <mezzo/base/version.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/input_metadata.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <ranges>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sets an edge of `node`. An in-place op on a view is a node with the op's own node inside, which
/// has the same edges but for the first, and the engine insists on that.
inline void set_edge(torch::autograd::Node& node, std::size_t index, torch::autograd::Edge edge) {
  auto* const copy_slices = dynamic_cast<torch::autograd::CopySlices*>(&node);
  if (copy_slices != nullptr && copy_slices->fn != nullptr && index > 0) {
    copy_slices->fn->next_edges()[index] = edge;
  }
  node.next_edges()[index] = std::move(edge);
}

/// Lets the edges of a run's graph be changed, and puts them back: the graph of a backward pass
/// with create_graph lives on, and is differentiated through its own edges.
class TemporaryEdges {
 public:
  explicit TemporaryEdges(const RunGraph& graph) : graph_(graph) {
    for (const auto* node : graph.nodes) found_.push_back(node->next_edges());
  }
  ~TemporaryEdges() {
    for (std::size_t n = 0; n < found_.size(); ++n) {
      for (std::size_t i = 0; i < found_[n].size(); ++i) {
        set_edge(*graph_.nodes[n], i, std::move(found_[n][i]));
      }
    }
  }
  TemporaryEdges(const TemporaryEdges&) = delete;
  TemporaryEdges& operator=(const TemporaryEdges&) = delete;

  const std::vector<BoundaryEdge>& boundary() const { return graph_.boundary; }

  /// Removes the boundary edges that are not wanted, and every edge that then leads nowhere else.
  void drop_unwanted(const std::vector<bool>& wanted) {
    if (std::ranges::all_of(wanted, std::identity{})) return;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (!wanted[i]) set_edge(*boundary()[i].source, boundary()[i].index, {});
    }
    std::unordered_set<const torch::autograd::Node*> idle;
    for (auto* node : graph_.nodes | std::views::reverse) {
      bool leads_on = false;
      for (std::size_t i = 0; i < node->num_outputs(); ++i) {
        if (idle.contains(node->next_edge(i).function.get())) set_edge(*node, i, {});
        leads_on = leads_on || node->next_edge(i).is_valid();
      }
      if (!leads_on) idle.insert(node);
    }
  }

 private:
  const RunGraph& graph_;
  std::vector<torch::autograd::edge_list> found_;
};

/// Takes one gradient and passes nothing on. To the engine it looks like the node it stands in for:
/// same shape, dtype, device and stream.
class GradientTap final : public torch::autograd::Node {
 public:
  explicit GradientTap(const torch::autograd::Edge& target) {
    input_metadata_.push_back(target.function->input_metadata(target.input_nr));
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    gradient_ = std::move(gradients[0]);
    return {};
  }

  at::Tensor take() { return std::move(gradient_); }

 private:
  at::Tensor gradient_;
};

/// A tap at every boundary edge that is left. One for each edge, and not for each target, where the
/// engine would add up what should be added to other gradients one by one.
class GradientTaps {
 public:
  explicit GradientTaps(TemporaryEdges& edges) {
    for (const auto& boundary : edges.boundary()) {
      auto& tap = taps_.emplace_back();
      if (!boundary.edge().is_valid()) continue;
      tap = make_node<GradientTap>(boundary.edge());
      set_edge(*boundary.source, boundary.index, {tap, 0});
    }
  }

  /// What arrived, in the order of the boundary edges; undefined where nothing did. Once only.
  torch::autograd::variable_list take() {
    torch::autograd::variable_list gradients;
    gradients.reserve(taps_.size());
    for (const auto& tap : taps_) gradients.push_back(tap ? tap->take() : at::Tensor());
    return gradients;
  }

 private:
  std::vector<NodePtr<GradientTap>> taps_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
