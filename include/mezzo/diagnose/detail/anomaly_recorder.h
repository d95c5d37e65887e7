/// \file
/// Listens to the ops and autograd nodes of a step.
#pragma once

#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly.h>
#include <mezzo/diagnose/detail/anomaly_judge.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/value_range.h>
#include <mezzo/diagnose/detail/watched_ops.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What a thread is in the midst of.
struct WatchedThread {
  std::shared_ptr<AnomalyRecorder> recorder = nullptr;
  OpenOp* op = nullptr;
  OpenNode* node = nullptr;
  OpenNode last_node = {};

  /// The node that ops belong to. Between two nodes autograd itself runs some: it sums a gradient
  /// to its shape, or adds two.
  const OpenNode* node_of_ops() const {
    if (node != nullptr) return node;
    const bool is_backward = torch::autograd::get_current_graph_task_id() >= 0;
    return is_backward && !last_node.name.empty() ? &last_node : nullptr;
  }
};

inline WatchedThread& watched_thread() {
  static thread_local WatchedThread thread;
  return thread;
}

/// Makes what a callback computes invisible: to callbacks, autograd and autocast.
class Unwatched {
 private:
  at::DisableRecordFunctionGuard no_callbacks_;
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

class AnomalyRecorder : public std::enable_shared_from_this<AnomalyRecorder> {
 public:
  AnomalyRecorder(const torch::nn::Module& model, AnomalyTraceOptions options)
      : judge_(model, std::move(options)) {}

  void start() {
    WatchedThread& thread = watched_thread();
    TORCH_CHECK(
        thread.recorder == nullptr,
        "AnomalyTrace: this thread has one already; let that one end before another is made");
    thread.recorder = shared_from_this();
    {
      const std::scoped_lock lock(of_threads().mutex);
      of_threads().recorders[thread_] = shared_from_this();
    }
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&AnomalyRecorder::begin, &AnomalyRecorder::end)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }

  void stop() {
    at::removeCallback(callback_);
    const std::scoped_lock lock(of_threads().mutex);
    of_threads().recorders.erase(thread_);
    watched_thread().recorder = nullptr;
  }

  std::vector<Anomaly> anomalies() const {
    const std::scoped_lock lock(mutex_);
    return judge_.anomalies();
  }
  std::vector<AnomalyFrame> frames() const {
    const std::scoped_lock lock(mutex_);
    const std::deque<AnomalyFrame> frames = judge_.frames();
    return {frames.begin(), frames.end()};
  }
  bool saw_backward() const { return saw_backward_; }

 private:
  /// Autograd runs nodes of a device on a thread of its own, with this thread's callbacks. A node
  /// knows the thread that made it.
  struct Threads {
    std::mutex mutex;
    std::map<std::uint64_t, std::shared_ptr<AnomalyRecorder>> recorders;
  };
  static Threads& of_threads() {
    static Threads threads;
    return threads;
  }
  static std::shared_ptr<AnomalyRecorder> recorder_of(std::uint64_t thread) {
    const std::scoped_lock lock(of_threads().mutex);
    const auto found = of_threads().recorders.find(thread);
    return found == of_threads().recorders.end() ? nullptr : found->second;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) return begin_node(function);
    return begin_op(function);
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    WatchedThread& thread = watched_thread();
    if (auto* const op = dynamic_cast<OpenOp*>(context)) {
      thread.op = op->outer;
      if (op->recorder->is_full_) return;
      const Unwatched unwatched;
      op->recorder->leave(*op, thread.node_of_ops(), function.outputs());
    } else if (auto* const node = dynamic_cast<OpenNode*>(context)) {
      thread.recorder = node->outer_recorder;
      thread.last_node.name = node->name;
      thread.last_node.module = node->module;
      thread.last_node.reads_module = node->reads_module;
      thread.node = node->outer_node;
      thread.op = node->outer_op;
    }
  }

  static std::unique_ptr<at::ObserverContext> begin_node(const at::RecordFunction& function) {
    WatchedThread& thread = watched_thread();
    auto node = std::make_unique<OpenNode>();
    node->outer_recorder = thread.recorder;
    node->outer_node = thread.node;
    node->outer_op = thread.op;
    node->name = function.name();
    auto recorder = thread.recorder;
    if (recorder == nullptr) recorder = recorder_of(function.forwardThreadId());
    if (recorder != nullptr) {
      const Unwatched unwatched;
      recorder->enter_node(*node, function);
    }
    // Not before: libtorch swallows what is thrown here, and then nothing of the node is kept.
    thread.recorder = std::move(recorder);
    thread.node = node.get();
    thread.op = nullptr;
    return node;
  }

  static std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& function) {
    WatchedThread& thread = watched_thread();
    if (thread.recorder == nullptr || thread.recorder->is_full_) return nullptr;
    const auto name = function.operator_name();
    if (!name.has_value() || (thread.op != nullptr && is_copy(*thread.op))) return nullptr;
    const auto handle = c10::Dispatcher::singleton().findSchema(*name);
    if (!handle.has_value()) return nullptr;
    auto op = std::make_unique<OpenOp>(thread.recorder, *handle);
    op->outer = thread.op;
    const Unwatched unwatched;
    op->recorder->enter(*op, recorded_inputs(function), function.seqNr(), thread.node_of_ops());
    thread.op = op.get();
    return op;
  }

  void enter_node(OpenNode& node, const at::RecordFunction& function) {
    saw_backward_ = true;
    const std::scoped_lock lock(mutex_);
    const auto made = made_by_.find(function.seqNr());
    if (made != made_by_.end()) std::tie(node.module, node.reads_module) = made->second;
    if (is_full_) return;
    judge_.take(node, tensors_in(recorded_inputs(function)));
    is_full_ = judge_.is_full();
  }

  void enter(OpenOp& op, OpArguments inputs, std::int64_t sequence, const OpenNode* node) {
    const std::scoped_lock lock(mutex_);
    op.found_before = judge_.found();
    op.inputs.assign(inputs.begin(), inputs.end());
    op.is_read.assign(inputs.size(), true);
    const c10::FunctionSchema& schema = op.handle.schema();
    if (schema.is_mutable() && schema.arguments().size() == inputs.size()) keep_overwritten(op);
    find_module(op, inputs, node);
    if (sequence >= 0 && node == nullptr) made_by_[sequence] = {op.module, op.reads_module};
  }

  void leave(const OpenOp& op, const OpenNode* node, const std::vector<c10::IValue>& returned) {
    const std::scoped_lock lock(mutex_);
    judge_.take(op, node, tensors_in(OpArguments(returned.data(), returned.size())));
    is_full_ = judge_.is_full();
  }

  /// Copies what the op writes to, as what it reads: by its schema, or because an out argument is
  /// the same tensor.
  void keep_overwritten(OpenOp& op) {
    const c10::FunctionSchema& schema = op.handle.schema();
    std::vector<const c10::StorageImpl*> written;
    const auto memory_of = [](const c10::IValue& value) -> const c10::StorageImpl* {
      const bool has_memory =
          value.isTensor() && is_readable(value.toTensor()) && value.toTensor().has_storage();
      return has_memory ? value.toTensor().storage().unsafeGetStorageImpl() : nullptr;
    };
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) continue;
      written.push_back(memory_of(op.inputs[i]));
      op.is_read[i] = !argument.is_out() && op.name() != "aten::copy_" &&
                      op.name() != "aten::fill_" && op.name() != "aten::zero_";
    }
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      const c10::StorageImpl* const memory = memory_of(op.inputs[i]);
      const bool is_written = std::find(written.begin(), written.end(), memory) != written.end();
      if (memory != nullptr && is_written && op.is_read[i]) {
        op.inputs[i] = judge_.copied(op.inputs[i].toTensor());
      }
    }
  }

  void find_module(OpenOp& op, OpArguments inputs, const OpenNode* node) {
    for_each_tensor(inputs, [&](const at::Tensor& tensor) {
      if (op.reads_module) return;
      const std::string parameter = judge_.parameter_of(tensor);
      if (parameter.empty()) return;
      op.module = layer_name(parameter);
      op.reads_module = true;
    });
    if (!op.reads_module && op.outer != nullptr) {
      op.module = op.outer->module;
      op.reads_module = op.outer->reads_module;
    }
    if (node != nullptr) {
      if (node->module.empty()) return;
      op.module = node->module;
      op.reads_module = node->reads_module;
    } else if (op.reads_module) {
      last_module_ = op.module;
    } else {
      op.module = last_module_;
    }
  }

  std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  std::atomic<bool> saw_backward_ = false;
  std::atomic<bool> is_full_ = false;

  mutable std::mutex mutex_;  // of what follows: devices have threads of their own
  AnomalyJudge judge_;
  // By a node's number: the module of the op that made it, and whether that reads its parameters.
  std::unordered_map<std::int64_t, std::pair<std::string, bool>> made_by_;
  std::string last_module_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
