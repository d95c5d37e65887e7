/// \file
/// ScriptModule: a TorchScript model as a torch::nn::Module, to train exported models in C++. No
/// other header of mezzo includes this one.
#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inline_fork_wait.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the first node of `block` and its nested blocks that satisfies `predicate`; null if
/// none.
template <class Predicate>
const torch::jit::Node* find_node(const torch::jit::Block& block, const Predicate& predicate) {
  for (const torch::jit::Node* const node : block.nodes()) {
    if (predicate(*node)) return node;
    for (const torch::jit::Block* const inner : node->blocks()) {
      if (const auto* const found = find_node(*inner, predicate)) return found;
    }
  }
  return nullptr;
}

inline bool is_fork(const torch::jit::Node& node) {
  return node.kind() == c10::prim::fork || node.kind() == c10::prim::awaitable;
}

/// Whether libtorch would run `node` in a separate executor, whose autocast has different op lists.
inline bool has_separate_executor(const torch::jit::Node& node) {
  if (node.kind() == c10::prim::CallMethod || node.kind() == c10::prim::CallFunction) return true;
  if (!is_fork(node)) return false;
  const auto& uses = node.output()->uses();
  return node.kind() != c10::prim::fork ||
         std::any_of(uses.begin(), uses.end(),
                     [](const auto& use) { return use.user->kind() != c10::aten::wait; });
}

/// Whether `node` is a `with torch.autocast(...)` statement.
inline bool enters_autocast(const torch::jit::Node& node) {
  return node.kind() == c10::prim::Enter &&
         node.input(0)->type()->str().find("autocast") != std::string::npos;
}

/// Returns the graph of `forward` with calls and forks inlined, without autocast's casts.
/// \throws c10::Error for forks and calls that cannot be inlined, and for an autocast region
inline std::shared_ptr<torch::jit::Graph> inline_forward(const torch::jit::Module& script) {
  // Under autocast, libtorch would insert casts into the graph and cache it.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const torch::jit::Method forward = script.get_method("forward");
  auto graph = torch::jit::toGraphFunction(forward.function()).optimized_graph()->copy();
  const torch::jit::Block& block = *graph->block();
  torch::jit::Inline(*graph);
  while (find_node(block, is_fork) != nullptr) {  // forks can be nested
    const torch::jit::Node* const escaping = find_node(
        block, [](const auto& node) { return is_fork(node) && has_separate_executor(node); });
    TORCH_CHECK(escaping == nullptr,
                "ScriptModule: the future of a torch.jit.fork is stored in a list or passed to a "
                "function, so libtorch runs the fork with different autocast op lists; call "
                "torch.jit.wait on each future directly, or call the functions without fork: ",
                escaping->sourceRange().str());
    torch::jit::InlineForkWait(graph);
    torch::jit::Inline(*graph);
  }
  const torch::jit::Node* const call = find_node(block, has_separate_executor);
  TORCH_CHECK(call == nullptr,
              "ScriptModule: forward calls a method of an interface, which libtorch runs with "
              "different autocast op lists; annotate the submodule with its class instead: ",
              call->sourceRange().str());
  const torch::jit::Node* const region = find_node(block, enters_autocast);
  TORCH_CHECK(
      region == nullptr,
      "ScriptModule: forward enters torch.autocast, which has no effect on ops that are "
      "dispatched one by one; save the script without it and use mezzo::AutocastGuard and op "
      "overrides, or call the module outside an autocast region: ",
      region->sourceRange().str());
  return graph;
}

/// Converts the arguments of a call to IValues. A single vector of IValues is passed through.
template <class... Args>
std::vector<c10::IValue> to_ivalues(Args&&... args) {
  if constexpr (sizeof...(Args) == 1 &&
                (std::same_as<std::remove_cvref_t<Args>, std::vector<c10::IValue>> && ...)) {
    return std::vector<c10::IValue>(std::forward<Args>(args)...);
  } else {
    return {c10::IValue(std::forward<Args>(args))...};
  }
}

}  // namespace detail

/// Implementation of ScriptModule.
class ScriptModuleImpl : public torch::nn::Module {
 public:
  /// Registers the parameters, buffers and children of `script`.
  explicit ScriptModuleImpl(torch::jit::Module script)
      : torch::nn::Module("ScriptModule"), script_(std::move(script)) {
    for (const auto& item : script_.named_parameters(/*recurse=*/false)) {
      register_parameter(item.name, item.value, item.value.requires_grad());
    }
    for (const auto& item : script_.named_buffers(/*recurse=*/false)) {
      register_buffer(item.name, item.value);
    }
    for (const auto& item : script_.named_children()) {
      script_children_.push_back(
          register_module(item.name, std::make_shared<ScriptModuleImpl>(item.value)));
    }
  }

  /// Calls the script's `forward` with tensors, numbers, lists, or one vector of IValues. Under
  /// autocast, each op is cast as in a C++ model; libtorch's graph executor, which has different op
  /// lists, is not used.
  template <class... Args>
  c10::IValue forward(Args&&... args) {
    std::vector<c10::IValue> arguments = detail::to_ivalues(std::forward<Args>(args)...);
    c10::IValue result = detail::is_any_autocast_enabled() ? interpret(std::move(arguments))
                                                           : script_.forward(std::move(arguments));
    sync_buffers();
    return result;
  }

  /// Copies buffers that the script has replaced (`self.mean = ...` in its forward) into the
  /// registered buffers, and stores the registered buffers in the script again. Skips replacements
  /// that require grad. `forward`, `save`, `load` and `to` call this.
  void sync_buffers() const {
    const c10::NoGradGuard no_grad;
    for (auto& item : named_buffers(/*recurse=*/false)) {
      const at::Tensor current = script_._ivalue()->getAttr(item.key()).toTensor();
      if (current.is_same(item.value()) || current.requires_grad()) continue;
      if (current.is_inference() != item.value().is_inference()) continue;
      item.value().set_data(current);
      script_._ivalue()->setAttr(item.key(), item.value());
    }
    for (const auto& child : script_children_) child->sync_buffers();
  }

  const torch::jit::Module& script() const noexcept { return script_; }

  /// Returns a deep copy; its parameters are leaves.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    const c10::NoGradGuard no_grad;
    const torch::jit::Module copy = script_.deepcopy(device);
    auto original = script_.parameters().begin();
    for (const at::Tensor& parameter : copy.parameters()) {
      parameter.set_requires_grad((*original).requires_grad());
      ++original;
    }
    return std::make_shared<ScriptModuleImpl>(copy);
  }
  /// Saves parameters and buffers, including buffers that the script has replaced.
  void save(torch::serialize::OutputArchive& archive) const override {
    sync_buffers();
    torch::nn::Module::save(archive);
  }
  /// Loads parameters and buffers, which the script shares.
  void load(torch::serialize::InputArchive& archive) override {
    sync_buffers();
    torch::nn::Module::load(archive);
  }
  /// Moves the script to `device` and casts its floating-point parameters and buffers.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    sync_buffers();
    torch::nn::Module::to(device, dtype, non_blocking);
  }
  /// Casts the script's floating-point parameters and buffers.
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    sync_buffers();
    torch::nn::Module::to(dtype, non_blocking);
  }
  /// Moves the script to `device`.
  void to(torch::Device device, bool non_blocking = false) override {
    sync_buffers();
    torch::nn::Module::to(device, non_blocking);
  }
  /// Sets training or evaluation mode of the module and the script.
  void train(bool on = true) override {
    torch::nn::Module::train(on);
    script_.train(on);
  }
  /// Returns the script's mode; true for a script without one.
  bool is_training() const noexcept override {
    return !script_.hasattr("training") || script_.is_training();
  }
  /// Prints the script's class name.
  void pretty_print(std::ostream& stream) const override {
    stream << "mezzo::ScriptModule(" << script_.type()->repr_str() << ")";
  }

 private:
  /// Runs `forward` op by op through the dispatcher, as a C++ model does.
  ///
  /// Under autocast, libtorch's executor would insert casts into the graph from different op lists,
  /// with the dtype of the first call, and cache that graph: op overrides would have no effect, and
  /// backward would throw after a call in another dtype.
  c10::IValue interpret(std::vector<c10::IValue> arguments) {
    std::call_once(compile_once_, [this] {
      code_ = torch::jit::Code(detail::inline_forward(script_), "forward");
    });
    arguments.insert(arguments.begin(), script_._ivalue());
    const torch::jit::Method forward = script_.get_method("forward");
    forward.function().getSchema().checkAndNormalizeInputs(arguments);
    torch::jit::InterpreterState(code_).run(arguments);
    return arguments.front();
  }

  torch::jit::Module script_;
  std::vector<std::shared_ptr<ScriptModuleImpl>> script_children_;  // child modules
  std::once_flag compile_once_;
  torch::jit::Code code_;  // forward, with calls of children inlined
};

/// A TorchScript model with the interface of a torch::nn::Module:
///
///     mezzo::ScriptModule net(torch::jit::load("model.pt"));
///     mezzo::optim::AdamW optimizer(net->parameters(), 2e-5);
///     const auto logits = net(ids, mask).toTensor();
///
/// Shares parameters, buffers and children with the script, under the script's names: `to`,
/// `train`, loading and optimizers act on both. Under autocast, call the ScriptModule instead of
/// the script: `script.forward` uses libtorch's op lists for TorchScript (docs/guide.md). Construct
/// it once; construction traverses the whole script. AutocastModule, initialize,
/// DistributedDataParallel and TrainingState accept it as a module.
///
/// Only parameters that require grad are trained; torch::jit::load restores that flag from the
/// file. A frozen model (torch::jit::freeze) has no parameters. Parameters that are registered
/// later, or replaced with `setattr`, are not tracked.
class ScriptModule : public torch::nn::ModuleHolder<ScriptModuleImpl> {
 public:
  /// Wraps `script` and shares its parameters.
  ScriptModule(torch::jit::Module script)
      : ScriptModule(std::make_shared<ScriptModuleImpl>(std::move(script))) {}
  /// Shares `module` with its other holders.
  ScriptModule(std::shared_ptr<ScriptModuleImpl> module)
      : torch::nn::ModuleHolder<ScriptModuleImpl>(std::move(module)) {}
  /// Constructs an empty holder, as `torch::nn::Linear(nullptr)`.
  ScriptModule(std::nullptr_t) : torch::nn::ModuleHolder<ScriptModuleImpl>(nullptr) {}

  /// Calls the script's `forward` with tensors, numbers, lists, or one vector of IValues.
  template <class... Args>
  c10::IValue operator()(Args&&... args) const {
    return impl_->forward(std::forward<Args>(args)...);
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
