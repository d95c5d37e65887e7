/// \file
/// OpObserver, the base of what listens to ops: names their modules, follows them into backward
/// passes, and tells each observer of a thread.
#pragma once

#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/finding.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// An op, and where it ran.
struct OpPlace {
  std::string op = {};  ///< "aten::linear", as the program or an autograd node called it
  /// The autograd node in whose backward pass the op ran: "AddmmBackward0"; empty in the forward
  /// pass.
  std::string node = {};
  /// The name, in the model, of the module whose parameters the op reads. An op that reads none has
  /// the module of the op before it; an op of the backward pass has that of the forward op that
  /// made its node. Empty until a parameter has been read.
  std::string module = {};
  bool reads_module = false;  ///< whether the op itself reads a parameter of `module`

  /// Returns whether the op ran in a backward pass.
  bool is_backward() const { return !node.empty(); }
  /// Returns "aten::linear, in encoder.fc" or "aten::mm of AddmmBackward0, in encoder.fc".
  std::string place() const {
    return op + (is_backward() && node != op ? " of " + node : "") +
           (module.empty() ? "" : (reads_module ? ", in " : ", after ") + module);
  }
};

namespace detail {

inline OpArguments arguments_in(const std::vector<c10::IValue>& values) {
  return OpArguments(values.data(), values.size());
}

inline std::vector<at::Tensor> tensors_in(OpArguments values) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(values, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Returns the memory that a tensor is or is a view of; null where it has none.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

/// Tensors by their memory, as it is when they are asked for. Finds views of them, and parameters
/// that lie in one flat buffer.
class Names {
 public:
  explicit Names(NamedTensors tensors) : tensors_(std::move(tensors)) {}

  /// Returns the name of the tensor that `tensor` is or is a view of; empty of another one.
  std::string name_of(const at::Tensor& tensor) const {
    const auto* const memory = storage_of(tensor);
    for (const auto& [name, known] : tensors_) {
      if (memory == nullptr || storage_of(known) != memory) continue;
      const std::int64_t offset = tensor.storage_offset() - known.storage_offset();
      if (offset >= 0 && offset < std::max<std::int64_t>(known.numel(), 1)) return name;
    }
    return {};
  }

  /// Returns the module of the first of these tensors among an op's inputs; none if it reads none.
  std::optional<std::string> module_of(OpArguments inputs) const {
    std::string name;
    for_each_tensor(inputs, [&](const at::Tensor& tensor) {
      if (name.empty()) name = name_of(tensor);
    });
    if (name.empty()) return std::nullopt;
    return layer_name(name);
  }

 private:
  NamedTensors tensors_;
};

/// An op that has begun, as one observer sees it.
struct ObservedOp : OpPlace {
  c10::OperatorHandle handle;
  std::vector<c10::IValue> inputs;
  int depth = 0;                                ///< how many ops are under way around it
  bool threw = false;                           ///< once it has ended
  int exceptions = std::uncaught_exceptions();  ///< under way when it began
};

/// What observers do to ops of their own: nobody hears them, and autocast leaves them alone.
class Unobserved {
 private:
  at::DisableRecordFunctionGuard no_callbacks_;
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

/// Hears the ops of the thread that made it, from `start` to `stop`, and those of backward passes
/// over graphs that this thread made, on whatever thread autograd runs them. Modules of C++ have no
/// hooks: an op belongs to the module whose parameter it reads, one that reads none comes after the
/// last that did, and an op of the backward pass belongs to the module of the op that made its
/// node. A static observer may end after its thread, and a backward pass of another thread may
/// outlive an observer, which then hears no more.
class OpObserver {
 public:
  OpObserver(const OpObserver&) = delete;
  OpObserver& operator=(const OpObserver&) = delete;

  /// Returns whether a backward pass has run a node since `start`.
  bool saw_backward() const { return link_->saw_backward; }

 protected:
  explicit OpObserver(NamedTensors names) : names_(std::move(names)) {}
  virtual ~OpObserver() = default;  // after stop(), which the destructor of a final class calls

  /// Called before an op and after it, one op at a time. Ops of their own run under Unobserved.
  virtual void entered(ObservedOp& op) = 0;
  virtual void left(const ObservedOp& op, OpArguments returned) = 0;

  void start() {
    link_->observer = this;
    const std::scoped_lock lock(registry().mutex);
    registry().links.push_back(link_);
    if (registry().links.size() > 1) return;
    registry().callback = at::addGlobalCallback(
        at::RecordFunctionCallback(&OpObserver::begin, &OpObserver::end)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  void stop() {
    {
      const std::scoped_lock lock(registry().mutex);
      std::erase(registry().links, link_);
      if (registry().links.empty()) at::removeCallback(registry().callback);
    }
    const auto locked = lock();
    link_->observer = nullptr;
  }

  const Names& names() const { return names_; }
  /// Guards what ops and questions share, for devices have threads.
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(link_->mutex); }

 private:
  /// What callbacks hold of an observer, which may be gone.
  struct Link {
    std::mutex mutex;
    OpObserver* observer = nullptr;
    std::atomic<bool> saw_backward = false;
    const std::uint64_t thread = at::RecordFunction::currentThreadId();
  };
  using Links = std::vector<std::shared_ptr<Link>>;

  /// All observers. Never freed: a static observer may end after any static. (libtorch guards its
  /// list of global callbacks by a mutex, whatever its header asks for.)
  struct Registry {
    std::mutex mutex;
    Links links;
    at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
    std::set<std::string> node_names;
  };
  static Registry& registry() {
    static auto* const registry = new Registry();
    return *registry;
  }

  /// What a thread runs, or ran last. Has no destructor, so that ops of statics may still run.
  struct Running {
    int depth = 0;                      // of ops
    const std::string* node = nullptr;  // the autograd node
    std::int64_t sequence = -1;         // the node's
    std::uint64_t forward_thread = 0;   // that made the node
  };
  static Running& running() {
    static thread_local Running running;
    return running;
  }

  /// Returns who hears what this thread runs, as a part of a backward pass or of no such pass.
  static Links listeners(bool is_backward) {
    const std::uint64_t thread = at::RecordFunction::currentThreadId();
    Links links;
    const std::scoped_lock lock(registry().mutex);
    for (const auto& link : registry().links) {
      const bool made_node = is_backward && link->thread == running().forward_thread;
      if (link->thread == thread || made_node) links.push_back(link);
    }
    return links;
  }

  struct Context final : at::ObserverContext {
    int depth = running().depth;  // before
    std::vector<std::pair<std::shared_ptr<Link>, ObservedOp>> ops;
  };

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) return begin_node(function);
    // Ops that autograd runs between two nodes, such as the sum of gradients, are the last one's.
    const bool is_backward = torch::autograd::get_current_graph_task_id() != -1;
    const Links links = listeners(is_backward);
    const auto name = function.operator_name();
    if (links.empty() || !name) return nullptr;
    const auto handle = c10::Dispatcher::singleton().findSchema(*name);
    if (!handle) return nullptr;
    auto context = std::make_unique<Context>();
    const OpArguments inputs = recorded_inputs(function);
    for (const auto& link : links) {
      ObservedOp op{{handle->schema().name()},
                    *handle,
                    std::vector<c10::IValue>(inputs.begin(), inputs.end()),
                    running().depth};
      const std::scoped_lock lock(link->mutex);
      if (link->observer == nullptr) continue;
      link->observer->enter(op, function.seqNr(), is_backward ? running() : Running());
      context->ops.emplace_back(link, std::move(op));
    }
    ++running().depth;  // libtorch swallows what is thrown above, and then forgets the op
    return context;
  }

  static std::unique_ptr<at::ObserverContext> begin_node(const at::RecordFunction& function) {
    auto context = std::make_unique<Context>();
    {
      const std::scoped_lock lock(registry().mutex);
      running() = {.node = &*registry().node_names.insert(function.name()).first,
                   .sequence = function.seqNr(),
                   .forward_thread = function.forwardThreadId()};
    }
    for (const auto& link : listeners(/*is_backward=*/true)) link->saw_backward = true;
    return context;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    auto* const begun = dynamic_cast<Context*>(context);
    if (begun == nullptr) return;
    running().depth = begun->depth;
    if (begun->ops.empty()) return;
    const std::vector<c10::IValue> stack = function.outputs();
    for (auto& [link, op] : begun->ops) {
      op.threw = std::uncaught_exceptions() > op.exceptions;
      // TorchScript's interpreter shows its whole stack, whose last values the op returned.
      const std::size_t count = std::min(stack.size(), op.handle.schema().returns().size());
      const std::scoped_lock lock(link->mutex);
      if (link->observer == nullptr) continue;
      link->observer->left(op, OpArguments(stack.data() + (stack.size() - count), count));
    }
  }

  void enter(ObservedOp& op, std::int64_t sequence, const Running& backward) {
    if (backward.node != nullptr) op.node = *backward.node;
    const bool is_forward = op.node.empty();
    if (auto module = names_.module_of(arguments_in(op.inputs))) {
      op.module = *std::move(module);
      op.reads_module = true;
    } else if (const auto made = made_by_.find(backward.sequence); made != made_by_.end()) {
      std::tie(op.module, op.reads_module) = made->second;
    } else if (op.depth > 0) {
      std::tie(op.module, op.reads_module) = around_;
    } else if (is_forward) {
      op.module = last_module_;
    }
    if (op.depth == 0) around_ = {op.module, op.reads_module};
    if (is_forward && op.reads_module) last_module_ = op.module;
    if (made_by_.size() > (std::size_t{1} << 20)) made_by_.clear();  // of graphs long gone
    if (is_forward && sequence >= 0) made_by_[sequence] = {op.module, op.reads_module};
    entered(op);
  }

  Names names_;
  const std::shared_ptr<Link> link_ = std::make_shared<Link>();
  std::pair<std::string, bool> around_;  // of the op that the program called
  std::string last_module_;
  // By a node's number: the module of the op that made it, and whether that reads its parameters.
  std::unordered_map<std::int64_t, std::pair<std::string, bool>> made_by_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
