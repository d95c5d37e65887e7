/// \file
/// OpObserver, the base of what listens to ops: names their modules, follows them into backward
/// passes, and tells each observer of a thread.
#pragma once

#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/names.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline OpArguments arguments_in(const std::vector<c10::IValue>& values) {
  return OpArguments(values.data(), values.size());
}

inline std::vector<at::Tensor> tensors_in(OpArguments values) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(values, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// An op that has begun, as one observer sees it.
struct ObservedOp {
  c10::OperatorHandle handle;
  std::vector<c10::IValue> inputs;
  int depth = 0;            ///< how many ops are under way around it; 0: the program called it
  std::string node = {};    ///< the autograd node in whose backward pass it runs, or empty
  std::string module = {};  ///< whose parameter it reads, or that of the op before it
  bool reads_module = false;
  bool threw = false;                           ///< once it has ended
  int exceptions = std::uncaught_exceptions();  ///< under way when it began

  const std::string& name() const { return handle.schema().name(); }
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
/// node. Several observers of a thread end in any order, in that thread; a static one may outlive
/// it. A backward pass of another thread may outlive the observer, which then hears no more.
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
    if (Thread* const thread = this_thread()) thread->add(link_);
  }
  void stop() {
    if (Thread* const thread = this_thread()) thread->remove(link_);
    const auto locked = lock();
    link_->observer = nullptr;
  }

  const Names& names() const { return names_; }
  /// Guards what ops and questions share, for devices have threads.
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(link_->mutex); }

 private:
  /// What threads hold of an observer, which may be gone.
  struct Link {
    std::mutex mutex;
    OpObserver* observer = nullptr;
    std::atomic<bool> saw_backward = false;
  };
  using Links = std::vector<std::shared_ptr<Link>>;

  /// An autograd node that runs.
  struct Node {
    std::string name = {};
    std::int64_t sequence = -1;
  };

  /// What a thread's callbacks know. Ends before libtorch's own record of callbacks, which is
  /// older.
  struct Thread {
    Thread() { static_cast<void>(at::hasThreadLocalCallbacks()); }
    ~Thread() {
      while (!own.empty()) remove(own.back());
      is_gone() = true;
    }

    void add(const std::shared_ptr<Link>& link) {
      if (own.empty()) {
        callback = at::addThreadLocalCallback(
            at::RecordFunctionCallback(&OpObserver::begin, &OpObserver::end)
                .needsInputs(true)
                .needsOutputs(true)
                .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
      }
      own.push_back(link);
      publish();
    }
    void remove(std::shared_ptr<Link> link) {
      if (std::erase(own, link) == 0) return;
      if (own.empty()) at::removeCallback(callback);
      publish();
    }
    void publish() {
      active = own;
      const std::scoped_lock lock(threads().mutex);
      threads().links[id] = own;
    }

    std::uint64_t id = at::RecordFunction::currentThreadId();
    Links own;     // made on this thread
    Links active;  // that hear it now
    Node node;
    int depth = 0;  // of ops
    at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  };

  /// The observers of all threads, for nodes that other threads run. Never freed: a static observer
  /// may end after any static.
  struct Threads {
    std::mutex mutex;
    std::map<std::uint64_t, Links> links;
  };
  static Threads& threads() {
    static auto* const threads = new Threads();
    return *threads;
  }
  static bool& is_gone() {
    static thread_local bool is_gone = false;  // outlives the thread's other variables
    return is_gone;
  }
  /// Returns null once the thread's variables are destroyed.
  static Thread* this_thread() {
    if (is_gone()) return nullptr;
    static thread_local Thread thread;
    return &thread;
  }

  struct OpContext final : at::ObserverContext {
    std::vector<std::pair<std::shared_ptr<Link>, ObservedOp>> ops;
  };
  struct NodeContext final : at::ObserverContext {
    Links active;
    int depth = 0;
  };

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    Thread* const thread = this_thread();
    if (thread == nullptr) return nullptr;
    if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      return begin_node(*thread, function);
    }
    if (thread->active.empty()) return nullptr;
    const auto name = function.operator_name();
    const auto handle = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
    if (!handle) return nullptr;
    auto context = std::make_unique<OpContext>();
    const OpArguments inputs = recorded_inputs(function);
    // Ops that autograd runs between two nodes, such as the sum of gradients, are the last one's.
    const bool is_backward = torch::autograd::get_current_graph_task_id() != -1;
    for (const auto& link : thread->active) {
      ObservedOp op{.handle = *handle,
                    .inputs = std::vector<c10::IValue>(inputs.begin(), inputs.end()),
                    .depth = thread->depth};
      const std::scoped_lock lock(link->mutex);
      if (link->observer == nullptr) continue;
      link->observer->enter(op, function.seqNr(), is_backward ? thread->node : Node());
      context->ops.emplace_back(link, std::move(op));
    }
    ++thread->depth;  // libtorch swallows what is thrown above, and then forgets the op
    return context;
  }

  static std::unique_ptr<at::ObserverContext> begin_node(Thread& thread,
                                                         const at::RecordFunction& function) {
    auto context = std::make_unique<NodeContext>();
    context->active = thread.active;
    context->depth = std::exchange(thread.depth, 0);
    if (thread.active.empty()) {
      const std::scoped_lock lock(threads().mutex);
      const auto found = threads().links.find(function.forwardThreadId());
      if (found != threads().links.end()) thread.active = found->second;
    }
    thread.node = {.name = function.name(), .sequence = function.seqNr()};
    for (const auto& link : thread.active) link->saw_backward = true;
    return context;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    Thread* const thread = this_thread();
    if (thread == nullptr) return;
    if (auto* const ops = dynamic_cast<OpContext*>(context)) {
      thread->depth = std::max(thread->depth - 1, 0);
      const std::vector<c10::IValue> stack = function.outputs();
      for (auto& [link, op] : ops->ops) {
        op.threw = std::uncaught_exceptions() > op.exceptions;
        // TorchScript's interpreter shows its whole stack, whose last values the op returned.
        const std::size_t count = std::min(stack.size(), op.handle.schema().returns().size());
        const std::scoped_lock lock(link->mutex);
        if (link->observer == nullptr) continue;
        link->observer->left(op, OpArguments(stack.data() + (stack.size() - count), count));
      }
    } else if (auto* const node = dynamic_cast<NodeContext*>(context)) {
      thread->active = node->active;
      thread->depth = node->depth;
    }
  }

  void enter(ObservedOp& op, std::int64_t sequence, const Node& node) {
    op.node = node.name;
    if (auto module = names_.module_of(arguments_in(op.inputs))) {
      op.module = *std::move(module);
      op.reads_module = true;
    } else if (const auto made = made_by_.find(node.sequence); made != made_by_.end()) {
      std::tie(op.module, op.reads_module) = made->second;
    } else if (op.depth > 0) {
      std::tie(op.module, op.reads_module) = around_;
    } else if (node.name.empty()) {
      op.module = last_module_;
    }
    if (op.depth == 0) around_ = {op.module, op.reads_module};
    if (node.name.empty() && op.reads_module) last_module_ = op.module;
    if (made_by_.size() > (std::size_t{1} << 20)) made_by_.clear();  // of graphs long gone
    if (node.name.empty() && sequence >= 0) made_by_[sequence] = {op.module, op.reads_module};
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
