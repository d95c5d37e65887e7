/// \file
/// TorchScript as a torch::nn::Module, for programs that train exported models from C++. No other
/// header of mezzo's includes this one or knows of TorchScript.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/autocast_mode.h>
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

/// Returns the first node of `block`, and of the blocks in it, for which `is_meant(node)` holds;
/// null if there is none.
template <class IsMeant>
const torch::jit::Node* find_node(const torch::jit::Block& block, const IsMeant& is_meant) {
  for (const torch::jit::Node* const node : block.nodes()) {
    if (is_meant(*node)) return node;
    for (const torch::jit::Block* const inner : node->blocks()) {
      if (const auto* const found = find_node(*inner, is_meant)) return found;
    }
  }
  return nullptr;
}

inline bool is_fork(const torch::jit::Node& node) {
  return node.kind() == c10::prim::fork || node.kind() == c10::prim::awaitable;
}

/// What libtorch would run by executors of their own, which write casts by other op lists.
inline bool is_run_elsewhere(const torch::jit::Node& node) {
  if (node.kind() == c10::prim::CallMethod || node.kind() == c10::prim::CallFunction) return true;
  if (!is_fork(node)) return false;
  const auto& uses = node.output()->uses();
  return node.kind() != c10::prim::fork ||
         std::any_of(uses.begin(), uses.end(),
                     [](const auto& use) { return use.user->kind() != c10::aten::wait; });
}

/// Whether a `with` statement enters an autocast region.
inline bool opens_autocast(const torch::jit::Node& node) {
  return node.kind() == c10::prim::Enter &&
         node.input(0)->type()->str().find("autocast") != std::string::npos;
}

/// Returns the graph of `forward`, with its calls and forks inlined and without autocast's casts.
/// \throws c10::Error for forks and calls that cannot be inlined, and for a region of autocast
inline std::shared_ptr<torch::jit::Graph> inlined_forward(const torch::jit::Module& script) {
  // Under autocast libtorch would write casts into the graph, and keep that graph.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const torch::jit::Method forward = script.get_method("forward");
  auto graph = torch::jit::toGraphFunction(forward.function()).optimized_graph()->copy();
  const torch::jit::Block& block = *graph->block();
  torch::jit::Inline(*graph);
  while (find_node(block, is_fork) != nullptr) {  // again for a fork in a fork
    const torch::jit::Node* const lost =
        find_node(block, [](const auto& node) { return is_fork(node) && is_run_elsewhere(node); });
    TORCH_CHECK(lost == nullptr,
                "ScriptModule: the result of a torch.jit.fork is kept in a list or passed on, so "
                "that libtorch runs the fork by op lists of its own; wait for each fork by its "
                "name, or call the functions one after the other: ",
                lost->sourceRange().str());
    torch::jit::InlineForkWait(graph);
    torch::jit::Inline(*graph);
  }
  const torch::jit::Node* const call = find_node(block, is_run_elsewhere);
  TORCH_CHECK(call == nullptr,
              "ScriptModule: forward calls a method of an interface, which libtorch runs by op "
              "lists of its own; declare the submodule with its class, not with the interface: ",
              call->sourceRange().str());
  const torch::jit::Node* const region = find_node(block, opens_autocast);
  TORCH_CHECK(
      region == nullptr,
      "ScriptModule: this script opens a torch.autocast region in its forward, which means "
      "nothing when its ops run one by one; save it without, and use mezzo::AutocastGuard and "
      "op overrides, or call it outside of autocast: ",
      region->sourceRange().str());
  return graph;
}

/// Returns the arguments of a call as IValues; one vector of IValues is the arguments themselves.
template <class... Args>
std::vector<c10::IValue> script_arguments(Args&&... args) {
  if constexpr (sizeof...(Args) == 1 &&
                (std::same_as<std::remove_cvref_t<Args>, std::vector<c10::IValue>> && ...)) {
    return std::vector<c10::IValue>(std::forward<Args>(args)...);
  } else {
    return {c10::IValue(std::forward<Args>(args))...};
  }
}

}  // namespace detail

/// The module that a ScriptModule holds.
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
      scripts_.push_back(
          register_module(item.name, std::make_shared<ScriptModuleImpl>(item.value)));
    }
  }

  /// Runs the script's `forward`. Arguments: tensors, numbers, lists, or one vector of IValues.
  /// Under autocast each op is cast as in a model written in C++: libtorch's graph optimizer, which
  /// has op lists of its own, is not used.
  template <class... Args>
  c10::IValue forward(Args&&... args) {
    std::vector<c10::IValue> arguments = detail::script_arguments(std::forward<Args>(args)...);
    const bool is_autocast = at::autocast::is_autocast_enabled(at::kCPU) ||
                             at::autocast::is_autocast_enabled(at::kCUDA) ||
                             at::autocast::is_autocast_enabled(at::kMPS);
    c10::IValue result =
        is_autocast ? interpret(std::move(arguments)) : script_.forward(std::move(arguments));
    settle_buffers();
    return result;
  }

  /// Copies the values of buffers that the script has replaced (`self.mean = ...` in its forward)
  /// into the registered buffers, and puts the registered buffers back into the script. A
  /// replacement that requires grad is left alone. Running, saving, loading and moving through this
  /// class all call this.
  void settle_buffers() const {
    const c10::NoGradGuard no_grad;
    for (auto& item : named_buffers(/*recurse=*/false)) {
      const at::Tensor present = script_._ivalue()->getAttr(item.key()).toTensor();
      if (present.is_same(item.value()) || present.requires_grad()) continue;
      if (present.is_inference() != item.value().is_inference()) continue;
      item.value().set_data(present);
      script_._ivalue()->setAttr(item.key(), item.value());
    }
    for (const auto& child : scripts_) child->settle_buffers();
  }

  /// Returns the script.
  const torch::jit::Module& script() const noexcept { return script_; }

  /// Returns a deep copy, whose parameters are leaves.
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
  /// Writes parameters and buffers, with the values that the script has given its buffers.
  void save(torch::serialize::OutputArchive& archive) const override {
    settle_buffers();  // the script may have replaced buffers
    torch::nn::Module::save(archive);
  }
  /// Reads parameters and buffers, also into the script.
  void load(torch::serialize::InputArchive& archive) override {
    settle_buffers();
    torch::nn::Module::load(archive);
  }
  /// Moves the script to a device and casts its floating-point parameters and buffers.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    settle_buffers();
    torch::nn::Module::to(device, dtype, non_blocking);
  }
  /// Casts the script's floating-point parameters and buffers.
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    settle_buffers();
    torch::nn::Module::to(dtype, non_blocking);
  }
  /// Moves the script to a device.
  void to(torch::Device device, bool non_blocking = false) override {
    settle_buffers();
    torch::nn::Module::to(device, non_blocking);
  }
  /// Sets training or evaluation mode, in the script too.
  void train(bool on = true) override {
    torch::nn::Module::train(on);
    script_.train(on);
  }
  /// Returns the script's own mode; true for a script without one.
  bool is_training() const noexcept override {
    return !script_.hasattr("training") || script_.is_training();
  }
  /// Writes the script's class name.
  void pretty_print(std::ostream& stream) const override {
    stream << "mezzo::ScriptModule(" << script_.type()->repr_str() << ")";
  }

 private:
  /// Runs `forward` op by op through the dispatcher, as a model written in C++ runs.
  ///
  /// libtorch's executor does not, under autocast: it writes casts into the graph by op lists of
  /// its own, with the dtype of the first call, and keeps that graph. Edits to the op lists then
  /// have no effect, and backward throws after a call in another dtype.
  c10::IValue interpret(std::vector<c10::IValue> arguments) {
    std::call_once(is_compiled_, [this] {
      code_ = torch::jit::Code(detail::inlined_forward(script_), "forward");
    });
    arguments.insert(arguments.begin(), script_._ivalue());
    const torch::jit::Method forward = script_.get_method("forward");
    forward.function().getSchema().checkAndNormalizeInputs(arguments);
    torch::jit::InterpreterState(code_).run(arguments);
    return arguments.front();
  }

  torch::jit::Module script_;
  std::vector<std::shared_ptr<ScriptModuleImpl>> scripts_;  // its children
  std::once_flag is_compiled_;
  torch::jit::Code code_;  // forward, with its calls of children inlined
};

/// A TorchScript model with the interface of a torch::nn::Module:
///
///     mezzo::ScriptModule net(torch::jit::load("model.pt"));
///     mezzo::optim::AdamW optimizer(net->parameters(), 2e-5);
///     const auto logits = net(ids, mask).toTensor();
///
/// Parameters, buffers and children are the script's own, under its names, not copies: `to`,
/// `train`, loading and optimizers act on both. Under autocast call the ScriptModule, not the
/// script: `script.forward` follows libtorch's op lists for TorchScript (docs/guide.md).
/// Make one and keep it: AutocastModule, initialize, DistributedDataParallel and TrainingState take
/// it as any module, and every call that makes another walks the whole script.
///
/// Only parameters that require grad are trained; torch::jit::load restores that flag from the
/// file. A frozen model (torch::jit::freeze) has no parameters. Parameters that are registered
/// later, or replaced with `setattr`, are not tracked.
class ScriptModule : public torch::nn::ModuleHolder<ScriptModuleImpl> {
 public:
  /// Wraps `script`, whose parameters are then shared.
  ScriptModule(torch::jit::Module script)
      : ScriptModule(std::make_shared<ScriptModuleImpl>(std::move(script))) {}
  /// Holds `module`, shared with its other holders.
  ScriptModule(std::shared_ptr<ScriptModuleImpl> module)
      : torch::nn::ModuleHolder<ScriptModuleImpl>(std::move(module)) {}
  /// An empty holder, as `torch::nn::Linear(nullptr)` is.
  ScriptModule(std::nullptr_t) : torch::nn::ModuleHolder<ScriptModuleImpl>(nullptr) {}

  /// Runs the script's `forward`. Arguments: tensors, numbers, lists, or one vector of IValues.
  template <class... Args>
  c10::IValue operator()(Args&&... args) const {
    return impl_->forward(std::forward<Args>(args)...);
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
