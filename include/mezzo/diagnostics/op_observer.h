/// \file
/// OpLocation, and the base class of tools that observe ops, their modules and backward passes.
#pragma once

#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/named_parameters.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
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

/// An op, and where in the model it ran.
struct OpLocation {
  std::string op = {};  ///< "aten::linear", as called by the program or by an autograd node
  /// Autograd node that called the op, such as "AddmmBackward0"; empty in the forward pass.
  std::string node = {};
  /// Module whose parameters the op reads, identified by their storage, since C++ modules have no
  /// hooks. An op that reads none gets the module of the previous op; in a backward pass, of the
  /// forward op that created the node. Empty before the first parameter is read.
  std::string module = {};
  bool reads_parameter = false;  ///< whether the op itself reads a parameter of `module`

  /// Returns whether the op ran in a backward pass.
  bool is_backward() const { return !node.empty(); }
  /// Returns "aten::linear (in encoder.fc)" or "aten::mm of AddmmBackward0 (after encoder.fc)".
  std::string to_string() const {
    return op + (is_backward() && node != op ? " of " + node : "") +
           (module.empty() ? "" : (reads_parameter ? " (in " : " (after ") + module + ")");
  }
};

namespace detail {

inline OpArguments make_op_arguments(const std::vector<c10::IValue>& values) {
  return OpArguments(values.data(), values.size());
}

inline std::vector<at::Tensor> get_tensors(OpArguments values) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(values, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Returns the storage that a tensor owns or views; null if it has none.
inline c10::StorageImpl* get_storage(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

/// Finds the names of tensors by their current storage, also of views and of parameters that share
/// one flat buffer.
class TensorNameLookup {
 public:
  explicit TensorNameLookup(TensorsByName tensors) : tensors_(std::move(tensors)) {}

  /// Returns the name of the tensor that `tensor` is or views; empty if there is none.
  std::string find_name(const at::Tensor& tensor) const {
    const auto* const storage = get_storage(tensor);
    for (const auto& [name, known] : tensors_) {
      if (storage == nullptr || get_storage(known) != storage) continue;
      const std::int64_t offset = tensor.storage_offset() - known.storage_offset();
      if (offset >= 0 && offset < std::max<std::int64_t>(known.numel(), 1)) return name;
    }
    return {};
  }

  /// Returns the module of the first named tensor among an op's inputs.
  std::optional<std::string> find_module(OpArguments inputs) const {
    std::string name;
    for_each_tensor(inputs, [&](const at::Tensor& tensor) {
      if (name.empty()) name = find_name(tensor);
    });
    if (name.empty()) return std::nullopt;
    return layer_name(name);
  }

 private:
  TensorsByName tensors_;
};

/// An op in progress, as passed to one observer.
struct ObservedOp : OpLocation {
  c10::OperatorHandle handle;
  std::vector<c10::IValue> inputs;
  int depth = 0;                                         ///< number of enclosing ops
  bool threw = false;                                    ///< set when the op ends
  int uncaught_exceptions = std::uncaught_exceptions();  ///< when the op began
};

/// Hides an observer's own ops from all observers, autograd and autocast.
class SuspendObserversGuard {
 private:
  at::DisableRecordFunctionGuard no_callbacks_;
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

/// Observes the ops of the constructing thread between start() and stop(), and those of backward
/// passes over graphs that this thread created, on any autograd thread. A static observer may be
/// destroyed after its thread has ended; a backward pass of another thread may outlive an observer,
/// which then receives no further calls.
class OpObserver {
 public:
  OpObserver(const OpObserver&) = delete;
  OpObserver& operator=(const OpObserver&) = delete;

  /// Returns whether a backward pass has run an autograd node since start().
  bool has_run_backward() const { return registration_->has_run_backward; }

 protected:
  explicit OpObserver(TensorsByName names) : names_(std::move(names)) {}
  virtual ~OpObserver() = default;  // the destructor of the final class calls stop() first

  /// Called before and after each op, never concurrently. Implementations call ops under a
  /// SuspendObserversGuard.
  virtual void on_op_begin(ObservedOp& op) = 0;
  virtual void on_op_end(const ObservedOp& op, OpArguments outputs) = 0;

  void start() {
    registration_->observer = this;
    const std::scoped_lock lock(registry().mutex);
    registry().registrations.push_back(registration_);
    if (registry().registrations.size() > 1) return;
    registry().callback = at::addGlobalCallback(
        at::RecordFunctionCallback(&OpObserver::on_function_enter, &OpObserver::on_function_exit)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  void stop() {
    {
      const std::scoped_lock lock(registry().mutex);
      std::erase(registry().registrations, registration_);
      if (registry().registrations.empty()) at::removeCallback(registry().callback);
    }
    const auto locked = lock();
    registration_->observer = nullptr;
  }

  const TensorNameLookup& names() const { return names_; }
  /// Guards the state that callbacks on autograd threads and accessors share.
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(registration_->mutex); }

 private:
  /// Held by callbacks, which may outlive the observer.
  struct Registration {
    std::mutex mutex;
    OpObserver* observer = nullptr;
    std::atomic<bool> has_run_backward = false;
    const std::uint64_t thread = at::RecordFunction::currentThreadId();
  };
  using Registrations = std::vector<std::shared_ptr<Registration>>;

  /// All active observers. Never freed, since a static observer may be destroyed after any other
  /// static. (libtorch guards its list of global callbacks by a mutex, contrary to its header.)
  struct Registry {
    std::mutex mutex;
    Registrations registrations;
    at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
    std::set<std::string> node_names;
  };
  static Registry& registry() {
    static auto* const registry = new Registry();
    return *registry;
  }

  /// The op and the autograd node that a thread is running, or ran last. Trivially destructible,
  /// so that destructors of statics may still run ops.
  struct ThreadState {
    int depth = 0;                      // of nested ops
    const std::string* node = nullptr;  // autograd node
    std::int64_t sequence_nr = -1;      // of the node
    std::uint64_t forward_thread = 0;   // that created the node
  };
  static ThreadState& thread_state() {
    static thread_local ThreadState state;
    return state;
  }

  /// Returns the observers of the op that the current thread runs.
  static Registrations find_registrations(bool is_backward) {
    const std::uint64_t thread = at::RecordFunction::currentThreadId();
    Registrations registrations;
    const std::scoped_lock lock(registry().mutex);
    for (const auto& registration : registry().registrations) {
      const bool created_node =
          is_backward && registration->thread == thread_state().forward_thread;
      if (registration->thread == thread || created_node) registrations.push_back(registration);
    }
    return registrations;
  }

  struct Context final : at::ObserverContext {
    int depth = thread_state().depth;  // when the op began
    std::vector<std::pair<std::shared_ptr<Registration>, ObservedOp>> ops;
  };

  static std::unique_ptr<at::ObserverContext> on_function_enter(
      const at::RecordFunction& function) {
    if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) return begin_node(function);
    // Ops that autograd runs between two nodes, such as sums of gradients, belong to the last node.
    const bool is_backward = torch::autograd::get_current_graph_task_id() != -1;
    const Registrations registrations = find_registrations(is_backward);
    const auto name = function.operator_name();
    if (registrations.empty() || !name) return nullptr;
    const auto handle = c10::Dispatcher::singleton().findSchema(*name);
    if (!handle) return nullptr;
    auto context = std::make_unique<Context>();
    const OpArguments inputs = get_recorded_inputs(function);
    for (const auto& registration : registrations) {
      ObservedOp op{{handle->schema().name()},
                    *handle,
                    std::vector<c10::IValue>(inputs.begin(), inputs.end()),
                    thread_state().depth};
      const std::scoped_lock lock(registration->mutex);
      if (registration->observer == nullptr) continue;
      registration->observer->begin_op(op, function.seqNr(),
                                       is_backward ? thread_state() : ThreadState());
      context->ops.emplace_back(registration, std::move(op));
    }
    ++thread_state()
          .depth;  // last: libtorch catches what throws above, and then skips on_function_exit()
    return context;
  }

  static std::unique_ptr<at::ObserverContext> begin_node(const at::RecordFunction& function) {
    auto context = std::make_unique<Context>();
    {
      const std::scoped_lock lock(registry().mutex);
      thread_state() = {.node = &*registry().node_names.insert(function.name()).first,
                        .sequence_nr = function.seqNr(),
                        .forward_thread = function.forwardThreadId()};
    }
    for (const auto& registration : find_registrations(/*is_backward=*/true))
      registration->has_run_backward = true;
    return context;
  }

  static void on_function_exit(const at::RecordFunction& function, at::ObserverContext* base) {
    auto* const context = dynamic_cast<Context*>(base);
    if (context == nullptr) return;
    thread_state().depth = context->depth;
    if (context->ops.empty()) return;
    const std::vector<c10::IValue>& stack = function.outputs();
    for (auto& [registration, op] : context->ops) {
      op.threw = std::uncaught_exceptions() > op.uncaught_exceptions;
      // TorchScript's interpreter passes its whole stack, which ends with the op's outputs.
      const std::size_t count = std::min(stack.size(), op.handle.schema().returns().size());
      const std::scoped_lock lock(registration->mutex);
      if (registration->observer == nullptr) continue;
      registration->observer->on_op_end(op,
                                        OpArguments(stack.data() + (stack.size() - count), count));
    }
  }

  /// Determines the op's node and module, and calls on_op_begin.
  void begin_op(ObservedOp& op, std::int64_t sequence_nr, const ThreadState& backward) {
    constexpr std::size_t kMaxNodes = std::size_t{1} << 20;
    if (backward.node != nullptr) op.node = *backward.node;
    const bool is_forward = op.node.empty();
    if (auto module = names_.find_module(make_op_arguments(op.inputs))) {
      op.module = *std::move(module);
      op.reads_parameter = true;
    } else if (const auto node = node_modules_.find(backward.sequence_nr);
               node != node_modules_.end()) {
      std::tie(op.module, op.reads_parameter) = node->second;
    } else if (op.depth > 0) {
      std::tie(op.module, op.reads_parameter) = outer_op_module_;
    } else if (is_forward) {
      op.module = last_module_;
    }
    if (op.depth == 0) outer_op_module_ = {op.module, op.reads_parameter};
    if (is_forward && op.reads_parameter) last_module_ = op.module;
    if (node_modules_.size() > kMaxNodes) node_modules_.clear();  // mostly of freed graphs
    if (is_forward && sequence_nr >= 0) {
      node_modules_[sequence_nr] = {op.module, op.reads_parameter};
    }
    on_op_begin(op);
  }

  TensorNameLookup names_;
  const std::shared_ptr<Registration> registration_ = std::make_shared<Registration>();
  // Modules with `reads_parameter`: of the current outermost op, and by the sequence number of the
  // autograd node that the op created.
  std::pair<std::string, bool> outer_op_module_;
  std::unordered_map<std::int64_t, std::pair<std::string, bool>> node_modules_;
  std::string last_module_;
};

/// Returns whether the op computed its outputs: they are neither views of its inputs nor
/// uninitialized memory.
inline bool computes_outputs(const ObservedOp& op, const std::vector<at::Tensor>& outputs) {
  const c10::FunctionSchema& schema = op.handle.schema();
  for (const char* const prefix : {"aten::empty", "aten::new_empty", "aten::resize", "aten::set_",
                                   "aten::_efficientzerotensor"}) {
    if (schema.name().starts_with(prefix)) return false;
  }
  if (outputs.empty() || op.handle.hasTag(at::Tag::inplace_view)) return false;
  const auto& returns = schema.returns();
  if (schema.is_mutable() || returns.empty() || returns[0].alias_info() == nullptr) return true;
  const std::vector<at::Tensor> inputs = get_tensors(make_op_arguments(op.inputs));
  return std::none_of(inputs.begin(), inputs.end(), [&](const at::Tensor& tensor) {
    return get_storage(tensor) == get_storage(outputs[0]);
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
