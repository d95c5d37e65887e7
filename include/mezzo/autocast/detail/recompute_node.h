/// \file
/// Activation checkpointing: the subgraph that a function adds to autograd's graph, and the node
/// that replaces it until backward.
#pragma once

#include <mezzo/autocast/autocast_state.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/rng_state.h>
#include <mezzo/base/version.h>

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- The recorded subgraph -----------------------------------------------------------------------

/// Owns a node of autograd's graph: std::shared_ptr with a custom deleter up to libtorch 2.11,
/// c10::intrusive_ptr in later versions.
template <class Node>
using NodePtr = std::conditional_t<std::is_same_v<decltype(torch::autograd::Edge::function),
                                                  std::shared_ptr<torch::autograd::Node>>,
                                   std::shared_ptr<Node>, c10::intrusive_ptr<Node>>;

template <class Node, class... Args>
NodePtr<Node> make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr<Node>, std::shared_ptr<Node>>) {
    // libtorch's deleter (by argument-dependent lookup) frees a long chain without recursion.
    return {new Node(std::forward<Args>(args)...), [](Node* node) { deleteNode(node); }};
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

/// A position in a thread's sequence of autograd nodes. Nodes of a thread are numbered in order of
/// creation; AccumulateGrad nodes have the highest number.
class GraphPosition {
 public:
  bool is_before(const torch::autograd::Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= first_ &&
           node.sequence_nr() != std::numeric_limits<uint64_t>::max();
  }

 private:
  uint64_t thread_ = at::RecordFunction::currentThreadId();
  uint64_t first_ = at::sequence_number::peek();
};

/// Sets an edge of `node`, and of the node inside a CopySlices (an in-place op on a view), whose
/// edges except the first must be the same.
inline void set_edge(torch::autograd::Node& node, std::size_t index, torch::autograd::Edge edge) {
  auto* const copy_slices = dynamic_cast<torch::autograd::CopySlices*>(&node);
  if (copy_slices != nullptr && copy_slices->fn != nullptr && index > 0) {
    copy_slices->fn->next_edges()[index] = edge;
  }
  node.next_edges()[index] = std::move(edge);
}

/// Replaces the target of an edge that leaves a subgraph, so that the engine captures its gradient.
/// Has the target's metadata: shape, dtype, device and stream.
class BoundaryNode final : public torch::autograd::Node {
 public:
  explicit BoundaryNode(const torch::autograd::Edge& target) {
    input_metadata_.push_back(target.function->input_metadata(target.input_nr));
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
    return {};
  }
};

/// The nodes created since a position that the roots depend on, in the engine's order of execution
/// (latest first), in which gradients reach the edges that leave the subgraph.
class RecordedSubgraph {
 public:
  RecordedSubgraph(const torch::autograd::edge_list& roots, const GraphPosition& start) {
    std::unordered_set<torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> nodes;
    const auto add = [&](const torch::autograd::Edge& edge) {
      auto* node = edge.function.get();
      if (node != nullptr && start.is_before(*node) && seen.insert(node).second) {
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
        boundary_edges_.emplace_back(node, i);
        external_edges_.push_back(edge);
      }
    }
  }

  /// Returns the edges that leave the subgraph, one for each use of an external tensor.
  const torch::autograd::edge_list& external_edges() const { return external_edges_; }

  /// Redirects the edges that leave the subgraph to boundary nodes, and returns edges to them. Each
  /// use has its own: at a common node the engine would sum gradients that are accumulated one by
  /// one.
  torch::autograd::edge_list cut() const {
    torch::autograd::edge_list edges;
    for (std::size_t i = 0; i < external_edges_.size(); ++i) {
      edges.emplace_back(make_node<BoundaryNode>(external_edges_[i]), 0);
      set_edge(*boundary_edges_[i].first, boundary_edges_[i].second, edges.back());
    }
    return edges;
  }

 private:
  std::vector<std::pair<torch::autograd::Node*, std::size_t>> boundary_edges_;
  torch::autograd::edge_list external_edges_;
};

// --- The call, and its node ----------------------------------------------------------------------

template <class T>
std::vector<at::Tensor> collect_tensors(T& value) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// A module holder or a pointer to a module, called by `forward`: Sequential's call operator is not
/// callable here.
template <class F, class... Args>
concept ModulePointer = requires(F& function, Args&... args) {
  function->forward(args...);
};

template <class F, class... Args>
concept RecomputableCallable = ModulePointer<F, Args...> || std::is_invocable_v<F&, Args&...>;

template <class F, class... Args>
requires RecomputableCallable<F, Args...>
decltype(auto) invoke_stored(F& function, Args&... args) {
  if constexpr (ModulePointer<F, Args...>) {
    return function->forward(args...);
  } else {
    return std::invoke(function, args...);
  }
}

/// Returns the versions of tensors; 0 for inference tensors, which have none.
inline std::vector<std::int64_t> get_versions(const std::vector<at::Tensor>& arguments) {
  std::vector<std::int64_t> versions;
  versions.reserve(arguments.size());
  for (const at::Tensor& tensor : arguments) {
    versions.push_back(tensor.defined() && !tensor.is_inference() ? tensor._version() : 0);
  }
  return versions;
}

inline void check_versions(const std::vector<at::Tensor>& arguments,
                           const std::vector<std::int64_t>& expected, const char* when) {
  TORCH_CHECK(get_versions(arguments) == expected,
              "activation_checkpoint: a tensor argument was modified in place ", when,
              ", which changes the recomputation. Clone it first, or modify it after backward.");
}

/// A recomputation, with the types of the call erased.
struct Recomputation {
  std::function<std::vector<at::Tensor>()> run;        ///< returns the result's tensors
  std::function<std::vector<at::Tensor>()> arguments;  ///< returns the tensors among its arguments
  std::vector<std::int64_t> versions;
  // The thread's state during forward.
  std::optional<RngState> rng_state;
  AutocastState autocast_state = AutocastState::current();
  std::optional<c10::Device> cuda_device =
      at::hasCUDA() ? std::optional(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice())
                    : std::nullopt;
  std::vector<std::size_t> result_indices{};    ///< of the result's tensors that the node computes
  torch::autograd::edge_list external_edges{};  ///< that left the subgraph of the forward
};

/// Returns the gradient edges of the results that the node computes.
inline torch::autograd::edge_list get_result_edges(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& result_indices) {
  torch::autograd::edge_list edges;
  for (const auto i : result_indices) {
    TORCH_CHECK(
        i < tensors.size() && tensors[i].defined() && tensors[i].requires_grad(),
        "activation_checkpoint: result ", i,
        " of the forward is missing from the recomputation, or does not require grad there. "
        "The function must compute the same each time.");
    edges.push_back(torch::autograd::impl::gradient_edge(tensors[i]));
  }
  return edges;
}

/// The node of a checkpointed call, whose inputs are the results of the call. Has one next edge for
/// each *use* of an external tensor, in the order in which the call's own subgraph would deliver
/// the gradients, so that they are accumulated in that order and are bitwise identical. An
/// enclosing checkpoint replaces the next edges; `external_edges` keeps the original ones.
class RecomputeNode final : public torch::autograd::Node {
 public:
  explicit RecomputeNode(Recomputation recomputation)
      : recomputation_(std::make_shared<Recomputation>(std::move(recomputation))) {
    for (const auto& edge : recomputation_->external_edges) add_next_edge(edge);
  }

  std::string name() const override { return "mezzo::activation_checkpoint"; }

  /// Recomputes the call and runs backward through its subgraph (a reentrant backward). Called by
  /// the engine in the thread of the node's device.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const auto recomputation = get_recomputation();
    TORCH_CHECK(!c10::GradMode::is_enabled(),
                "activation_checkpoint: gradients of gradients (create_graph) are not supported; "
                "call the function without a checkpoint");
    torch::autograd::variable_list outputs(num_outputs());
    std::vector<std::size_t> needed;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (task_should_compute_output(i)) needed.push_back(i);
    }
    if (needed.empty() || std::ranges::none_of(gradients, &at::Tensor::defined)) return outputs;
    const auto [result_edges, subgraph] = recompute(*recomputation);
    torch::autograd::edge_list roots;
    torch::autograd::variable_list root_gradients;
    for (std::size_t i = 0; i < result_edges.size(); ++i) {
      if (!gradients[i].defined()) continue;
      roots.push_back(result_edges[i]);
      root_gradients.push_back(std::move(gradients[i]));
    }
    const torch::autograd::edge_list boundary = subgraph.cut();
    torch::autograd::edge_list needed_edges;
    for (const std::size_t i : needed) needed_edges.push_back(boundary[i]);
    auto captured = torch::autograd::Engine::get_default_engine().execute(
        roots, root_gradients, /*keep_graph=*/false, /*create_graph=*/false,
        /*accumulate_grad=*/false, needed_edges);
    for (std::size_t i = 0; i < needed.size(); ++i) outputs[needed[i]] = std::move(captured[i]);
    return outputs;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    recomputation_.reset();
  }

 private:
  /// Returns a shared pointer, so that no lock is held while the user's function runs: a device
  /// thread may run this node for another backward pass while it waits for this one.
  std::shared_ptr<Recomputation> get_recomputation() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(recomputation_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE,
                " In C++: loss.backward({}, /*retain_graph=*/true).");
    return recomputation_;
  }

  static std::pair<torch::autograd::edge_list, RecordedSubgraph> recompute(
      const Recomputation& recomputation) {
    check_versions(recomputation.arguments(), recomputation.versions,
                   "between its forward and its backward");
    const c10::AutoGradMode grad_mode(true);
    const c10::OptionalDeviceGuard device_guard(recomputation.cuda_device);
    std::optional<RngStateGuard> rng_guard;
    if (recomputation.rng_state) rng_guard.emplace(*recomputation.rng_state);
    const AutocastStateGuard autocast_guard(recomputation.autocast_state);
    at::autocast::set_autocast_cache_enabled(false);  // as in the forward
    const GraphPosition start;
    torch::autograd::edge_list roots =
        get_result_edges(recomputation.run(), recomputation.result_indices);
    RecordedSubgraph subgraph(roots, start);
    TORCH_CHECK(subgraph.external_edges() == recomputation.external_edges,
                "activation_checkpoint: the recomputation used other parameters or other tensors "
                "that require grad than the forward, or created such a tensor. The function runs "
                "again in backward and must compute the same: it may depend on its arguments, on "
                "captured values that do not change until backward, and on libtorch's default "
                "random generators.");
    return {std::move(roots), std::move(subgraph)};
  }

  std::shared_ptr<Recomputation> recomputation_;
};

/// Replaces the subgraph created since `start` behind the tensors of `result` by one node. Tensors
/// not computed from a tensor that requires grad, or that are such a tensor themselves, are
/// unchanged.
template <class Result>
void replace_graph(Result& result, const GraphPosition& start, Recomputation recomputation) {
  std::vector<at::Tensor> tensors = collect_tensors(result);
  torch::autograd::edge_list roots;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || !tensors[i].requires_grad()) continue;
    auto edge = torch::autograd::impl::gradient_edge(tensors[i]);
    if (!start.is_before(*edge.function)) continue;
    recomputation.result_indices.push_back(i);
    roots.push_back(std::move(edge));
  }
  if (roots.empty()) return;
  recomputation.external_edges = RecordedSubgraph(roots, start).external_edges();
  const auto result_indices = recomputation.result_indices;
  const auto node = make_node<RecomputeNode>(std::move(recomputation));
  for (const auto i : result_indices) {
    tensors[i] = tensors[i].detach();
    const auto input_nr = node->add_input_metadata(tensors[i]);
    torch::autograd::impl::set_gradient_edge(tensors[i], {node, input_nr});
  }
  std::size_t next = 0;
  for_each_tensor(result, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
}

/// Calls a function with stored arguments and replaces the subgraph of its result.
template <class F, class... Args>
auto checkpointed_forward(const std::shared_ptr<F>& function,
                          const std::shared_ptr<std::tuple<Args...>>& args,
                          bool preserve_rng_state) {
  const auto run = [function, args] {  // as lvalues, which leaves them for the next call
    return std::apply([&](Args&... each) { return invoke_stored(*function, each...); }, *args);
  };
  const auto arguments = [args] { return collect_tensors(std::as_const(*args)); };
  static_assert(contains_tensors<decltype(run())>(),
                "mezzo::activation_checkpoint: the function's result has no tensors; return "
                "tensors, or a struct with a member tensors() that lists them");
  if (!c10::GradMode::is_enabled()) return run();
  // Materializes the gradient edges: autograd regenerates the node of a view whose base was
  // modified at the first access, which must not happen during the call.
  for (const at::Tensor& tensor : arguments()) {
    if (tensor.defined() && tensor.requires_grad()) torch::autograd::impl::gradient_edge(tensor);
  }
  Recomputation recomputation{
      .run =
          [run] {
            auto result = run();
            return collect_tensors(result);
          },
      .arguments = arguments,
      .versions = get_versions(arguments()),
      .rng_state = preserve_rng_state ? std::optional(RngState()) : std::nullopt};
  const GraphPosition start;
  auto result = [&] {
    // Casts cached before the forward are gone in backward, and the subgraphs would differ.
    const bool cache_enabled = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_cache_enabled(false);
    const auto reset = c10::make_scope_exit(
        [cache_enabled] { at::autocast::set_autocast_cache_enabled(cache_enabled); });
    return run();
  }();
  check_versions(recomputation.arguments(), recomputation.versions, "by the function itself");
  replace_graph(result, start, std::move(recomputation));
  return result;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
