/// \file
/// CheckpointNode, which stands in autograd's graph for everything that a checkpointed call
/// computed, and first_run, the forward half of a checkpoint, which keeps no activations and leaves
/// that node.
#pragma once

#include <mezzo/autocast/detail/activation_checkpoint/run_conditions.h>
#include <mezzo/autocast/detail/activation_checkpoint/run_graph.h>
#include <mezzo/autocast/detail/autograd_node.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A call as backward knows it, without its types.
class CheckpointedCall {
 public:
  CheckpointedCall() = default;
  virtual ~CheckpointedCall() = default;
  CheckpointedCall(const CheckpointedCall&) = delete;
  CheckpointedCall& operator=(const CheckpointedCall&) = delete;

  /// Calls the function and returns the tensors in its result.
  virtual std::vector<at::Tensor> result_tensors() = 0;
  /// Returns the tensors among the arguments.
  virtual std::vector<at::Tensor> argument_tensors() const = 0;
};

template <class T>
std::vector<at::Tensor> tensors_in(T& value) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// A module holder or a pointer to a module: Sequential, for one, has no call operator that works.
template <class F, class... Args>
concept PointsToModule = requires(F& function, Args&... args) {
  function->forward(args...);
};

template <class F, class... Args>
concept CallableTwice = PointsToModule<F, Args...> || std::is_invocable_v<F&, Args&...>;

template <class F, class... Args>
requires CallableTwice<F, Args...>
decltype(auto) call_stored(F& function, Args&... args) {
  if constexpr (PointsToModule<F, Args...>) {
    return function->forward(args...);
  } else {
    return std::invoke(function, args...);
  }
}

/// The result of a call as a value; void where there is no such call, which activation_checkpoint
/// reports.
template <class F, class... Args>
struct ValueResult {
  using Type = void;
};
template <class F, class... Args>
requires CallableTwice<F, Args...>
struct ValueResult<F, Args...> {
  using Type = std::decay_t<decltype(call_stored(std::declval<F&>(), std::declval<Args&>()...))>;
};

/// The arguments are stored as std::bind_front stores them, but for a TensorList, which would
/// dangle.
template <class F, class... Args>
class StoredCall final : public CheckpointedCall {
 public:
  static constexpr bool kCallable = CallableTwice<F, Args...>;
  using Result = typename ValueResult<F, Args...>::Type;

  template <class G, class... GivenArgs>
  explicit StoredCall(G&& function, GivenArgs&&... args)
      : function_(std::forward<G>(function)), args_(owned(std::forward<GivenArgs>(args))...) {}

  /// Calls the function with the stored arguments as lvalues, which leaves them for the next call.
  Result operator()() {
    return std::apply(
        [this](Args&... args) -> Result { return detail::call_stored(function_, args...); }, args_);
  }

  std::vector<at::Tensor> result_tensors() override {
    auto result = (*this)();
    return tensors_in(result);
  }

  std::vector<at::Tensor> argument_tensors() const override { return tensors_in(args_); }

 private:
  F function_;
  std::tuple<Args...> args_;
};

/// Returns the versions of the tensors among the arguments; those of inference mode have none.
inline std::vector<std::int64_t> versions_of_arguments(const CheckpointedCall& call) {
  std::vector<std::int64_t> versions;
  for (const at::Tensor& tensor : call.argument_tensors()) {
    versions.push_back(tensor.defined() && !tensor.is_inference() ? tensor._version() : 0);
  }
  return versions;
}

inline void check_arguments(const CheckpointedCall& call, const std::vector<std::int64_t>& expected,
                            const char* when) {
  TORCH_CHECK(versions_of_arguments(call) == expected,
              "activation_checkpoint: a tensor argument was modified in place ", when,
              ", so that running the function again would compute something else. Clone it first, "
              "or modify it after backward.");
}

/// The data of a recomputation.
struct Recomputation {
  std::unique_ptr<CheckpointedCall> call;
  RunConditions conditions;
  std::vector<std::int64_t> versions;
  std::vector<std::size_t> results{};  ///< which of the result's tensors the node stands for
  torch::autograd::edge_list uses{};   ///< where the edges that leave the first run's graph led
};

/// The gradient edges of the results that the node stands for.
inline torch::autograd::edge_list result_edges(const std::vector<at::Tensor>& tensors,
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
class CheckpointNode final : public torch::autograd::Node {
 public:
  explicit CheckpointNode(Recomputation recomputation)
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
    const auto [roots, graph] = run_again(*again);
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

  static std::pair<torch::autograd::edge_list, RunGraph> run_again(const Recomputation& again) {
    check_arguments(*again.call, again.versions, "between its forward and its backward");
    const RunConditions::Scope scope(again.conditions);
    const GraphMark start;
    torch::autograd::edge_list roots = result_edges(again.call->result_tensors(), again.results);
    RunGraph graph(roots, start);
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
void replace_graph(Result& result, const GraphMark& start, Recomputation recomputation) {
  std::vector<at::Tensor> tensors = tensors_in(result);
  torch::autograd::edge_list roots;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || !tensors[i].requires_grad()) continue;
    auto edge = torch::autograd::impl::gradient_edge(tensors[i]);
    if (!start.made_since(*edge.function)) continue;
    recomputation.results.push_back(i);
    roots.push_back(std::move(edge));
  }
  if (roots.empty()) return;
  recomputation.uses = RunGraph(roots, start).uses();
  const auto replaced = recomputation.results;
  const auto node = make_node<CheckpointNode>(std::move(recomputation));
  for (const auto i : replaced) {
    tensors[i] = tensors[i].detach();
    const auto input_nr = node->add_input_metadata(tensors[i]);
    torch::autograd::impl::set_gradient_edge(tensors[i], {node, input_nr});
  }
  std::size_t next = 0;
  for_each_tensor(result, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
}

/// Runs `call` and replaces the graph of its result.
template <class Call>
auto first_run(std::unique_ptr<Call> call, bool preserve_random_state) {
  // Materialises the gradient edges: autograd renews the node of a view whose base was modified
  // when it is first asked for it, and that must not happen during the run.
  for (const at::Tensor& tensor : call->argument_tensors()) {
    if (tensor.defined() && tensor.requires_grad()) torch::autograd::impl::gradient_edge(tensor);
  }
  auto versions = versions_of_arguments(*call);
  RunConditions conditions(preserve_random_state);
  const GraphMark start;
  auto result = [&] {
    const WeightCastsUncached uncached;
    return (*call)();
  }();
  check_arguments(*call, versions, "by the function itself");
  replace_graph(result, start,
                {.call = std::move(call),
                 .conditions = std::move(conditions),
                 .versions = std::move(versions)});
  return result;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
