/// \file
/// Activation checkpointing: the part of autograd's graph that a run adds, and the node that stands
/// for it until backward.
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

// --- The graph of a run: its nodes, and the edges to what a function captures --------------------

/// Owns a node of autograd's graph: std::shared_ptr with a deleter of its own up to libtorch 2.11,
/// c10::intrusive_ptr in later versions.
template <class Node>
using NodePtr = std::conditional_t<std::is_same_v<decltype(torch::autograd::Edge::function),
                                                  std::shared_ptr<torch::autograd::Node>>,
                                   std::shared_ptr<Node>, c10::intrusive_ptr<Node>>;

template <class Node, class... Args>
NodePtr<Node> make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr<Node>, std::shared_ptr<Node>>) {
    // libtorch's deleter, found by the argument's type: it takes a long chain of nodes apart
    // without recursion.
    return {new Node(std::forward<Args>(args)...), [](Node* node) { deleteNode(node); }};
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

/// A moment in a thread, which tells the nodes made there since from all others. Nodes of one
/// thread are numbered as they are made; those that accumulate into leaves have the highest number
/// of all.
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
class BoundaryNode final : public torch::autograd::Node {
 public:
  explicit BoundaryNode(const torch::autograd::Edge& target) {
    input_metadata_.push_back(target.function->input_metadata(target.input_nr));
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
    return {};
  }
};

/// The nodes that a run made and its results depend on, last made first: the order in which the
/// engine runs them, and so the order in which gradients arrive where the graph ends.
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
      ends.emplace_back(make_node<BoundaryNode>(uses_[i]), 0);
      set_edge(*boundary_edges_[i].first, boundary_edges_[i].second, ends.back());
    }
    return ends;
  }

 private:
  std::vector<std::pair<torch::autograd::Node*, std::size_t>> boundary_edges_;
  torch::autograd::edge_list uses_;
};

// --- The call, and its node ----------------------------------------------------------------------

template <class T>
std::vector<at::Tensor> tensors_in(T& value) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// A module holder or a pointer to a module: Sequential, for one, has no call operator that works.
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

/// Returns the versions of tensors; those of inference mode have none.
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
              ", so that running the function again would compute something else. Clone it first, "
              "or modify it after backward.");
}

/// The data of a recomputation, without the types of the call.
struct Recomputation {
  std::function<std::vector<at::Tensor>()> run;        ///< returns the result's tensors
  std::function<std::vector<at::Tensor>()> arguments;  ///< returns the tensors among its arguments
  std::vector<std::int64_t> versions;
  // The thread's state at the first run, which the second run gets again.
  std::optional<RngState> random;
  AutocastState autocast = AutocastState::current();
  std::optional<c10::Device> cuda_device =
      at::hasCUDA() ? std::optional(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice())
                    : std::nullopt;
  std::vector<std::size_t> results{};  ///< which of the result's tensors the node stands for
  torch::autograd::edge_list uses{};   ///< where the edges that leave the first run's graph led
};

/// The gradient edges of the results that the node stands for.
inline torch::autograd::edge_list get_result_edges(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& results) {
  torch::autograd::edge_list edges;
  for (const auto i : results) {
    TORCH_CHECK(i < tensors.size() && tensors[i].defined() && tensors[i].requires_grad(),
                "activation_checkpoint: result ", i,
                " of the first run is missing from the recomputation, or does not require grad "
                "there. The function must do the same each time.");
    edges.push_back(torch::autograd::impl::gradient_edge(tensors[i]));
  }
  return edges;
}

/// The node of a checkpointed call. Its inputs are the results of the call. It has one next edge
/// for each *use* of a tensor from outside, in the order in which the call's own graph would
/// deliver the gradients, so that they are added up in that order and come out the same to the bit.
/// Another checkpoint around it replaces its next edges, so the uses are kept apart from them.
class RecomputeNode final : public torch::autograd::Node {
 public:
  explicit RecomputeNode(Recomputation recomputation)
      : recomputation_(std::make_shared<Recomputation>(std::move(recomputation))) {
    for (const auto& use : recomputation_->uses) add_next_edge(use);
  }

  std::string name() const override { return "mezzo::activation_checkpoint"; }

  /// Runs the call again and sends the gradients through its graph. The engine calls this function,
  /// in the thread of the node's device; the engine's call inside is a reentrant backward in
  /// libtorch's words.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const auto again = recomputation();
    TORCH_CHECK(!c10::GradMode::is_enabled(),
                "activation_checkpoint: gradients of gradients (create_graph) do not go through a "
                "checkpoint; call the function without one");
    torch::autograd::variable_list found(num_outputs());
    std::vector<std::size_t> wanted;
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (task_should_compute_output(i)) wanted.push_back(i);
    }
    if (wanted.empty() || std::ranges::none_of(gradients, &at::Tensor::defined)) return found;
    const auto [roots, graph] = recompute(*again);
    torch::autograd::edge_list given;
    torch::autograd::variable_list root_gradients;
    for (std::size_t i = 0; i < roots.size(); ++i) {
      if (!gradients[i].defined()) continue;
      given.push_back(roots[i]);
      root_gradients.push_back(std::move(gradients[i]));
    }
    const torch::autograd::edge_list ends = graph.cut();
    torch::autograd::edge_list wanted_ends;
    for (const std::size_t i : wanted) wanted_ends.push_back(ends[i]);
    auto arrived = torch::autograd::Engine::get_default_engine().execute(
        given, root_gradients, /*keep_graph=*/false, /*create_graph=*/false,
        /*accumulate_grad=*/false, wanted_ends);
    for (std::size_t i = 0; i < wanted.size(); ++i) found[wanted[i]] = std::move(arrived[i]);
    return found;
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
    TORCH_CHECK(recomputation_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE,
                " In C++: loss.backward({}, /*retain_graph=*/true).");
    return recomputation_;
  }

  static std::pair<torch::autograd::edge_list, RecordedSubgraph> recompute(
      const Recomputation& again) {
    check_versions(again.arguments(), again.versions, "between its forward and its backward");
    const c10::AutoGradMode recording(true);
    const c10::OptionalDeviceGuard device(again.cuda_device);
    std::optional<RngStateGuard> random;
    if (again.random) random.emplace(*again.random);
    const AutocastStateGuard autocast(again.autocast);
    at::autocast::set_autocast_cache_enabled(false);  // as in the first run
    const GraphPosition start;
    torch::autograd::edge_list roots = get_result_edges(again.run(), again.results);
    RecordedSubgraph graph(roots, start);
    TORCH_CHECK(graph.uses() == again.uses,
                "activation_checkpoint: the recomputation used other parameters or other tensors "
                "that require grad than the first run, or made such a tensor itself. The function "
                "runs again during backward and must do the same then: it may depend on its "
                "arguments, on captured values that do not change until backward, and on "
                "libtorch's default random generators.");
    return {std::move(roots), std::move(graph)};
  }

  std::shared_ptr<Recomputation> recomputation_;
};

/// Puts one node in the place of the graph that the run since `start` made behind the tensors of
/// `result`. Tensors that the run did not compute from a tensor that requires grad, or that are
/// such a tensor themselves, stay as they are.
template <class Result>
void replace_graph(Result& result, const GraphPosition& start, Recomputation recomputation) {
  std::vector<at::Tensor> tensors = tensors_in(result);
  torch::autograd::edge_list roots;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || !tensors[i].requires_grad()) continue;
    auto edge = torch::autograd::impl::gradient_edge(tensors[i]);
    if (!start.is_before(*edge.function)) continue;
    recomputation.results.push_back(i);
    roots.push_back(std::move(edge));
  }
  if (roots.empty()) return;
  recomputation.uses = RecordedSubgraph(roots, start).uses();
  const auto replaced = recomputation.results;
  const auto node = make_node<RecomputeNode>(std::move(recomputation));
  for (const auto i : replaced) {
    tensors[i] = tensors[i].detach();
    const auto input_nr = node->add_input_metadata(tensors[i]);
    torch::autograd::impl::set_gradient_edge(tensors[i], {node, input_nr});
  }
  std::size_t next = 0;
  for_each_tensor(result, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
}

/// Runs a function on stored arguments and replaces the graph of its result.
template <class F, class... Args>
auto checkpointed_forward(const std::shared_ptr<F>& function,
                          const std::shared_ptr<std::tuple<Args...>>& args,
                          bool preserve_rng_state) {
  const auto run = [function, args] {  // as lvalues, which leaves them for the next call
    return std::apply([&](Args&... each) { return invoke_stored(*function, each...); }, *args);
  };
  const auto arguments = [args] { return tensors_in(std::as_const(*args)); };
  static_assert(contains_tensors<decltype(run())>(),
                "mezzo::activation_checkpoint: no tensors in the function's result; return "
                "tensors, or a struct with a member tensors() that lists them");
  if (!c10::GradMode::is_enabled()) return run();
  // Materialises the gradient edges: autograd renews the node of a view whose base was modified
  // when it is first asked for it, and that must not happen during the run.
  for (const at::Tensor& tensor : arguments()) {
    if (tensor.defined() && tensor.requires_grad()) torch::autograd::impl::gradient_edge(tensor);
  }
  Recomputation recomputation{
      .run =
          [run] {
            auto again = run();
            return tensors_in(again);
          },
      .arguments = arguments,
      .versions = get_versions(arguments()),
      .random = preserve_rng_state ? std::optional(RngState()) : std::nullopt};
  const GraphPosition start;
  auto result = [&] {
    // A cast that was cached before the first run is gone by the second: the graphs would differ.
    const bool cache_enabled = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_cache_enabled(false);
    const auto end = c10::make_scope_exit(
        [cache_enabled] { at::autocast::set_autocast_cache_enabled(cache_enabled); });
    return run();
  }();
  check_versions(recomputation.arguments(), recomputation.versions, "by the function itself");
  replace_graph(result, start, std::move(recomputation));
  return result;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
