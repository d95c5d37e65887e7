/// \file
/// RunGraph, the part of autograd's graph that one run of a function adds, with the edges by which
/// it hangs on arguments, parameters and whatever else the function captures; and the classes that
/// cut this graph off from everything outside and catch its gradients at the cuts.
#pragma once

#include <mezzo/autocast/detail/autograd_node.h>
#include <mezzo/base/version.h>

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <ranges>
#include <sstream>
#include <string>
#include <typeindex>
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

/// An edge that leaves the run's graph: `source->next_edge(index)`.
struct BoundaryEdge {
  torch::autograd::Node* source;
  std::size_t index;

  const torch::autograd::Edge& edge() const { return source->next_edge(index); }
};

/// An op as it is compared with another run's: its backward
/// node's type, and dtype and sizes of its results.
struct OpTrace {
  std::type_index type;
  std::vector<std::pair<at::ScalarType, std::vector<int64_t>>> results;

  explicit OpTrace(const torch::autograd::Node& node) : type(typeid(node)) {
    for (uint32_t i = 0; i < node.num_inputs(); ++i) {
      const auto& metadata = node.input_metadata(i);
      std::vector<int64_t> sizes;
      if (!metadata.was_default_constructed() && !metadata.is_cpp_nested_tensor()) {
        for (const auto& size : metadata.shape_as_dim_vector()) sizes.push_back(size.expect_int());
      }
      results.emplace_back(c10::typeMetaToScalarType(metadata.dtype()), std::move(sizes));
    }
  }

  bool operator==(const OpTrace&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const OpTrace& op) {
  std::string name = c10::demangle(op.type.name());
  for (const std::string scope : {"torch::autograd::generated::", "torch::autograd::"}) {
    if (name.starts_with(scope)) name.erase(0, scope.size());
  }
  out << name;
  for (const auto& [dtype, sizes] : op.results) {
    out << " " << c10::toString(dtype) << c10::IntArrayRef(sizes);
  }
  return out;
}

/// The nodes that a run made and its results depend on, last made first: the order in which the
/// engine runs them, and so the order in which gradients arrive at the boundary edges.
struct RunGraph {
  std::vector<torch::autograd::Node*> nodes;
  std::vector<BoundaryEdge> boundary;

  RunGraph(const torch::autograd::edge_list& roots, const GraphMark& start) {
    std::unordered_set<torch::autograd::Node*> seen;
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
        const BoundaryEdge candidate{node, i};
        if (candidate.edge().is_valid() && !seen.contains(candidate.edge().function.get())) {
          boundary.push_back(candidate);
        }
      }
    }
  }
};

using GraphTrace = std::vector<OpTrace>;

inline GraphTrace trace(const RunGraph& graph) {
  GraphTrace ops;
  ops.reserve(graph.nodes.size());
  for (const auto* node : graph.nodes) ops.emplace_back(*node);
  return ops;
}

/// Returns the edges themselves: what each boundary edge leads to.
inline torch::autograd::edge_list targets(const RunGraph& graph) {
  torch::autograd::edge_list edges;
  edges.reserve(graph.boundary.size());
  for (const auto& boundary : graph.boundary) edges.push_back(boundary.edge());
  return edges;
}

inline constexpr const char* kSameEachTime =
    " The function runs again during backward and must do the same then: it may depend on its "
    "arguments, on captured values that do not change until backward, and on "
    "libtorch's default random generators.";

/// Throws unless `second`, a recomputation, made the ops of the first run.
inline void check_same_ops(const GraphTrace& first, const GraphTrace& second) {
  for (std::size_t i = 0; i < std::min(first.size(), second.size()); ++i) {
    TORCH_CHECK(first[i] == second[i], "activation_checkpoint: op ", i,
                ", counted from the end, was ", first[i], " in the first run and is ", second[i],
                " in the recomputation.", kSameEachTime);
  }
  TORCH_CHECK(first.size() == second.size(), "activation_checkpoint: the first run made ",
              first.size(), " differentiable ops, the recomputation ", second.size(), ".",
              kSameEachTime);
}

/// Throws unless `second`, a recomputation, led to where the first run did.
inline void check_same_targets(const torch::autograd::edge_list& first,
                               const torch::autograd::edge_list& second) {
  TORCH_CHECK(first == second,
              "activation_checkpoint: the recomputation used other parameters or other tensors "
              "that require "
              "grad than the first run, made such a tensor itself, or ran ops in other threads.",
              kSameEachTime);
}

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
    for (auto node = graph_.nodes.rbegin(); node != graph_.nodes.rend(); ++node) {
      bool leads_on = false;
      for (std::size_t i = 0; i < (*node)->num_outputs(); ++i) {
        if (idle.contains((*node)->next_edge(i).function.get())) set_edge(**node, i, {});
        leads_on = leads_on || (*node)->next_edge(i).is_valid();
      }
      if (!leads_on) idle.insert(*node);
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

  /// Returns the gradients that arrived, in the order of the boundary edges, undefined where none
  /// did. Call this once.
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
