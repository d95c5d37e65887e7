/// \file
/// AnomalyTrace: finds the op that produced the first inf or NaN.
#pragma once

#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/rng_state.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/format.h>
#include <mezzo/diagnostics/named_parameters.h>
#include <mezzo/diagnostics/op_observer.h>
#include <mezzo/diagnostics/tensor_summary.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

/// Returns how the inputs of a division or unary op leave its domain, such as "log of 0"; empty if
/// they do not, and for other ops.
inline std::string describe_domain_error(std::string_view op,
                                         const std::vector<TensorSummary>& inputs) {
  if (inputs.empty() || !op.starts_with("aten::")) return {};
  op.remove_prefix(6);
  if (op.ends_with("_")) op.remove_suffix(1);
  const auto is_one_of = [op](const auto&... names) { return ((op == names) || ...); };
  const bool divides = is_one_of("div", "divide", "true_divide");
  if (divides && inputs.size() < 2) return {};  // the divisor is a scalar
  const TensorSummary& input = divides ? inputs[1] : inputs[0];
  const bool has_zero = input.min_abs == 0, has_negative = input.min < 0;
  const bool is_log = is_one_of("log", "log2", "log10"), is_root = is_one_of("sqrt", "rsqrt");
  if (has_negative && (is_log || is_root)) {
    return std::string(is_log ? "log" : "square root") + " of a negative number (" +
           format_significant(input.min) + ")";
  }
  if (has_zero && is_log) return "log of 0";
  if (has_zero && (divides || is_one_of("reciprocal", "rsqrt"))) return "division by 0";
  if (input.min <= -1 && op == "log1p") return "log1p of " + format_significant(input.min);
  if (input.max_abs > 1 && is_one_of("acos", "asin")) {
    return std::string(op) + " of a number outside [-1, 1] (" + format_significant(input.max_abs) +
           " in magnitude)";
  }
  return {};
}

/// Returns an argument with its floating-point tensors copied to `dtype`; a dtype argument becomes
/// `dtype`.
inline c10::IValue convert_argument(const c10::IValue& value, const c10::Argument& argument,
                                    at::ScalarType dtype) {
  const bool is_dtype = value.isInt() && argument.real_type()->str().starts_with("ScalarType");
  if (is_dtype && c10::isFloatingType(value.toScalarType())) return static_cast<int64_t>(dtype);
  return map_ivalue(value, [dtype](const at::Tensor& tensor) {
    const bool converts = tensor.defined() && tensor.is_floating_point();
    return converts ? tensor.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true) : tensor;
  });
}

/// Returns the summaries of the op's outputs when rerun in `dtype`; none if it cannot be rerun.
/// Restores the default random generators.
inline std::optional<std::vector<TensorSummary>> rerun_in_dtype(const ObservedOp& op,
                                                                at::ScalarType dtype) {
  const c10::FunctionSchema& schema = op.handle.schema();
  const bool is_aten = schema.name().starts_with("aten::");  // unlike a collective
  if (!is_aten || schema.arguments().size() != op.inputs.size()) return std::nullopt;
  const RngState random;
  std::optional<std::vector<TensorSummary>> summaries;
  try {
    torch::jit::Stack stack;
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      stack.push_back(convert_argument(op.inputs[i], schema.arguments()[i], dtype));
    }
    op.handle.callBoxed(&stack);
    const std::vector<at::Tensor> outputs = get_tensors(make_op_arguments(stack));
    if (!outputs.empty()) summaries = summarize(outputs);
  } catch (const std::exception&) {  // for example, no kernel for `dtype`
  }
  random.restore();
  return summaries;
}

}  // namespace detail

/// A traced op, with summaries of its outputs.
struct AnomalyFrame : OpLocation {
  std::vector<TensorSummary> outputs = {};  ///< in the order of the schema
};

/// An op whose output contains an inf or NaN that no traced op produced before.
struct Anomaly {
  AnomalyFrame frame = {};                 ///< the op and its outputs
  std::vector<TensorSummary> inputs = {};  ///< before the op ran
  /// Whether an input was already inf or NaN without a traced op having produced it: a parameter,
  /// the batch, a constant.
  bool from_input = false;
  std::string cause = {};                  ///< one sentence, with a remedy
  std::optional<int> rank = std::nullopt;  ///< from AnomalyTraceOptions
  std::vector<AnomalyFrame> frames = {};   ///< the preceding ops, oldest first

  /// Returns all of the above, except `frames`, as one line.
  std::string message() const {
    return (rank ? "rank " + std::to_string(*rank) + ", " : "") +
           (frame.is_backward() ? "backward pass: " : "forward pass: ") + frame.to_string() +
           (from_input ? " propagated " : " produced ") + detail::format_summaries(frame.outputs) +
           ". Inputs: " + detail::format_summaries(inputs) + ". " + cause;
  }
};

/// Options of an AnomalyTrace.
struct AnomalyTraceOptions {
  std::size_t max_frames = 20;  ///< number of ops kept before the first anomaly
  /// Returns the loss scale: `[&] { return scaler.get_scale(); }`. Called for anomalies of a
  /// backward pass; if empty, the loss scale is never reported as the cause.
  std::function<double()> loss_scale = {};
  std::optional<int> rank = std::nullopt;  ///< of this process, printed with each anomaly
};

/// While it exists, checks for inf and NaN the outputs of each op that the constructing thread
/// calls, and of each op in the backward passes that it runs. Reports the first op that produced
/// one: the ranges of its inputs, module and autograd node, whether a wider dtype would have held
/// the result, and whether the loss scale alone is the cause.
///
///     mezzo::AnomalyTrace trace(*model, {.loss_scale = [&] { return scaler.get_scale(); }});
///     scaler.scale(criterion(model->forward(x), y)).backward();
///     std::cerr << trace;
///
/// Not reported: -inf from a scalar or an unnamed tensor (an attention mask) and inf from a scalar
/// (the initial value of a running minimum), unless a reduction to one element returns it; values
/// that later ops make finite again; ops inside those that the program or autograd calls.
///
/// Reads every output, copies tensors that an op overwrites, and synchronizes with the device after
/// every op: use it for single steps. Does not change results, gradients or random numbers. Cannot
/// be used while the thread captures a CUDA graph. Installs nothing outside its lifetime; several
/// may exist at once. Values written outside libtorch's dispatcher (other libraries' kernels,
/// collectives) are reported with `from_input` by the next op that reads them. Call methods and the
/// destructor in the constructing thread.
class AnomalyTrace final : private detail::OpObserver {
 public:
  /// Keeps references to the parameters of `model`, not to `model`.
  explicit AnomalyTrace(const torch::nn::Module& model, AnomalyTraceOptions options = {})
      : AnomalyTrace(named_float_parameters(model), std::move(options)) {}
  /// Derives module names from the names of `parameters`.
  explicit AnomalyTrace(const TensorsByName& parameters, AnomalyTraceOptions options = {})
      : OpObserver(parameters), options_(std::move(options)) {
    std::vector<at::Tensor> gradients;  // may contain inf of an earlier step
    for (const auto& [name, parameter] : parameters) gradients.push_back(parameter.grad());
    taint_outputs(gradients, summarize(gradients), {kBeforeTrace});
    start();
  }
  ~AnomalyTrace() override { stop(); }

  /// Returns up to four anomalies in the order of their ops. An op that only propagates an earlier
  /// anomaly is not listed. An anomaly is removed once all results that contain it were read by ops
  /// with finite outputs.
  std::vector<Anomaly> anomalies() const {
    constexpr std::size_t kMaxAnomalies = 4;
    const auto locked = lock();
    std::vector<Anomaly> active;
    for (std::size_t i = 0; i < anomalies_.size() && active.size() < kMaxAnomalies; ++i) {
      if (is_active(i)) active.push_back(anomalies_[i]);
    }
    return active;
  }

  /// Returns the ops, without views, before the first anomaly, or the latest ones if there is none;
  /// oldest first.
  std::vector<AnomalyFrame> frames() const {
    const std::vector<Anomaly> active = anomalies();
    const auto locked = lock();
    return active.empty() ? std::vector(frames_.begin(), frames_.end()) : active.front().frames;
  }

  /// Returns whether a backward pass has run an autograd node since construction.
  using OpObserver::has_run_backward;

 private:
  using Origins = std::set<std::size_t>;  // indices into anomalies_, or kBeforeTrace
  static constexpr auto kBeforeTrace = std::numeric_limits<std::size_t>::max();

  /// Origins of the inf and NaN in a storage. A result read by another op passes its origins on to
  /// outputs that are not finite; 1 / (1 + exp(100)) is 0, which is no anomaly.
  struct Taint {
    Origins origins;
    std::shared_ptr<bool> was_read;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps its address from being reused
  };

  bool is_active(std::size_t anomaly) const {
    return std::any_of(taints_.begin(), taints_.end(), [&](const auto& entry) {
      return entry.second.origins.contains(anomaly) && !*entry.second.was_read;
    });
  }
  const Taint* find_taint(const at::Tensor& tensor) const {
    const auto found = taints_.find(detail::get_storage(tensor));
    return found == taints_.end() ? nullptr : &found->second;
  }
  void set_taint(const at::Tensor& tensor, Origins origins, std::shared_ptr<bool> was_read) {
    if (detail::get_storage(tensor) == nullptr) return;
    taints_.insert_or_assign(
        detail::get_storage(tensor),
        Taint{std::move(origins), std::move(was_read), tensor.storage().getWeakStorageImpl()});
  }
  void taint_outputs(const std::vector<at::Tensor>& outputs,
                     const std::vector<TensorSummary>& summaries, const Origins& origins) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!summaries[i].is_finite()) set_taint(outputs[i], origins, std::make_shared<bool>(false));
    }
  }

  /// Taints non-finite outputs of the op's inner ops, which a backward pass may read. Marked as
  /// read, since the outer op's output carries the anomaly.
  void taint_inner_outputs(const Origins& origins) {
    for (const auto& weak : inner_outputs_) {
      const at::Tensor inner(weak.lock());
      if (!detail::is_readable(inner) || find_taint(inner) != nullptr) continue;
      if (!summarize({inner}).front().is_finite()) {
        set_taint(inner, origins, std::make_shared<bool>(true));
      }
    }
  }

  /// Replaces inputs that the op will overwrite by copies, and drops inputs that it only writes.
  void on_op_begin(detail::ObservedOp& op) override {
    const detail::SuspendObserversGuard suspend;
    const auto& arguments = op.handle.schema().arguments();
    if (op.depth > 0) return;
    inner_outputs_.clear();
    if (arguments.size() != op.inputs.size()) return;
    std::vector<const c10::StorageImpl*> written;
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      const auto* const alias = arguments[i].alias_info();
      if (alias == nullptr || !alias->isWrite() || !op.inputs[i].isTensor()) continue;
      written.push_back(detail::get_storage(op.inputs[i].toTensor()));
      if (arguments[i].is_out() || op.op == "aten::copy_" || op.op == "aten::fill_" ||
          op.op == "aten::zero_") {
        op.inputs[i] = at::Tensor();
      }
    }
    if (written.empty()) return;
    for (c10::IValue& input : op.inputs) {
      if (!input.isTensor() || !detail::is_readable(input.toTensor())) continue;
      const at::Tensor tensor = input.toTensor();
      const auto* const storage = detail::get_storage(tensor);
      if (std::find(written.begin(), written.end(), storage) == written.end()) continue;
      input = tensor.clone();
      if (const Taint* const taint = find_taint(tensor)) {
        set_taint(input.toTensor(), taint->origins, taint->was_read);
      }
    }
  }

  void on_op_end(const detail::ObservedOp& op, detail::OpArguments returned) override {
    const detail::SuspendObserversGuard suspend;
    const std::vector<at::Tensor> outputs = detail::get_tensors(returned);
    if (!detail::computes_outputs(op, outputs)) return;
    if (op.depth > 0) {  // autograd may save the output for the backward pass
      for (const at::Tensor& output : outputs) {
        if (output.defined()) inner_outputs_.emplace_back(output.getIntrusivePtr());
      }
      return;
    }
    if (!std::any_of(outputs.begin(), outputs.end(), detail::is_readable)) return;
    AnomalyFrame frame{op, summarize(outputs)};
    for (const TensorSummary& output : frame.outputs) {
      ran_in_low_precision_ |= output.dtype == at::kHalf || output.dtype == at::kBFloat16;
    }
    std::vector<at::Tensor> inputs = detail::get_tensors(detail::make_op_arguments(op.inputs));
    const bool reads_values = !frame.op.ends_with("_like") && !frame.op.starts_with("aten::new_");
    std::erase_if(inputs, [&](const at::Tensor& tensor) {
      return !reads_values || !detail::is_readable(tensor);
    });
    Origins origins;
    for (const at::Tensor& tensor : inputs) {
      const Taint* const taint = find_taint(tensor);
      if (taint == nullptr || summarize({tensor}).front().is_finite()) continue;
      *taint->was_read = true;
      origins.insert(taint->origins.begin(), taint->origins.end());
    }
    if (!detail::all_finite(frame.outputs)) {
      if (!origins.empty()) {
        taint_outputs(outputs, frame.outputs, origins);
        return taint_inner_outputs(origins);
      }
      if (check_op(op, frame, inputs, outputs)) return;
    }
    frames_.push_back(std::move(frame));
    if (frames_.size() > options_.max_frames) frames_.pop_front();
  }

  /// Adds an anomaly for an op with non-finite outputs and untainted inputs, and returns true;
  /// returns false if a mask or a scalar of the program explains the outputs.
  bool check_op(const detail::ObservedOp& op, const AnomalyFrame& frame,
                const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) {
    Anomaly anomaly{.frame = frame, .inputs = summarize(inputs), .rank = options_.rank};
    std::string nonfinite_parameter;
    bool expects_negative_inf = false, expects_positive_inf = false;
    for (const c10::IValue& input : op.inputs) {
      const double value = input.isDouble() ? input.toDouble() : 0;
      if (!detail::is_nonfinite(value)) continue;
      (value < 0 ? expects_negative_inf : expects_positive_inf) = true;
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      TensorSummary& input = anomaly.inputs[i];
      input.name = names().find_name(inputs[i]);
      if (input.is_finite()) continue;
      const bool is_mask =
          input.nans == 0 && input.infs == input.negative_infs && input.name.empty();
      (is_mask ? expects_negative_inf : anomaly.from_input) = true;
      if (nonfinite_parameter.empty()) nonfinite_parameter = input.name;
    }
    // A reduction to one element, such as a loss, never expects inf.
    const bool is_reduction = outputs.front().defined() && outputs.front().dim() == 0 &&
                              !inputs.empty() && inputs.front().numel() > 1;
    const bool is_expected =
        std::all_of(frame.outputs.begin(), frame.outputs.end(), [&](const TensorSummary& output) {
          return output.nans == 0 && (output.negative_infs == 0 || expects_negative_inf) &&
                 (output.infs == output.negative_infs || expects_positive_inf);
        });
    if (is_expected && !anomaly.from_input && !is_reduction) return false;
    if (!anomaly.from_input) {
      anomaly.cause = find_cause(op, anomaly);
    } else if (nonfinite_parameter.empty()) {
      anomaly.cause =
          "An input is not finite and no traced op produced it: check the batch, constants, "
          "buffers, and what was computed before the trace";
    } else {
      anomaly.cause = "Parameter " + nonfinite_parameter +
                      " is not finite, and later steps cannot restore it: load an earlier "
                      "checkpoint";
    }
    const Origins origin = {anomalies_.size()};
    taint_outputs(outputs, frame.outputs, origin);
    taint_inner_outputs(origin);
    for (std::size_t i = 0; anomaly.from_input && i < inputs.size(); ++i) {
      // Later ops that read the same input propagate this anomaly.
      if (!anomaly.inputs[i].is_finite()) {
        set_taint(inputs[i], origin, std::make_shared<bool>(true));
      }
    }
    anomaly.frames = {frames_.begin(), frames_.end()};
    anomalies_.push_back(std::move(anomaly));
    return true;
  }

  /// Reruns the op in a wider dtype and returns the cause that this shows.
  std::string find_cause(const detail::ObservedOp& op, const Anomaly& anomaly) const {
    using detail::format_significant;
    const auto output =
        std::find_if(anomaly.frame.outputs.begin(), anomaly.frame.outputs.end(),
                     [](const TensorSummary& summary) { return !summary.is_finite(); });
    const bool is_wide = output->dtype == at::kFloat || output->dtype == at::kDouble;
    const at::ScalarType wide_dtype = is_wide ? at::kDouble : at::kFloat;
    const auto wide_outputs = detail::rerun_in_dtype(op, wide_dtype);
    if (!wide_outputs) {
      return "The op could not be rerun in a wider dtype: the cause is unknown";
    }
    std::string cause = "In " + std::string(detail::dtype_name(wide_dtype));
    if (!detail::all_finite(*wide_outputs)) {
      const std::string domain_error =
          detail::describe_domain_error(anomaly.frame.op, anomaly.inputs);
      cause += " the result is not finite either: ";
      if (domain_error.empty()) {
        cause +=
            "the cause is unknown; check the input ranges for 0, for values outside the op's "
            "domain, for inf, and for empty tensors";
      } else {
        cause += domain_error + (anomaly.frame.is_backward()
                                     ? "; keep the input of the forward op away from this value"
                                     : "; clamp the input or add an eps");
      }
      if (ran_in_low_precision_) {
        cause +=
            ". Earlier ops ran in 16-bit dtypes, whose rounding can turn a small positive number "
            "into 0 or a negative one: trace the step in float32";
      }
      return cause;
    }
    double max_abs = 0;
    for (const TensorSummary& wide : *wide_outputs) max_abs = std::max(max_abs, wide.max_abs);
    const bool is_scaled = anomaly.frame.is_backward() && options_.loss_scale != nullptr;
    const double scale = is_scaled ? options_.loss_scale() : 1;
    cause += " the result is finite, up to " + format_significant(max_abs);
    if (scale > 1 && !detail::overflows(max_abs / scale, output->dtype)) {
      return cause + ", and fits " + std::string(detail::dtype_name(output->dtype)) +
             " without the loss scale of " + format_significant(scale, 6) +
             ": GradScaler will lower the scale, the model needs no change";
    }
    return cause + (scale > 1 ? ", and too large even without the loss scale: " : ": ") +
           (is_wide ? "reduce the magnitude of its result"
                    : "use bfloat16, or run this op and its consumers in float32");
  }

  AnomalyTraceOptions options_;
  std::vector<Anomaly> anomalies_;
  std::deque<AnomalyFrame> frames_;
  std::unordered_map<const c10::StorageImpl*, Taint> taints_;
  /// Outputs of the ops inside the current op.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> inner_outputs_;
  bool ran_in_low_precision_ = false;
};

/// Prints one line per anomaly, and the frames before the first as a table of min, max, dtype,
/// shape and op.
inline std::ostream& operator<<(std::ostream& stream, const AnomalyTrace& trace) {
  const std::vector<Anomaly> anomalies = trace.anomalies();
  std::string text = anomalies.empty() ? "no op produced inf or NaN\n" : "";
  for (const Anomaly& anomaly : anomalies) text += anomaly.message() + "\n";
  text += anomalies.empty() ? "last ops:\n" : "ops before the first anomaly:\n";
  text += detail::format_row({10, 10, 0}, {"min", "max", "  output"});
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

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
