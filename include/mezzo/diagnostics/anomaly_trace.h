/// \file
/// AnomalyTrace and TraceOnSkips: where did the inf or NaN begin? Before them OpObserver, which
/// listens to ops, names their modules, and follows them into backward passes.
#pragma once

#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/rng_state.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/tensor_summary.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// An op, and where it ran.
struct OpLocation {
  std::string op = {};  ///< "aten::linear", as the program or an autograd node called it
  /// The autograd node in whose backward pass the op ran: "AddmmBackward0"; empty in the forward
  /// pass.
  std::string node = {};
  /// The name, in the model, of the module whose parameters the op reads, which are known by their
  /// memory, since modules of C++ have no hooks. An op that reads none has the module of the op
  /// before it; an op of the backward pass has that of the forward op that made its node. Empty
  /// until a parameter has been read.
  std::string module = {};
  bool reads_parameter = false;  ///< whether the op itself reads a parameter of `module`

  /// Returns whether the op ran in a backward pass.
  bool is_backward() const { return !node.empty(); }
  /// Returns "aten::linear, in encoder.fc" or "aten::mm of AddmmBackward0, in encoder.fc".
  std::string to_string() const {
    return op + (is_backward() && node != op ? " of " + node : "") +
           (module.empty() ? "" : (reads_parameter ? ", in " : ", after ") + module);
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
  explicit Names(TensorsByName tensors) : tensors_(std::move(tensors)) {}

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
  TensorsByName tensors_;
};

/// An op that has begun, as one observer sees it.
struct ObservedOp : OpLocation {
  c10::OperatorHandle handle;
  std::vector<c10::IValue> inputs;
  int depth = 0;                                ///< how many ops are under way around it
  bool threw = false;                           ///< once it has ended
  int exceptions = std::uncaught_exceptions();  ///< under way when it began
};

/// What observers do to ops of their own: nobody hears them, and autocast leaves them alone.
class SuspendObserversGuard {
 private:
  at::DisableRecordFunctionGuard no_callbacks_;
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

/// Hears the ops of the thread that made it, from `start` to `stop`, and those of backward passes
/// over graphs that this thread made, on whatever thread autograd runs them. A static observer may
/// end after its thread, and a backward pass of another thread may outlive an observer, which then
/// hears no more.
class OpObserver {
 public:
  OpObserver(const OpObserver&) = delete;
  OpObserver& operator=(const OpObserver&) = delete;

  /// Returns whether a backward pass has run a node since `start`.
  bool has_run_backward() const { return link_->has_run_backward; }

 protected:
  explicit OpObserver(TensorsByName names) : names_(std::move(names)) {}
  virtual ~OpObserver() = default;  // after stop(), which the destructor of a final class calls

  /// Called before an op and after it, one op at a time. Ops of their own run under
  /// SuspendObserversGuard.
  virtual void on_op_begin(ObservedOp& op) = 0;
  virtual void on_op_end(const ObservedOp& op, OpArguments returned) = 0;

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
    std::atomic<bool> has_run_backward = false;
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
    for (const auto& link : listeners(/*is_backward=*/true)) link->has_run_backward = true;
    return context;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    auto* const begun = dynamic_cast<Context*>(context);
    if (begun == nullptr) return;
    running().depth = begun->depth;
    if (begun->ops.empty()) return;
    const std::vector<c10::IValue>& stack = function.outputs();
    for (auto& [link, op] : begun->ops) {
      op.threw = std::uncaught_exceptions() > op.exceptions;
      // TorchScript's interpreter shows its whole stack, whose last values the op returned.
      const std::size_t count = std::min(stack.size(), op.handle.schema().returns().size());
      const std::scoped_lock lock(link->mutex);
      if (link->observer == nullptr) continue;
      link->observer->on_op_end(op, OpArguments(stack.data() + (stack.size() - count), count));
    }
  }

  void enter(ObservedOp& op, std::int64_t sequence, const Running& backward) {
    if (backward.node != nullptr) op.node = *backward.node;
    const bool is_forward = op.node.empty();
    if (auto module = names_.module_of(arguments_in(op.inputs))) {
      op.module = *std::move(module);
      op.reads_parameter = true;
    } else if (const auto made = made_by_.find(backward.sequence); made != made_by_.end()) {
      std::tie(op.module, op.reads_parameter) = made->second;
    } else if (op.depth > 0) {
      std::tie(op.module, op.reads_parameter) = around_;
    } else if (is_forward) {
      op.module = last_module_;
    }
    if (op.depth == 0) around_ = {op.module, op.reads_parameter};
    if (is_forward && op.reads_parameter) last_module_ = op.module;
    if (made_by_.size() > (std::size_t{1} << 20)) made_by_.clear();  // of graphs long gone
    if (is_forward && sequence >= 0) made_by_[sequence] = {op.module, op.reads_parameter};
    on_op_begin(op);
  }

  Names names_;
  const std::shared_ptr<Link> link_ = std::make_shared<Link>();
  std::pair<std::string, bool> around_;  // of the op that the program called
  std::string last_module_;
  // By a node's number: the module of the op that made it, and whether that reads its parameters.
  std::unordered_map<std::int64_t, std::pair<std::string, bool>> made_by_;
};

/// Whether the op computed its results: they are no view of what it read, and no uninitialised
/// memory.
inline bool computed(const ObservedOp& op, const std::vector<at::Tensor>& outputs) {
  const c10::FunctionSchema& schema = op.handle.schema();
  const std::string_view name = schema.name();
  for (const std::string_view other : {"aten::empty", "aten::new_empty", "aten::resize",
                                       "aten::set_", "aten::_efficientzerotensor"}) {
    if (name.starts_with(other)) return false;
  }
  if (outputs.empty() || op.handle.hasTag(at::Tag::inplace_view)) return false;
  const auto& returns = schema.returns();
  if (schema.is_mutable() || returns.empty() || returns[0].alias_info() == nullptr) return true;
  const std::vector<at::Tensor> read = tensors_in(arguments_in(op.inputs));
  return std::none_of(read.begin(), read.end(), [&](const at::Tensor& tensor) {
    return storage_of(tensor) == storage_of(outputs[0]);
  });
}

/// Returns why the inputs of a division or of a unary op are outside its domain; empty if they are
/// not, and for ops that it does not know.
inline std::string domain_error(std::string_view op, const std::vector<TensorSummary>& inputs) {
  if (inputs.empty() || !op.starts_with("aten::")) return {};
  op.remove_prefix(6);
  if (op.ends_with("_")) op.remove_suffix(1);
  const auto is_one_of = [op](const auto&... names) { return ((op == names) || ...); };
  const bool divides = is_one_of("div", "divide", "true_divide");
  if (divides && inputs.size() < 2) return {};  // the divisor is a number
  const TensorSummary& input = divides ? inputs[1] : inputs[0];
  const bool has_zero = input.min_abs == 0, has_negative = input.min < 0;
  const bool is_log = is_one_of("log", "log2", "log10"), is_root = is_one_of("sqrt", "rsqrt");
  if (has_negative && (is_log || is_root)) {
    return "it took the " + std::string(is_log ? "logarithm" : "root") + " of a negative number, " +
           format_significant(input.min);
  }
  if (has_zero && is_log) return "it took the logarithm of 0";
  if (has_zero && (divides || is_one_of("reciprocal", "rsqrt"))) return "it divided by 0";
  if (input.min <= -1 && op == "log1p") return "it took log1p of " + format_significant(input.min);
  if (input.max_abs > 1 && is_one_of("acos", "asin")) {
    return "it took " + std::string(op) + " of a number beyond 1, " +
           format_significant(input.max_abs);
  }
  return {};
}

/// Returns an argument with its tensors copied in `wide`; an argument that is a dtype becomes it.
inline c10::IValue widened(const c10::IValue& value, const c10::Argument& argument,
                           at::ScalarType wide) {
  const bool is_dtype = value.isInt() && argument.real_type()->str().starts_with("ScalarType");
  if (is_dtype && c10::isFloatingType(value.toScalarType())) return static_cast<int64_t>(wide);
  return map_ivalue(value, [wide](const at::Tensor& tensor) {
    const bool widens = tensor.defined() && tensor.is_floating_point();
    return widens ? tensor.detach().to(wide, /*non_blocking=*/false, /*copy=*/true) : tensor;
  });
}

/// Returns the summaries of the op's results when it runs in `wide`; none where that cannot be
/// tried. The program's random generators stay as they were.
inline std::optional<std::vector<TensorSummary>> run_again(const ObservedOp& op,
                                                           at::ScalarType wide) {
  const c10::FunctionSchema& schema = op.handle.schema();
  const bool is_libtorchs = schema.name().starts_with("aten::");  // not a collective, say
  if (!is_libtorchs || schema.arguments().size() != op.inputs.size()) return std::nullopt;
  const RngState random;
  std::optional<std::vector<TensorSummary>> summaries;
  try {
    torch::jit::Stack stack;
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      stack.push_back(widened(op.inputs[i], schema.arguments()[i], wide));
    }
    op.handle.callBoxed(&stack);
    const std::vector<at::Tensor> results = tensors_in(OpArguments(stack.data(), stack.size()));
    if (!results.empty()) summaries = summarize(results);
  } catch (const std::exception&) {  // an op that knows only the narrow type, say
  }
  random.restore();
  return summaries;
}

}  // namespace detail

/// One op that ran.
struct AnomalyFrame : OpLocation {
  std::vector<TensorSummary> outputs = {};  ///< of what it returned
};

/// An op whose result has an inf or NaN that was not in what it read.
struct Anomaly {
  AnomalyFrame frame = {};                 ///< the op, and what it returned
  std::vector<TensorSummary> inputs = {};  ///< before the op ran
  /// Whether an input was inf or NaN, and no op that was watched made it: a parameter, the batch, a
  /// constant.
  bool from_input = false;
  std::string cause = {};                  ///< the cause in a sentence, with what to do
  std::optional<int> rank = std::nullopt;  ///< of AnomalyTraceOptions
  std::vector<AnomalyFrame> frames = {};   ///< the last ops before it, the earliest first

  /// Returns all of this as one line.
  std::string message() const {
    return (rank ? "rank " + std::to_string(*rank) + ", " : "") +
           (frame.is_backward() ? "backward pass: " : "forward pass: ") + frame.to_string() +
           (from_input ? " passed on " : " made ") + detail::format_summaries(frame.outputs) +
           ". It read " + detail::format_summaries(inputs) + ". " + cause;
  }
};

/// What a trace records.
struct AnomalyTraceOptions {
  std::size_t max_frames = 20;  ///< how many ops before the first anomaly are kept
  /// Asked when a backward pass makes an inf or NaN: `[&] { return scaler.get_scale(); }`. Without
  /// it the loss scale is never named as a cause.
  std::function<double()> loss_scale = {};
  std::optional<int> rank = std::nullopt;  ///< of this process in a job of several: it is named
};

/// Checks what each op that the creating thread calls returns, and each op of the backward passes
/// that it calls, for inf and NaN, while it exists. Names the op that made the first, with the
/// ranges of what it read, its module and its autograd node; says whether a wider type would have
/// held the result, and whether the loss scale alone is to blame.
///
///     mezzo::AnomalyTrace trace(*model, {.loss_scale = [&] { return scaler.get_scale(); }});
///     scaler.scale(criterion(model->forward(x), y)).backward();
///     std::cerr << trace;
///
/// A -inf that the program gives by a scalar or an unnamed tensor (the mask of attention), and an
/// inf by a scalar (the start of a running minimum), are no anomaly, unless one number of many
/// becomes inf; nor is what later ops make finite again.
///
/// A debugging tool: a read of every result, on a device a host sync an op, and a copy of what an
/// op overwrites. Not for a thread that captures a CUDA graph. Results, gradients and random
/// numbers stay what they were. Nothing is installed before and after: then it costs nothing.
/// Several may exist at once.
///
/// The trace sees ops that go through libtorch's dispatcher, as the program calls them and not what
/// they are made of. What a kernel of another library or a collective writes shows when the next op
/// reads it, as `arrived`. Ask it, and destroy it, in the thread that made it.
class AnomalyTrace final : private detail::OpObserver {
 public:
  /// Keeps the parameters, not the model.
  explicit AnomalyTrace(const torch::nn::Module& model, AnomalyTraceOptions options = {})
      : AnomalyTrace(named_float_parameters(model), std::move(options)) {}
  /// Names the modules of these parameters.
  explicit AnomalyTrace(const TensorsByName& parameters, AnomalyTraceOptions options = {})
      : OpObserver(parameters), options_(std::move(options)) {
    std::vector<at::Tensor> gradients;  // a step before may have left inf in them
    for (const auto& [name, parameter] : parameters) gradients.push_back(parameter.grad());
    taint_outputs(gradients, summarize(gradients), {kBeforeTrace});
    start();
  }
  ~AnomalyTrace() override { stop(); }

  /// Returns the first four anomalies so far, in their order. Results that read a bad one are not
  /// listed again. An anomaly goes from the list when every result that carries it was read by ops
  /// whose results are finite.
  std::vector<Anomaly> anomalies() const {
    const auto locked = lock();
    std::vector<Anomaly> told;
    for (std::size_t i = 0; i < found_.size() && told.size() < 4; ++i) {
      if (is_active(i)) told.push_back(found_[i]);
    }
    return told;
  }

  /// Returns the last ops but views before the first anomaly, or so far; the earliest first.
  std::vector<AnomalyFrame> frames() const {
    const std::vector<Anomaly> told = anomalies();
    const auto locked = lock();
    return told.empty() ? std::vector(frames_.begin(), frames_.end()) : told.front().frames;
  }

  /// Returns whether a backward pass has run a node since this object was made.
  using OpObserver::has_run_backward;

 private:
  using Origins = std::set<std::size_t>;  // numbers in found_, or kBeforeTrace
  /// Which anomalies the inf or NaN in a tensor's memory came from. Once an op has read them, its
  /// results carry the anomaly, if they are not finite: 1 / (1 + exp(100)) is 0, and nothing is
  /// wrong.
  struct Taint {
    Origins origins;
    std::shared_ptr<bool> was_read;
    c10::weak_intrusive_ptr<c10::StorageImpl> held;  // so that no other memory gets its address
  };

  static constexpr auto kBeforeTrace =
      std::numeric_limits<std::size_t>::max();  // from before the trace

  bool is_active(std::size_t anomaly) const {
    return std::any_of(taints_.begin(), taints_.end(), [&](const auto& of) {
      return of.second.origins.contains(anomaly) && !*of.second.was_read;
    });
  }
  const Taint* find_taint(const at::Tensor& tensor) const {
    const auto found = taints_.find(detail::storage_of(tensor));
    return found == taints_.end() ? nullptr : &found->second;
  }
  void set_taint(const at::Tensor& tensor, Origins origins, std::shared_ptr<bool> was_read) {
    if (detail::storage_of(tensor) == nullptr) return;
    taints_.insert_or_assign(
        detail::storage_of(tensor),
        Taint{std::move(origins), std::move(was_read), tensor.storage().getWeakStorageImpl()});
  }
  /// Notes where the inf and NaN of an op's results come from.
  void taint_outputs(const std::vector<at::Tensor>& outputs,
                     const std::vector<TensorSummary>& summaries, const Origins& origins) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!summaries[i].is_finite()) set_taint(outputs[i], origins, std::make_shared<bool>(false));
    }
  }

  /// Marks non-finite results of the op's inner ops with the same origins: a backward pass may read
  /// them. They count as read, since the op's own result carries the anomaly.
  void taint_inner_results(const Origins& origins) {
    for (const auto& weak : inner_) {
      const at::Tensor inner(weak.lock());
      if (!detail::is_readable(inner) || find_taint(inner) != nullptr) continue;
      if (!summarize({inner}).front().is_finite()) {
        set_taint(inner, origins, std::make_shared<bool>(true));
      }
    }
  }

  /// Replaces what the op is going to overwrite by copies, and drops arguments that it only writes.
  void on_op_begin(detail::ObservedOp& op) override {
    const detail::SuspendObserversGuard unobserved;
    const auto& arguments = op.handle.schema().arguments();
    if (op.depth > 0) return;
    inner_.clear();
    if (arguments.size() != op.inputs.size()) return;
    std::vector<const c10::StorageImpl*> written;
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      const auto* const alias = arguments[i].alias_info();
      if (alias == nullptr || !alias->isWrite() || !op.inputs[i].isTensor()) continue;
      written.push_back(detail::storage_of(op.inputs[i].toTensor()));
      if (arguments[i].is_out() || op.op == "aten::copy_" || op.op == "aten::fill_" ||
          op.op == "aten::zero_") {
        op.inputs[i] = at::Tensor();
      }
    }
    if (written.empty()) return;
    for (c10::IValue& input : op.inputs) {
      if (!input.isTensor() || !detail::is_readable(input.toTensor())) continue;
      const at::Tensor tensor = input.toTensor();
      const auto* const memory = detail::storage_of(tensor);
      if (std::find(written.begin(), written.end(), memory) == written.end()) continue;
      input = tensor.clone();
      if (const Taint* const taint = find_taint(tensor)) {
        set_taint(input.toTensor(), taint->origins, taint->was_read);
      }
    }
  }

  /// Takes what an op returned that the program, or an autograd node, called.
  void on_op_end(const detail::ObservedOp& op, detail::OpArguments returned) override {
    const detail::SuspendObserversGuard unobserved;
    const std::vector<at::Tensor> outputs = detail::tensors_in(returned);
    if (!detail::computed(op, outputs)) return;
    if (op.depth > 0) {  // autograd may save the result for the backward pass
      for (const at::Tensor& output : outputs) {
        if (output.defined()) inner_.emplace_back(output.getIntrusivePtr());
      }
      return;
    }
    if (!std::any_of(outputs.begin(), outputs.end(), detail::is_readable)) return;
    AnomalyFrame frame{op, summarize(outputs)};
    for (const TensorSummary& output : frame.outputs) {
      ran_in_low_precision_ |= output.dtype == at::kHalf || output.dtype == at::kBFloat16;
    }
    std::vector<at::Tensor> read = detail::tensors_in(detail::arguments_in(op.inputs));
    const bool reads_values = !frame.op.ends_with("_like") && !frame.op.starts_with("aten::new_");
    std::erase_if(read, [&](const at::Tensor& tensor) {
      return !reads_values || !detail::is_readable(tensor);
    });
    Origins origins;
    for (const at::Tensor& tensor : read) {
      const Taint* const taint = find_taint(tensor);
      if (taint == nullptr || summarize({tensor}).front().is_finite()) continue;
      *taint->was_read = true;
      origins.insert(taint->origins.begin(), taint->origins.end());
    }
    if (!detail::all_finite(frame.outputs)) {
      if (!origins.empty()) {
        taint_outputs(outputs, frame.outputs, origins);
        return taint_inner_results(origins);
      }
      if (check_op(op, frame, read, outputs)) return;
    }
    frames_.push_back(std::move(frame));
    if (frames_.size() > options_.max_frames) frames_.pop_front();
  }

  /// Returns whether an inf or NaN began in this op, or arrived there, and notes it.
  bool check_op(const detail::ObservedOp& op, const AnomalyFrame& frame,
                const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& outputs) {
    Anomaly anomaly{.frame = frame, .inputs = summarize(read), .rank = options_.rank};
    std::string bad_parameter;
    bool arrives = false, asks_low = false, asks_high = false;  // for -inf, and for inf
    for (const c10::IValue& input : op.inputs) {
      const double value = input.isDouble() ? input.toDouble() : 0;
      if (detail::is_nonfinite(value)) (value < 0 ? asks_low : asks_high) = true;
    }
    for (std::size_t i = 0; i < read.size(); ++i) {
      TensorSummary& input = anomaly.inputs[i];
      input.name = names().name_of(read[i]);
      if (input.is_finite()) continue;
      const bool is_mask =
          input.nans == 0 && input.infs == input.negative_infs && input.name.empty();
      (is_mask ? asks_low : arrives) = true;
      if (bad_parameter.empty()) bad_parameter = input.name;
    }
    // One number of many, as a loss is, has no place for a mask's inf.
    const bool is_total = outputs.front().defined() && outputs.front().dim() == 0 &&
                          !read.empty() && read.front().numel() > 1;
    const bool is_asked =
        std::all_of(frame.outputs.begin(), frame.outputs.end(), [&](const TensorSummary& output) {
          return output.nans == 0 && (output.negative_infs == 0 || asks_low) &&
                 (output.infs == output.negative_infs || asks_high);
        });
    if (is_asked && !arrives && !is_total) return false;
    if (arrives) {
      anomaly.from_input = true;
      anomaly.cause =
          bad_parameter.empty()
              ? "An input is not finite, and no result that was watched is its source: look at the "
                "batch, at constants and buffers, and at what was computed before the trace"
              : "The parameter " + bad_parameter +
                    " is not finite: no step repairs it, load a checkpoint from before";
    } else {
      find_cause(op, anomaly);
    }
    taint_outputs(outputs, frame.outputs, {found_.size()});
    taint_inner_results({found_.size()});
    for (std::size_t i = 0; arrives && i < read.size(); ++i) {  // a later reader is not the first
      if (anomaly.inputs[i].is_finite()) continue;
      set_taint(read[i], {found_.size()}, std::make_shared<bool>(true));
    }
    anomaly.frames = {frames_.begin(), frames_.end()};
    found_.push_back(std::move(anomaly));
    return true;
  }

  /// Runs the op again in a wider type.
  void find_cause(const detail::ObservedOp& op, Anomaly& anomaly) const {
    using detail::format_significant;
    const auto bad = std::find_if(anomaly.frame.outputs.begin(), anomaly.frame.outputs.end(),
                                  [](const TensorSummary& output) { return !output.is_finite(); });
    const bool is_wide = bad->dtype == at::kFloat || bad->dtype == at::kDouble;
    const at::ScalarType wide = is_wide ? at::kDouble : at::kFloat;
    const std::string in_wide = "In " + std::string(detail::dtype_name(wide)) + " it is ";
    const auto outputs = detail::run_again(op, wide);
    if (!outputs) {
      anomaly.cause = "It could not be run again in a wider type: why is not known";
      return;
    }
    if (!detail::all_finite(*outputs)) {
      const std::string domain = detail::domain_error(anomaly.frame.op, anomaly.inputs);
      anomaly.cause = in_wide + "not finite either: ";
      if (domain.empty()) {
        anomaly.cause +=
            "why is not known; look at the ranges of what it read, for 0, for numbers that the op "
            "does not take, for inf and for no elements";
      } else {
        anomaly.cause +=
            domain + (anomaly.frame.is_backward()
                          ? "; keep what the op of the forward pass read away from there"
                          : "; clamp what it reads, or add an eps");
      }
      if (ran_in_low_precision_) {
        anomaly.cause +=
            ". Ops before it ran in 16 bits, and rounding can make 0 or a negative "
            "number of a small positive one: trace the step in float32";
      }
      return;
    }
    double largest = 0;
    for (const TensorSummary& output : *outputs) largest = std::max(largest, output.max_abs);
    const bool asks = anomaly.frame.is_backward() && options_.loss_scale != nullptr;
    const double scale = asks ? options_.loss_scale() : 1;
    const bool by_scale = scale > 1 && !detail::overflows(largest / scale, bad->dtype);
    anomaly.cause = in_wide + "finite, up to " + format_significant(largest);
    if (by_scale) {
      anomaly.cause += ", and the dtype would hold it without the loss scale of " +
                       format_significant(scale, 6) +
                       ": the scaler lowers that, nothing is wrong with the model";
    } else {
      anomaly.cause += scale > 1 ? ", too large even without the loss scale: " : ": ";
      anomaly.cause +=
          is_wide ? "keep its result smaller"
                  : "use bfloat16, or run this op and those that read its result in float32";
    }
  }

  AnomalyTraceOptions options_;
  std::vector<Anomaly> found_;
  std::deque<AnomalyFrame> frames_;
  std::unordered_map<const c10::StorageImpl*, Taint> taints_;
  /// Results of the inner ops of the current op.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> inner_;
  bool ran_in_low_precision_ = false;
};

/// Writes the anomalies, a line each, and the frames before the first as a table.
inline std::ostream& operator<<(std::ostream& stream, const AnomalyTrace& trace) {
  const std::vector<Anomaly> anomalies = trace.anomalies();
  std::string text = anomalies.empty() ? "no op made an inf or NaN\nthe last ops" : "";
  for (const Anomaly& anomaly : anomalies) text += anomaly.message() + "\n";
  text += anomalies.empty() ? ", from to:\n" : "the ops before the first, from to:\n";
  for (const AnomalyFrame& frame : trace.frames()) {
    for (const TensorSummary& output : frame.outputs) {
      if (output.numel == 0) continue;
      text += detail::format_row(
          {10, 10, 0},
          {detail::format_significant(output.min), detail::format_significant(output.max),
           "  " + std::string(detail::dtype_name(output.dtype)) + " " +
               detail::format_sizes(output.sizes) + "  " + frame.to_string()});
    }
  }
  return stream << text;
}

/// When an TraceOnSkips traces, and whom it tells.
struct TraceOnSkipsOptions {
  std::int64_t consecutive_skips = 3;  ///< so many wake it
  AnomalyTraceOptions trace = {};      ///< of the step that is traced
  std::ostream* stream = &std::cerr;  ///< gets the trace; null: nothing. Lives as long as the watch
  std::function<void(const AnomalyTrace&)> callback = {};  ///< called with the trace of the step
};

/// A writer for a MetricsLogger. When steps were skipped in a row it puts an AnomalyTrace round the
/// next step, up to the next record after a backward pass, and tells what that found; in 1000 steps
/// once at most. A step that goes well is told too, as one without anomaly: then skips do not come
/// from each batch, or from what no op writes. In a job of several a rank other than 0 writes only
/// where it found something. Several watches may wake in the same step.
class TraceOnSkips {
 public:
  /// Keeps the parameters of `model`, which has to live as long as the watch.
  /// \throws c10::Error unless consecutive_skips is positive
  explicit TraceOnSkips(const torch::nn::Module& model, TraceOnSkipsOptions options = {})
      : model_(&model), options_(std::move(options)) {
    TORCH_CHECK(options_.consecutive_skips > 0, "TraceOnSkips: consecutive_skips is ",
                options_.consecutive_skips, "; it should be positive");
  }

  /// Looks at the record of a step.
  void operator()(const StepMetrics& record) {
    constexpr std::int64_t kRarely = 1000;
    skips_ = record.skipped ? skips_ + 1 : 0;
    last_step_ = record.step;
    if (trace_ == nullptr) {
      if (skips_ < options_.consecutive_skips || record.step < quiet_until_) return;
      trace_ = std::make_shared<AnomalyTrace>(*model_, options_.trace);
      return;
    }
    if (!trace_->has_run_backward()) return;  // of a step before, told late
    const std::shared_ptr<AnomalyTrace> done = std::exchange(trace_, nullptr);
    quiet_until_ = record.step + kRarely;
    const bool is_first = options_.trace.rank.value_or(0) == 0;
    if (options_.stream != nullptr && (is_first || !done->anomalies().empty())) {
      *options_.stream << "Traced a step after " + std::to_string(options_.consecutive_skips) +
                              " skipped in a row: "
                       << *done << std::flush;
    }
    if (options_.callback) options_.callback(*done);
  }

  /// Returns whether a trace is in progress, or will begin if the next steps are skipped too.
  bool is_pending() const {
    return trace_ != nullptr ||
           (skips_ > 0 && skips_ < options_.consecutive_skips && last_step_ >= quiet_until_);
  }

 private:
  const torch::nn::Module* model_;
  TraceOnSkipsOptions options_;
  std::int64_t skips_ = 0;
  std::int64_t last_step_ = 0;
  std::int64_t quiet_until_ = 0;         // a step
  std::shared_ptr<AnomalyTrace> trace_;  // of the step under way
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
