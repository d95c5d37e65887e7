/// \file
/// Listens to the ops and autograd nodes of a step.
#pragma once

#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly_trace.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/value_range.h>
#include <mezzo/diagnose/overflow_report.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Memory and what is known of it. It is not given to other tensors meanwhile.
template <class Fact>
class KnownMemory {
 public:
  void note(const at::Tensor& tensor, Fact fact) {
    if (!tensor.has_storage()) return;
    known_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(),
                            std::pair(tensor.storage().getWeakStorageImpl(), std::move(fact)));
  }
  const Fact* find(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return nullptr;
    const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
    return found == known_.end() ? nullptr : &found->second.second;
  }

 private:
  std::unordered_map<const c10::StorageImpl*,
                     std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, Fact>>
      known_;
};

/// An op that has begun and not returned.
struct OpenOp final : at::ObserverContext {
  OpenOp(std::shared_ptr<AnomalyRecorder> watcher, c10::OperatorHandle called)
      : recorder(std::move(watcher)), handle(std::move(called)) {}

  std::shared_ptr<AnomalyRecorder> recorder;
  c10::OperatorHandle handle;
  OpenOp* outer = nullptr;
  std::vector<c10::IValue> inputs = {};  // as they were, in copies where the op overwrites them
  std::vector<bool> is_read = {};        // not where the op only writes
  std::string module = {};
  bool reads_module = false;
};

/// An autograd node that runs, on this thread.
struct OpenNode final : at::ObserverContext {
  std::shared_ptr<AnomalyRecorder> outer_recorder = nullptr;
  OpenNode* outer_node = nullptr;
  OpenOp* outer_op = nullptr;
  std::string name = {};
  std::string module = {};
  bool reads_module = false;
};

/// What a thread is in the midst of.
struct WatchedThread {
  std::shared_ptr<AnomalyRecorder> recorder = nullptr;
  OpenOp* op = nullptr;
  OpenNode* node = nullptr;
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
      : parameters_(name_parameters(model)), options_(std::move(options)) {}

  void start() {
    WatchedThread& thread = watched_thread();
    TORCH_CHECK(thread.recorder == nullptr,
                "AnomalyTrace: this thread has one already; end that first");
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
    return anomalies_;
  }
  std::vector<AnomalyFrame> frames() const {
    const std::scoped_lock lock(mutex_);
    return {frames_.begin(), frames_.end()};
  }
  bool saw_backward() const { return saw_backward_; }

 private:
  enum class Memory : std::uint8_t {
    bad,     // an anomaly, or what it spread to
    masked,  // holds -inf that the program asked for
  };

  static constexpr std::size_t kMostAnomalies = 4;

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
      op->recorder->leave(*op, function.outputs());
    } else if (auto* const node = dynamic_cast<OpenNode*>(context)) {
      thread.recorder = node->outer_recorder;
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
    if (thread.recorder == nullptr) thread.recorder = recorder_of(function.forwardThreadId());
    thread.node = node.get();
    thread.op = nullptr;
    if (thread.recorder != nullptr) {
      const Unwatched unwatched;
      thread.recorder->enter_node(*node, function);
    }
    return node;
  }

  static std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& function) {
    WatchedThread& thread = watched_thread();
    if (thread.recorder == nullptr || thread.recorder->is_full_) return nullptr;
    const auto name = function.operator_name();
    if (!name.has_value() || (thread.op != nullptr && is_one(*thread.op))) return nullptr;
    const auto handle = c10::Dispatcher::singleton().findSchema(*name);
    if (!handle.has_value()) return nullptr;
    auto op = std::make_unique<OpenOp>(thread.recorder, *handle);
    op->outer = thread.op;
    const Unwatched unwatched;
    op->recorder->enter(*op, recorded_inputs(function), function.seqNr(), thread.node);
    thread.op = op.get();
    return op;
  }

  /// Copies: what they are made of would be named in their place.
  static bool is_one(const OpenOp& op) {
    const std::string& name = op.handle.schema().name();
    return name == "aten::_to_copy" || name == "aten::clone";
  }

  /// Ops whose result is somebody else's: a view, uninitialised memory, or that of ops inside.
  static bool computes(const c10::OperatorHandle& op) {
    const c10::FunctionSchema& schema = op.schema();
    const std::string_view name = schema.name();
    for (const std::string_view other : {"aten::empty", "aten::new_empty", "aten::resize",
                                         "aten::set_", "aten::_efficientzerotensor"}) {
      if (name.starts_with(other)) return false;
    }
    if (op.hasTag(at::Tag::inplace_view)) return false;
    const auto& returns = schema.returns();
    if (!schema.is_mutable() && !returns.empty() && returns[0].alias_info() != nullptr) {
      return false;
    }
    return !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  }

  void enter_node(OpenNode& node, const at::RecordFunction& function) {
    saw_backward_ = true;
    const std::scoped_lock lock(mutex_);
    const auto made = made_by_.find(function.seqNr());
    if (made != made_by_.end()) std::tie(node.module, node.reads_module) = made->second;
    if (is_full_) return;
    const std::vector<at::Tensor> gradients = tensors_in(recorded_inputs(function));
    const std::vector<ValueRange> ranges = value_ranges(gradients);
    bool is_new = false;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (ranges[i].is_finite() || is_bad(gradients[i])) continue;
      is_new = true;
      memory_.note(gradients[i], Memory::bad);
    }
    if (!is_new) return;
    AnomalyFrame frame{.op = node.name,
                       .node = node.name,
                       .module = node.module,
                       .reads_module = node.reads_module,
                       .outputs = ranges};
    add({.frame = std::move(frame), .inputs = ranges, .cause = AnomalyCause::arrived});
  }

  void enter(OpenOp& op, OpArguments inputs, std::int64_t sequence, const OpenNode* node) {
    const std::scoped_lock lock(mutex_);
    op.inputs.assign(inputs.begin(), inputs.end());
    op.is_read.assign(inputs.size(), true);
    if (op.handle.schema().is_mutable()) keep_overwritten(op);
    find_module(op, inputs, node);
    if (sequence >= 0 && node == nullptr) made_by_[sequence] = {op.module, op.reads_module};
  }

  /// Copies what the op writes to, as what it reads: by its schema, or because an out argument is
  /// the same tensor.
  void keep_overwritten(OpenOp& op) {
    const c10::FunctionSchema& schema = op.handle.schema();
    const std::string_view name = schema.name();
    std::vector<const c10::StorageImpl*> written;
    const auto memory_of = [](const c10::IValue& value) -> const c10::StorageImpl* {
      const bool has_memory = value.isTensor() && is_readable(value.toTensor()) &&
                              value.toTensor().has_storage();
      return has_memory ? value.toTensor().storage().unsafeGetStorageImpl() : nullptr;
    };
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) continue;
      written.push_back(memory_of(op.inputs[i]));
      op.is_read[i] = !argument.is_out() && name != "aten::copy_" && name != "aten::fill_";
    }
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      const c10::StorageImpl* const memory = memory_of(op.inputs[i]);
      const bool is_written = std::find(written.begin(), written.end(), memory) != written.end();
      if (memory != nullptr && is_written && op.is_read[i]) {
        op.inputs[i] = copied(op.inputs[i].toTensor());
      }
    }
  }

  /// With what is known of the original.
  at::Tensor copied(const at::Tensor& tensor) {
    at::Tensor copy = tensor.clone();
    if (const Memory* const known = memory_.find(tensor)) memory_.note(copy, *known);
    const std::string parameter = parameter_of(tensor);
    if (!parameter.empty()) copies_.note(copy, parameter);
    return copy;
  }

  void find_module(OpenOp& op, OpArguments inputs, const OpenNode* node) {
    for_each_tensor(inputs, [&](const at::Tensor& tensor) {
      if (op.reads_module) return;
      const std::string parameter = parameter_of(tensor);
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

  void leave(const OpenOp& op, const std::vector<c10::IValue>& returned) {
    const std::scoped_lock lock(mutex_);
    note_copy(op, returned);
    if (!computes(op.handle)) return;
    const std::vector<at::Tensor> outputs = tensors_in(OpArguments(returned.data(), returned.size()));
    AnomalyFrame frame = frame_of(op);
    frame.outputs = value_ranges(outputs);
    const bool has_values = std::any_of(outputs.begin(), outputs.end(), is_readable);
    if (!has_values) return;
    if (!all_finite(frame.outputs)) {
      judge(op, frame, outputs);
      return;
    }
    keep(std::move(frame));
  }

  AnomalyFrame frame_of(const OpenOp& op) const {
    const OpenOp* outermost = &op;
    while (outermost->outer != nullptr) outermost = outermost->outer;
    const std::string& name = op.handle.schema().name();
    const std::string& caller = outermost->handle.schema().name();
    const OpenNode* const node = watched_thread().node;
    return {.op = name,
            .caller = caller == name ? std::string() : caller,
            .node = node != nullptr ? node->name : std::string(),
            .module = op.module,
            .reads_module = op.reads_module};
  }

  void keep(AnomalyFrame frame) {
    if (!anomalies_.empty() || options_.frames == 0) return;
    if (frames_.size() == options_.frames) frames_.pop_front();
    frames_.push_back(std::move(frame));
  }

  /// Whether what is not finite began here.
  void judge(const OpenOp& op, AnomalyFrame& frame, const std::vector<at::Tensor>& outputs) {
    const std::vector<at::Tensor> read = tensors_read(op);
    const auto bad = [this](const at::Tensor& tensor) { return is_bad(tensor); };
    Anomaly anomaly;
    auto memory = Memory::bad;
    const bool spreads = std::any_of(read.begin(), read.end(), bad) ||
                         std::any_of(outputs.begin(), outputs.end(), bad);
    if (!spreads) {
      anomaly.inputs = value_ranges(read);
      for (std::size_t i = 0; i < read.size(); ++i) {
        anomaly.inputs[i].parameter = parameter_of(read[i]);
      }
      if (is_asked_for(op, frame.outputs, anomaly.inputs)) memory = Memory::masked;
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!frame.outputs[i].is_finite()) memory_.note(outputs[i], memory);
    }
    if (spreads) return;
    if (memory == Memory::masked) {
      keep(std::move(frame));
      return;
    }
    anomaly.frame = std::move(frame);
    if (!arrived(read, anomaly)) find_cause(op, anomaly);
    add(std::move(anomaly));
  }

  static std::vector<at::Tensor> tensors_read(const OpenOp& op) {
    std::vector<at::Tensor> read;
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      if (!op.is_read[i]) continue;
      for_each_tensor(OpArguments(&op.inputs[i], 1), [&](const at::Tensor& tensor) {
        if (is_readable(tensor)) read.push_back(tensor);
      });
    }
    return read;
  }

  /// Whether an input was not finite already, other than by a mask.
  bool arrived(const std::vector<at::Tensor>& read, Anomaly& anomaly) {
    for (std::size_t i = 0; i < read.size(); ++i) {
      const bool is_mask = memory_.find(read[i]) != nullptr;  // bad ones do not come here
      if (anomaly.inputs[i].is_finite() || is_mask) continue;
      anomaly.cause = AnomalyCause::arrived;
      memory_.note(read[i], Memory::bad);
    }
    return anomaly.cause == AnomalyCause::arrived;
  }

  /// Whether there is nothing but -inf, which came as a scalar or is carried on.
  static bool is_asked_for(const OpenOp& op, const std::vector<ValueRange>& outputs,
                           const std::vector<ValueRange>& inputs) {
    const auto is_mask = [](const ValueRange& range) {
      return range.nans == 0 && range.infs == range.negative_infs;
    };
    if (!std::all_of(outputs.begin(), outputs.end(), is_mask)) return false;
    bool is_told = false;
    for (const c10::IValue& input : op.inputs) {
      const double value = input.isDouble() ? input.toDouble() : 0;
      is_told = is_told || (nonfinite_bits(value) && value < 0);
    }
    for (const ValueRange& input : inputs) {
      if (!is_mask(input) || (!input.is_finite() && !input.parameter.empty())) return false;
      is_told = is_told || !input.is_finite();
    }
    return is_told;
  }

  void find_cause(const OpenOp& op, Anomaly& anomaly) const {
    const auto bad = std::find_if(anomaly.frame.outputs.begin(), anomaly.frame.outputs.end(),
                                  [](const ValueRange& range) { return !range.is_finite(); });
    const at::ScalarType wide = wider_dtype(bad->dtype);
    auto outputs = run_again(op.handle, op.inputs, wide);
    if (!outputs.has_value()) return;
    anomaly.wide_dtype = wide;
    anomaly.wide_outputs = std::move(*outputs);
    if (!all_finite(anomaly.wide_outputs)) {
      anomaly.cause = AnomalyCause::model;
      return;
    }
    anomaly.cause = AnomalyCause::low_precision;
    if (!anomaly.frame.is_backward() || options_.loss_scale == nullptr) return;
    anomaly.loss_scale = options_.loss_scale();
    double largest = 0;
    for (const ValueRange& range : anomaly.wide_outputs) largest = std::max(largest, range.largest);
    if (anomaly.loss_scale > 1 && largest / anomaly.loss_scale <= largest_of(bad->dtype)) {
      anomaly.cause = AnomalyCause::loss_scale;
    }
  }

  void add(Anomaly anomaly) {
    anomaly.rank = options_.rank;
    anomalies_.push_back(std::move(anomaly));
    is_full_ = anomalies_.size() == kMostAnomalies;
  }

  bool is_bad(const at::Tensor& tensor) const {
    const Memory* const known = memory_.find(tensor);
    return known != nullptr && *known == Memory::bad;
  }

  /// The name of the parameter that the tensor is, is a view of, or is a cast copy of.
  std::string parameter_of(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return {};
    if (const std::string* const copied = copies_.find(tensor)) return *copied;
    const c10::StorageImpl* const memory = tensor.storage().unsafeGetStorageImpl();
    for (const auto& [name, parameter] : parameters_) {
      if (!parameter.has_storage()) continue;
      if (parameter.storage().unsafeGetStorageImpl() != memory) continue;
      const std::int64_t offset = tensor.storage_offset() - parameter.storage_offset();
      if (offset >= 0 && offset < std::max<std::int64_t>(parameter.numel(), 1)) return name;
    }
    return {};
  }

  void note_copy(const OpenOp& op, const std::vector<c10::IValue>& returned) {
    if (!is_one(op) || returned.size() != 1 || !returned[0].isTensor()) return;
    const std::string parameter = parameter_of(op.inputs[0].toTensor());
    if (!parameter.empty()) copies_.note(returned[0].toTensor(), parameter);
  }

  NamedParameters parameters_;
  AnomalyTraceOptions options_;
  std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  std::atomic<bool> saw_backward_ = false;
  std::atomic<bool> is_full_ = false;

  mutable std::mutex mutex_;  // of what follows: devices have threads of their own
  KnownMemory<Memory> memory_;
  KnownMemory<std::string> copies_;
  // By a node's number: the module of the op that made it, and whether that reads its parameters.
  std::unordered_map<std::int64_t, std::pair<std::string, bool>> made_by_;
  std::string last_module_;
  std::deque<AnomalyFrame> frames_;
  std::vector<Anomaly> anomalies_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
