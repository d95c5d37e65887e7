/// \file
/// RunGraph, the part of autograd's graph that one run of a function adds, with the edges by which
/// it hangs on arguments, parameters and whatever else the function captures.
#pragma once

#include <mezzo/autocast/detail/autograd_node.h>
#include <mezzo/base/version.h>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A moment in a thread, which tells the nodes made there since from all others. Nodes of one
/// thread are numbered as they are made; those that accumulate into leaves have the highest number
/// of all.
class GraphMark {
 public:
  bool made_since(const torch::autograd::Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= first_ &&
           node.sequence_nr() != std::numeric_limits<uint64_t>::max();
  }

 private:
  uint64_t thread_ = at::RecordFunction::currentThreadId();
  uint64_t first_ = at::sequence_number::peek();
};

/// Sets an edge of `node`. An in-place op on a view is a node with the op's own node inside, which
/// has the same edges but for the first, and the engine insists on that.
inline void set_edge(torch::autograd::Node& node, std::size_t index, torch::autograd::Edge edge) {
  auto* const copy_slices = dynamic_cast<torch::autograd::CopySlices*>(&node);
  if (copy_slices != nullptr && copy_slices->fn != nullptr && index > 0) {
    copy_slices->fn->next_edges()[index] = edge;
  }
  node.next_edges()[index] = std::move(edge);
}

/// Stands where an edge left a run's graph: the engine hands over the gradient that arrives here.
/// To the engine it looks like the node it stands in for: same shape, dtype, device and stream.
class GraphEnd final : public torch::autograd::Node {
 public:
  explicit GraphEnd(const torch::autograd::Edge& target) {
    input_metadata_.push_back(target.function->input_metadata(target.input_nr));
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
    return {};
  }
};

/// The nodes that a run made and its results depend on, last made first: the order in which the
/// engine runs them, and so the order in which gradients arrive where the graph ends.
class RunGraph {
 public:
  RunGraph(const torch::autograd::edge_list& roots, const GraphMark& start) {
    std::unordered_set<torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> nodes;
    const auto add = [&](const torch::autograd::Edge& edge) {
      auto* node = edge.function.get();
      if (node != nullptr && start.made_since(*node) && seen.insert(node).second) {
        nodes.push_back(node);
      }
    };
    for (const auto& root : roots) add(root);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      auto* const node = nodes[i];
      for (const auto& edge : std::as_const(*node).next_edges()) add(edge);
    }
    std::ranges::sort(nodes, std::ranges::greater{}, &torch::autograd::Node::sequence_nr);
    for (auto* node : nodes) {
      for (std::size_t i = 0; i < node->num_outputs(); ++i) {
        const torch::autograd::Edge& edge = node->next_edge(i);
        if (!edge.is_valid() || seen.contains(edge.function.get())) continue;
        leaving_.emplace_back(node, i);
        uses_.push_back(edge);
      }
    }
  }

  /// Returns the edges that leave the graph, one for each use of a tensor from outside.
  const torch::autograd::edge_list& uses() const { return uses_; }

  /// Cuts the graph off from everything outside. Returns edges to the ends, one for each use: the
  /// engine would add up at a common end what should be added to other gradients one by one.
  torch::autograd::edge_list cut() const {
    torch::autograd::edge_list ends;
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      ends.emplace_back(make_node<GraphEnd>(uses_[i]), 0);
      set_edge(*leaving_[i].first, leaving_[i].second, ends.back());
    }
    return ends;
  }

 private:
  std::vector<std::pair<torch::autograd::Node*, std::size_t>> leaving_;
  torch::autograd::edge_list uses_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
