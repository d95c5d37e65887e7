/// \file
/// What an AnomalyTrace knows of ops and memory, how it judges results, and how it listens.
#pragma once

#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/parameter_names.h>
#include <mezzo/diagnose/detail/value_range.h>
#include <mezzo/diagnose/overflow_report.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

class AnomalyRecorder;

/// An op that has begun and not returned.
struct OpenOp final : at::ObserverContext {
  OpenOp(std::shared_ptr<AnomalyRecorder> watcher, c10::OperatorHandle called)
      : recorder(std::move(watcher)), handle(std::move(called)) {}

  std::shared_ptr<AnomalyRecorder> recorder;
  c10::OperatorHandle handle;
  OpenOp* outer = nullptr;
  std::size_t found_before = 0;          // anomalies, when the op began
  std::vector<c10::IValue> inputs = {};  // as they were, in copies where the op overwrites them
  std::vector<bool> is_read = {};        // not where the op only writes
  std::string module = {};
  bool reads_module = false;

  const std::string& name() const { return handle.schema().name(); }
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

/// Whether the op is a copy, in whose place the ops that it is made of would be named.
inline bool is_copy(const OpenOp& op) {
  return op.name() == "aten::_to_copy" || op.name() == "aten::clone";
}

/// Whether the op casts a number that the program wrote beside a tensor (x * 1e6). Kernels read the
/// number itself, so that a cast of it to inf reaches no result.
inline bool casts_number(const OpenOp& op) {
  return op.name() == "aten::_to_copy" &&
         op.inputs[0].toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

/// Whether the op reads the shape of a tensor and not its values, as ones_like and new_zeros do.
inline bool reads_shape_alone(const OpenOp& op) {
  const std::string_view name = op.name();
  return name.ends_with("_like") || name.starts_with("aten::new_");
}

/// Whether the op computes its result: not a view, uninitialised memory, or the result of an op
/// inside of it.
inline bool computes(const c10::OperatorHandle& op) {
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

/// Whether the op's first output alone is its result. The other outputs are for the backward pass
/// and may hold -inf by design: log_alpha of paths that CTC rules out, logsumexp of masked rows.
inline bool results_in_first(const OpenOp& op) {
  const std::string_view name = op.name();
  constexpr std::array<std::string_view, 5> kOps = {
      "aten::_ctc_loss", "aten::_cudnn_ctc_loss", "aten::_efficient_attention_forward",
      "aten::_flash_attention_forward", "aten::_cudnn_attention_forward"};
  if (std::find(kOps.begin(), kOps.end(), name) != kOps.end()) return true;
  return name.starts_with("aten::_scaled_dot_product_") && !name.ends_with("_backward");
}

/// Returns an eps that the op adds, or clamps to, and that `dtype`, of 16 bits, rounds to 0.
inline std::optional<double> lost_scalar(const OpenOp& op, at::ScalarType dtype) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) return std::nullopt;
  constexpr std::array<std::string_view, 8> kOps = {
      "aten::add",   "aten::add_",   "aten::sub",       "aten::sub_",
      "aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_min_"};
  if (std::find(kOps.begin(), kOps.end(), op.name()) == kOps.end()) return std::nullopt;
  for (const c10::IValue& input : op.inputs) {
    if (input.isDouble() && vanishes(input.toDouble(), dtype)) return input.toDouble();
  }
  return std::nullopt;
}

/// Judges the results of ops and nodes in their order.
///
/// An inf or NaN is noted when an op makes it. The note counts while some memory carries the value
/// and no op has read it and returned finite numbers: 1 / (1 + exp(100)) is 0, and nothing is
/// wrong.
class AnomalyJudge {
 public:
  static constexpr std::size_t kMostTold = 4;
  static constexpr std::size_t kMostCarried = 32;  // then nothing is read any more

  AnomalyJudge(const NamedTensors& parameters, AnomalyTraceOptions options)
      : parameters_(parameters), options_(std::move(options)) {
    note_old_gradients(parameters);
  }

  std::vector<Anomaly> anomalies() const {
    std::vector<Anomaly> told;
    for (const Found& found : found_) {
      if (!found.carriers.empty() && told.size() < kMostTold) told.push_back(found.anomaly);
    }
    return told;
  }
  std::deque<AnomalyFrame> frames() const {
    for (const Found& found : found_) {
      if (!found.carriers.empty()) return found.frames;
    }
    return frames_;
  }
  std::size_t found() const { return found_.size(); }
  bool is_full() const {
    const auto counts = [](const Found& found) { return !found.carriers.empty(); };
    return std::count_if(found_.begin(), found_.end(), counts) >= std::ptrdiff_t{kMostCarried};
  }
  const ParameterNames& parameters() const { return parameters_; }

  /// Returns a copy, and notes of it what is known of the original.
  at::Tensor copied(const at::Tensor& tensor) {
    at::Tensor copy = tensor.clone();
    if (const Memory* const known = memory_.find(tensor)) memory_.note(copy, *known);
    originals_.note(copy, memory_of(tensor));
    parameters_.note_copy(tensor, copy);
    return copy;
  }

  /// Takes what `op` returned, in this node.
  void take(const OpenOp& op, const OpenNode* node, std::vector<at::Tensor> outputs) {
    if (results_in_first(op) && outputs.size() > 1) outputs.resize(1);
    if (is_copy(op) && outputs.size() == 1) {
      parameters_.note_copy(op.inputs[0].toTensor(), outputs[0]);
    }
    if (!computes(op.handle) || !std::any_of(outputs.begin(), outputs.end(), is_readable)) return;
    if (casts_number(op)) return;
    AnomalyFrame frame = frame_of(op, node);
    frame.outputs = value_ranges(outputs);
    const at::ScalarType dtype = frame.outputs[0].dtype;
    if (const auto scalar = lost_scalar(op, dtype)) {
      lost_scalars_.note(outputs[0], {*scalar, dtype});
    }
    ran_in_16_bits_ = ran_in_16_bits_ || dtype == at::kHalf || dtype == at::kBFloat16;
    if (all_finite(frame.outputs)) {
      forgive(op);
      for (const at::Tensor& output : outputs)
        memory_.forget(output);  // gradients set to zero, say
      keep(op, std::move(frame));
    } else {
      judge(op, frame, outputs);
    }
  }

  /// Takes the gradients that came into a node.
  void take(const OpenNode& node, const std::vector<at::Tensor>& gradients) {
    const std::vector<ValueRange> ranges = value_ranges(gradients);
    bool is_new = false;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (ranges[i].is_finite() || is_bad(gradients[i])) continue;
      is_new = true;
    }
    if (!is_new) return;
    AnomalyFrame frame{.op = node.name,
                       .node = node.name,
                       .module = node.module,
                       .reads_module = node.reads_module,
                       .outputs = ranges};
    add({.frame = std::move(frame), .inputs = ranges, .cause = AnomalyCause::arrived}, gradients);
  }

 private:
  enum class Memory : std::uint8_t {
    bad,     // an anomaly, or what it spread to
    masked,  // holds inf that the program asked for
  };
  struct Found {
    Anomaly anomaly;
    std::deque<AnomalyFrame> frames;                       // before it
    std::unordered_set<const c10::StorageImpl*> carriers;  // that no op has made finite
  };

  static AnomalyFrame frame_of(const OpenOp& op, const OpenNode* node) {
    const OpenOp* outermost = &op;
    while (outermost->outer != nullptr) outermost = outermost->outer;
    const std::string& name = op.name();
    const std::string& caller = outermost->name();
    return {.op = name,
            .caller = caller == name ? std::string() : caller,
            .node = node != nullptr ? node->name : std::string(),
            .module = op.module,
            .reads_module = op.reads_module};
  }

  /// Notes gradients that are not finite already: a step before left them in `.grad`.
  void note_old_gradients(const NamedTensors& parameters) {
    std::vector<at::Tensor> gradients;
    for (const auto& [name, parameter] : parameters) gradients.push_back(parameter.grad());
    const std::vector<ValueRange> ranges = value_ranges(gradients);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!ranges[i].is_finite()) memory_.note(gradients[i], Memory::bad);
    }
  }

  /// Keeps the frame, unless the op is a part of one that computes.
  void keep(const OpenOp& op, AnomalyFrame frame) {
    if (options_.frames == 0) return;
    for (const OpenOp* outer = op.outer; outer != nullptr; outer = outer->outer) {
      if (computes(outer->handle)) return;
    }
    if (frames_.size() == options_.frames) frames_.pop_front();
    frames_.push_back(std::move(frame));
  }

  /// Decides whether the inf or NaN began in this op.
  void judge(const OpenOp& op, AnomalyFrame& frame, const std::vector<at::Tensor>& outputs) {
    const std::vector<at::Tensor> read = tensors_read(op);
    const auto bad = [this](const at::Tensor& tensor) { return is_bad(tensor); };
    Anomaly anomaly;
    if (std::any_of(read.begin(), read.end(), bad)) {
      spread(read, outputs, frame.outputs);
      return;
    }
    anomaly.inputs = value_ranges(read);
    for (std::size_t i = 0; i < read.size(); ++i) {
      anomaly.inputs[i].parameter = parameters_.name_of(read[i]);
    }
    if (!is_total(op, read, outputs) && is_asked_for(op, frame.outputs, read, anomaly.inputs)) {
      forgive(op);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (!frame.outputs[i].is_finite()) memory_.note(outputs[i], Memory::masked);
      }
      keep(op, std::move(frame));
      return;
    }
    if (std::any_of(outputs.begin(), outputs.end(), bad)) {  // by an op inside of this one
      spread(outputs, outputs, frame.outputs);
      return;
    }
    if (reads_scratch(op, read, anomaly.inputs)) return;
    add_empty(op, anomaly.inputs);
    anomaly.frame = std::move(frame);
    anomaly.after_low_precision = ran_in_16_bits_;
    for (const at::Tensor& tensor : read) {
      const auto* const lost = lost_scalars_.find(tensor);
      if (lost != nullptr) std::tie(anomaly.lost_scalar, anomaly.lost_in) = *lost;
    }
    if (!arrived(read, anomaly)) find_cause(op, anomaly);
    add(std::move(anomaly), outputs);
  }

  /// The outputs carry what the op read.
  void spread(const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& outputs,
              const std::vector<ValueRange>& ranges) {
    for (Found& found : found_) {
      bool was_read = false;
      for (const at::Tensor& tensor : read)
        was_read = found.carriers.erase(memory_of(tensor)) > 0 || was_read;
      if (was_read) carry(found, outputs, ranges);
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!ranges[i].is_finite()) memory_.note(outputs[i], Memory::bad);
    }
  }

  void carry(Found& found, const std::vector<at::Tensor>& tensors,
             const std::vector<ValueRange>& ranges) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (ranges[i].is_finite()) continue;
      memory_.note(tensors[i], Memory::bad);
      found.carriers.insert(memory_of(tensors[i]));
    }
  }

  /// Forgives what led to a result that is finite, or a mask: the inf and NaN that the op read, and
  /// those that ops inside of it made.
  void forgive(const OpenOp& op) {
    for (std::size_t i = op.found_before; i < found_.size(); ++i) found_[i].carriers.clear();
    if (op.found_before == 0 || reads_shape_alone(op)) return;
    for (const at::Tensor& tensor : tensors_read(op)) {
      if (!is_bad(tensor)) continue;
      for (Found& found : found_) found.carriers.erase(memory_of(tensor));
    }
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

  /// Adds the empty tensors that the program gave the outermost op: their mean is a NaN that an op
  /// inside writes.
  static void add_empty(const OpenOp& op, std::vector<ValueRange>& inputs) {
    const OpenOp* outermost = &op;
    while (outermost->outer != nullptr) outermost = outermost->outer;
    for_each_tensor(
        OpArguments(outermost->inputs.data(), outermost->inputs.size()),
        [&](const at::Tensor& tensor) {
          const bool is_empty = tensor.defined() && tensor.is_floating_point() &&
                                !tensor.is_nested() && tensor.numel() == 0;
          if (!is_empty) return;
          inputs.push_back({.dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
        });
  }

  /// Whether the op read an inf or NaN of memory that the op around it made and has not written
  /// yet, as mean in half copies its result before it is written.
  bool reads_scratch(const OpenOp& op, const std::vector<at::Tensor>& read,
                     const std::vector<ValueRange>& ranges) const {
    const OpenOp* around = nullptr;  // not autocast's own kernel of the same op
    for (const OpenOp* outer = op.outer; outer != nullptr; outer = outer->outer) {
      if (outer->name() != op.name() && computes(outer->handle)) around = outer;
    }
    if (around == nullptr) return false;
    std::vector<const c10::StorageImpl*> given;
    for_each_tensor(OpArguments(around->inputs.data(), around->inputs.size()),
                    [&](const at::Tensor& tensor) { given.push_back(memory_of(tensor)); });
    bool is_scratch = false;
    for (std::size_t i = 0; i < read.size(); ++i) {
      if (ranges[i].is_finite() || memory_.find(read[i]) != nullptr) continue;
      if (std::find(given.begin(), given.end(), memory_of(read[i])) != given.end()) return false;
      is_scratch = true;
    }
    return is_scratch;
  }

  /// The tensor's memory; of what `copied` made, that of the original.
  const c10::StorageImpl* memory_of(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return nullptr;
    const c10::StorageImpl* const* const original = originals_.find(tensor);
    return original != nullptr ? *original : tensor.storage().unsafeGetStorageImpl();
  }

  /// Whether an input was not finite already, other than by what the program asked for.
  bool arrived(const std::vector<at::Tensor>& read, Anomaly& anomaly) {
    for (std::size_t i = 0; i < read.size(); ++i) {
      const bool is_mask = memory_.find(read[i]) != nullptr;  // bad ones do not come here
      if (anomaly.inputs[i].is_finite() || is_mask) continue;
      anomaly.cause = AnomalyCause::arrived;
      memory_.note(read[i], Memory::bad);
    }
    return anomaly.cause == AnomalyCause::arrived;
  }

  /// Whether the op adds many numbers up to one, as a loss does: a mask's inf has no place there.
  static bool is_total(const OpenOp& op, const std::vector<at::Tensor>& read,
                       const std::vector<at::Tensor>& outputs) {
    constexpr std::array<std::string_view, 4> kOps = {
        "aten::sum", "aten::mean", "aten::nll_loss_forward", "aten::nll_loss2d_forward"};
    return std::find(kOps.begin(), kOps.end(), op.name()) != kOps.end() &&
           outputs.front().numel() == 1 && !read.empty() && read.front().numel() > 1;
  }

  /// Whether each inf of the result came as a scalar, or from an inf that did. In memory that no op
  /// wrote, -inf alone is taken for a mask.
  bool is_asked_for(const OpenOp& op, const std::vector<ValueRange>& outputs,
                    const std::vector<at::Tensor>& read,
                    const std::vector<ValueRange>& inputs) const {
    bool asks_for_low = false, asks_for_high = false;
    for (const c10::IValue& input : op.inputs) {
      const double value = input.isDouble() ? input.toDouble() : 0;
      asks_for_low = asks_for_low || (nonfinite_bits(value) && value < 0);
      asks_for_high = asks_for_high || (nonfinite_bits(value) && value > 0);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].is_finite()) continue;
      const bool is_known = memory_.find(read[i]) != nullptr;
      const bool is_high = inputs[i].infs > inputs[i].negative_infs;
      if (inputs[i].nans > 0 || !inputs[i].parameter.empty()) return false;
      if (is_high && !is_known) return false;
      asks_for_low = asks_for_low || is_known || inputs[i].negative_infs > 0;
      asks_for_high = asks_for_high || is_known;
    }
    return std::all_of(outputs.begin(), outputs.end(), [&](const ValueRange& range) {
      const bool is_high = range.infs > range.negative_infs;
      return range.nans == 0 && (!is_high || asks_for_high) &&
             (range.negative_infs == 0 || asks_for_low);
    });
  }

  void find_cause(const OpenOp& op, Anomaly& anomaly) const {
    const auto bad = std::find_if(anomaly.frame.outputs.begin(), anomaly.frame.outputs.end(),
                                  [](const ValueRange& range) { return !range.is_finite(); });
    const at::ScalarType wide = wider_dtype(bad->dtype);
    auto outputs = run_again(op.handle, op.inputs, wide);
    if (!outputs.has_value()) return;
    if (results_in_first(op)) outputs->resize(1);
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
    if (anomaly.loss_scale > 1 && !overflows(largest / anomaly.loss_scale, bad->dtype)) {
      anomaly.cause = AnomalyCause::loss_scale;
    }
  }

  void add(Anomaly anomaly, const std::vector<at::Tensor>& carriers) {
    anomaly.rank = options_.rank;
    const std::vector<ValueRange> ranges = anomaly.frame.outputs;
    found_.push_back({std::move(anomaly), frames_, {}});
    carry(found_.back(), carriers, ranges);
  }

  bool is_bad(const at::Tensor& tensor) const {
    const Memory* const known = memory_.find(tensor);
    return known != nullptr && *known == Memory::bad;
  }

  ParameterNames parameters_;
  AnomalyTraceOptions options_;
  KnownMemory<Memory> memory_;
  KnownMemory<const c10::StorageImpl*> originals_;
  // What an op read that its dtype does not hold, and that dtype.
  KnownMemory<std::pair<double, at::ScalarType>> lost_scalars_;
  std::deque<AnomalyFrame> frames_;
  std::vector<Found> found_;
  bool ran_in_16_bits_ = false;
};

/// What a thread is in the midst of.
struct WatchedThread {
  std::shared_ptr<AnomalyRecorder> recorder = nullptr;
  OpenOp* op = nullptr;
  OpenNode* node = nullptr;
  OpenNode last_node = {};

  /// Returns the node that an op belongs to. Between two nodes autograd itself runs ops: it sums a
  /// gradient to its shape, or adds two.
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
  AnomalyRecorder(const NamedTensors& parameters, AnomalyTraceOptions options)
      : judge_(parameters, std::move(options)) {}

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
    if (auto module = judge_.parameters().module_of(inputs)) {
      op.module = *std::move(module);
      op.reads_module = true;
    } else if (op.outer != nullptr) {
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
