/// \file
/// check_precision(): which problems low precision will cause for a model, before training.
#pragma once

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/autocast/detail/recommended_autocast.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/hardware.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/rng_state.h>
#include <mezzo/base/model_refs.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/detail/format.h>
#include <mezzo/diagnostics/finding.h>
#include <mezzo/diagnostics/op_observer.h>
#include <mezzo/diagnostics/tensor_summary.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Result of check_precision. docs/precision-check.md lists the checks.
struct PrecisionReport {
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< that the model was checked on
  at::ScalarType dtype = at::kBFloat16;                    ///< that the model was checked for
  std::int64_t num_parameters = 0;                         ///< number of elements of all parameters
  std::vector<Finding> findings = {};                      ///< most severe first

  /// Returns the severity of the most severe finding; note if there is none.
  FindingSeverity max_severity() const {
    return findings.empty() ? FindingSeverity::note : findings.front().severity;
  }
};

/// Prints a report, wrapped at 100 columns.
inline std::ostream& operator<<(std::ostream& stream, const PrecisionReport& report) {
  std::array<int, 3> counts{};
  for (const Finding& finding : report.findings) {
    ++counts.at(static_cast<std::size_t>(finding.severity));
  }
  const auto format_count = [&](FindingSeverity severity) {
    const int count = counts.at(static_cast<std::size_t>(severity));
    return std::to_string(count) + " " + std::string(to_string(severity)) + (count == 1 ? "" : "s");
  };
  stream << "Precision check of " << std::to_string(report.num_parameters) << " parameters on "
         << report.device << " for " << detail::dtype_name(report.dtype) << ": "
         << format_count(FindingSeverity::error) << ", " << format_count(FindingSeverity::warning)
         << ", " << format_count(FindingSeverity::note) << "\n\n";
  for (const Finding& finding : report.findings) stream << finding;
  return stream;
}

/// Options of check_precision.
struct PrecisionCheckOptions {
  /// float16 or bfloat16; unset: default_autocast_dtype(device).
  std::optional<at::ScalarType> dtype = std::nullopt;
  OpOverridesHandle op_overrides = {};  ///< as in the autocast regions of the training program
  /// Learning rate for 16-bit weights with WeightStorage::plain; checks whether rounding discards
  /// updates of this size, about that of Adam's. Unset: not checked.
  std::optional<double> learning_rate = std::nullopt;
};

namespace detail {

/// Returns "a, b, c and 4 more".
inline std::string join_names(const std::vector<std::string>& names) {
  const std::size_t shown = std::min<std::size_t>(names.size(), 3);
  const std::string text = c10::Join(", ", c10::ArrayRef<std::string>(names).slice(0, shown));
  return text +
         (shown < names.size() ? " and " + std::to_string(names.size() - shown) + " more" : "");
}

/// Returns "float16, whose maximum is 65504".
inline std::string describe_max(at::ScalarType dtype) {
  return std::string(dtype_name(dtype)) + ", whose maximum is " +
         (dtype == at::kHalf ? "65504" : "3.39e+38");
}

/// Checks one model. Observes the ops of its forward passes.
class PrecisionChecker final : OpObserver {
 public:
  /// \param inputs   the sample's tensors, named "input 0", ...
  /// \param forward  runs the sample and returns the outputs; null for no forward pass
  PrecisionChecker(const TensorsByName& parameters, TensorsByName buffers, TensorsByName inputs,
                   std::function<std::vector<at::Tensor>()> forward, c10::Device device,
                   const PrecisionCheckOptions& options)
      : OpObserver(parameters),
        parameters_(parameters),
        buffers_(std::move(buffers)),
        inputs_(std::move(inputs)),
        tensor_names_([this] {
          TensorsByName all = parameters_;
          all.insert(all.end(), buffers_.begin(), buffers_.end());
          all.insert(all.end(), inputs_.begin(), inputs_.end());
          return all;
        }()),
        forward_(std::move(forward)),
        options_(options),
        report_{.device = device,
                .dtype = options.dtype.value_or(default_autocast_dtype(device.type()))} {
    check_autocast_device(device.type());
    TORCH_CHECK(is_autocast_dtype_supported(device.type(), report_.dtype),
                "check_precision: expected dtype torch::kHalf or torch::kBFloat16, but got ",
                report_.dtype);
    TORCH_CHECK(!at::autocast::is_autocast_enabled(device.type()),
                "check_precision: autocast is enabled already; call it outside autocast regions");
    TORCH_CHECK(!options.learning_rate || *options.learning_rate > 0,
                "check_precision: Invalid learning rate: ", options.learning_rate.value_or(0),
                "; it must be positive");
    TORCH_CHECK(
        !parameters_.empty(),
        "check_precision: the model has no parameters; register its parameters and modules");
    for (const auto& [name, parameter] : parameters_) {
      TORCH_CHECK(parameter.device().type() == device.type(),
                  "check_precision: expected all parameters on ", device, ", but ", name, " is on ",
                  parameter.device(), "; call model->to(device) first");
      report_.num_parameters += parameter.numel();
    }
  }

  PrecisionReport run() {
    check_hardware();
    if (forward_ != nullptr) check_forward();
    check_values("parameter", parameters_);
    check_values("buffer", buffers_);
    check_values("input", inputs_);
    if (options_.learning_rate) check_updates();
    std::stable_sort(report_.findings.begin(), report_.findings.end(),
                     [](const auto& a, const auto& b) { return a.severity > b.severity; });
    return std::move(report_);
  }

 private:
  /// Adds a finding, unless it is a duplicate or `location` is empty.
  void add(FindingSeverity severity, const char* check, const std::string& location,
           const std::string& description, const std::string& remedy = "") {
    const bool is_duplicate =
        std::any_of(report_.findings.begin(), report_.findings.end(), [&](const Finding& known) {
          return known.location == location && known.description == description;
        });
    if (location.empty() || is_duplicate) return;
    report_.findings.push_back({severity, check, location, description, remedy});
  }

  void check_hardware() {
    const c10::Device device = report_.device;
    const bool is_half = report_.dtype == at::kHalf;
    const std::string name(dtype_name(report_.dtype));
    const CpuFeatures cpu = cpu_features();
    const auto gpu = device.is_cuda() ? get_compute_capability(device) : std::nullopt;
    if (!gpu && !(device.is_cpu() && cpu.known)) {
      return add(FindingSeverity::note, "hardware", device.str(),
                 "hardware support for " + name + " is unknown: time a training step in it");
    }
    if (gpu ? gpu->major >= (is_half ? 7 : 8) : is_half ? cpu.fp16 : cpu.bf16) {
      return add(FindingSeverity::note, "hardware", device.str(),
                 "this hardware has instructions for matrix products in " + name);
    }
    add(FindingSeverity::warning, "hardware", device.str(),
        (gpu ? "this GPU has no tensor cores for " + name : describe_missing_instructions(name)) +
            ": autocast saves memory here, but no time",
        "auto options = mezzo::recommended_autocast(torch::" + std::string(gpu ? "kCUDA" : "kCPU") +
            ");  // float32 if no lower precision is fast");
  }

  /// Records casts, random ops and matrix products with unaligned dimensions.
  void on_op_begin(ObservedOp& op) override {
    const std::string& name = op.op;
    is_random_ |= op.handle.hasTag(at::Tag::nondeterministic_seeded);
    if (op.depth == 0) {
      last_op_ = c10::toString(op.handle.operator_name());
      last_op_threw_ = false;
      if (!op.module.empty()) last_module_ = (op.reads_parameter ? "" : "after ") + op.module;
    }
    if (name == "aten::_to_copy" || name == "aten::copy_") {
      const c10::IValue& source = op.inputs[name == "aten::copy_" ? 1 : 0];
      if (source.isTensor()) cast_tensor_names_.insert(tensor_names_.find_name(source.toTensor()));
    }
    const bool adds = name == "aten::addmm" || name == "aten::baddbmm";
    if (adds || name == "aten::mm" || name == "aten::bmm") {
      const at::Tensor &left = op.inputs[adds ? 1 : 0].toTensor(),
                       &right = op.inputs[adds ? 2 : 1].toTensor();
      const std::int64_t m = left.size(-2), k = left.size(-1), n = right.size(-1);
      if (!left.is_floating_point() || (m % 8 == 0 && k % 8 == 0 && n % 8 == 0)) return;
      add_unaligned(op, "a product of [" + std::to_string(m) + ", " + std::to_string(k) +
                            "] and [" + std::to_string(k) + ", " + std::to_string(n) + "]");
    } else if (name == "aten::convolution") {
      const at::Tensor& weight = op.inputs[1].toTensor();
      if (weight.size(0) % 8 == 0 && weight.size(1) % 8 == 0) return;
      add_unaligned(op, "a convolution of " + std::to_string(weight.size(1)) + " to " +
                            std::to_string(weight.size(0)) + " channels");
    }
  }

  void add_unaligned(const ObservedOp& op, const std::string& product) {
    unaligned_products_[product].insert((op.reads_parameter ? "" : "after ") + op.module);
  }

  /// Checks an op's constants against the range of the dtype in which it computed.
  void on_op_end(const ObservedOp& op, OpArguments outputs) override {
    if (op.depth > 0) return;
    last_op_threw_ = op.threw;
    // Norms add their eps in float32, and kernels multiply by a scalar in float32: an overflowing
    // product is found in its result.
    for (const char* const name : {"_norm", "::mul", "::div"}) {
      if (op.op.find(name) != std::string::npos) return;
    }
    at::ScalarType dtype = at::ScalarType::Undefined;
    for (const at::Tensor& tensor :
         get_tensors(op.threw ? make_op_arguments(op.inputs) : outputs)) {
      if (!tensor.defined() || !tensor.is_floating_point()) continue;
      if (dtype == at::ScalarType::Undefined) dtype = tensor.scalar_type();
    }
    if (dtype != at::kHalf && dtype != at::kBFloat16) return;
    if (report_.dtype == at::kHalf) dtype = at::kHalf;  // also in check_forward's bfloat16 rerun
    const auto& arguments = op.handle.schema().arguments();
    for (std::size_t i = 0; i < std::min(op.inputs.size(), arguments.size()); ++i) {
      const c10::IValue& input = op.inputs[i];
      const bool is_scalar =
          arguments[i].type()->annotation_str().find("number") != std::string::npos;
      double value = input.isDouble() ? input.toDouble() : 0;
      if (is_scalar && input.isInt()) value = static_cast<double>(input.toInt());
      check_constant(op.op.substr(op.op.rfind(':') + 1), value, dtype);
    }
  }

  void check_constant(const std::string& op, double value, at::ScalarType dtype) {
    const std::string prefix = op + " with " + format_significant(value) + " computes in ";
    if (overflows(value, dtype)) {
      add(FindingSeverity::error, "range", last_module_,
          prefix + describe_max(dtype) + ": it throws, or produces inf or NaN",
          op.starts_with("masked_fill")
              ? "scores.masked_fill(mask, -std::numeric_limits<float>::infinity());"
          : op.starts_with("clamp") ? "x.clamp_min(-65504.0)  // a number in the dtype's range"
                                    : "");
    } else if (underflows(value, dtype)) {
      const double smallest = std::ldexp(1, ExponentRange::from_dtype(dtype).min_subnormal);
      add(FindingSeverity::warning, "range", last_module_,
          prefix + std::string(dtype_name(dtype)) + ", whose smallest number is " +
              format_significant(smallest, 2) + ": it becomes 0 and has no effect",
          "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps);  // a larger eps may overflow it");
    }
  }

  /// Result of a forward pass.
  struct ForwardResult {
    std::string error = {};  ///< message of the exception, if it threw
    at::Tensor output = {};  ///< all floating-point outputs, flattened, in float64
    bool is_finite = true;
  };

  /// Runs the forward pass under autocast to `autocast_dtype`, or without autocast.
  ForwardResult run_forward(std::optional<at::ScalarType> autocast_dtype) {
    ForwardResult result;
    const RngState random;
    std::vector<at::Tensor> saved_buffers;  // the forward pass writes to copies
    for (const auto& [name, buffer] : buffers_) {
      const SuspendObserversGuard suspend;
      saved_buffers.push_back(buffer.variable_data());
      buffer.set_data(saved_buffers.back().clone());
    }
    start();
    const auto restore = c10::make_scope_exit([&] {
      stop();
      const SuspendObserversGuard suspend;
      for (std::size_t i = 0; i < saved_buffers.size(); ++i) {
        buffers_[i].second.set_data(saved_buffers[i]);
      }
      random.restore();
    });
    try {
      const AutocastGuard autocast({.device_type = report_.device.type(),
                                    .dtype = autocast_dtype.value_or(report_.dtype),
                                    .enabled = autocast_dtype.has_value(),
                                    .op_overrides = options_.op_overrides});
      const std::vector<at::Tensor> outputs = forward_();
      const SuspendObserversGuard suspend;
      std::vector<at::Tensor> values = {at::empty({0}, at::kDouble)};
      for (const at::Tensor& output : outputs) {
        if (!output.defined() || !output.is_floating_point()) continue;
        values.push_back(output.detach().to(at::kCPU, at::kDouble).flatten());
      }
      result.output = at::cat(values);
      result.is_finite = result.output.isfinite().all().item<bool>();
    } catch (const std::exception& thrown) {
      constexpr std::string_view kScriptError = "RuntimeError: ";  // ends TorchScript's stack trace
      const auto* const error = dynamic_cast<const c10::Error*>(&thrown);
      result.error = error != nullptr ? error->what_without_backtrace() : thrown.what();
      const std::size_t message = result.error.rfind(kScriptError);
      if (message != std::string::npos) result.error.erase(0, message + kScriptError.size());
      result.error = result.error.substr(0, result.error.find('\n'));
    }
    return result;
  }

  void check_forward() {
    const ForwardResult exact = run_forward(std::nullopt);
    if (!exact.error.empty()) return add_exception(exact, "even in float32", "");
    if (!exact.is_finite) add_nonfinite(std::nullopt, "even without autocast");
    const ForwardResult low = run_forward(report_.dtype);
    const std::string under = "under autocast to " + std::string(dtype_name(report_.dtype));
    has_completed_ = low.error.empty();
    if (!has_completed_) {
      add_exception(low, under,
                    "mezzo::AutocastGuard float32({.enabled = false});  // around this code");
      // bfloat16 has the same casts, and may complete.
      if (report_.dtype == at::kHalf) run_forward(at::kBFloat16);
    } else if (exact.is_finite && !low.is_finite) {
      add_nonfinite(report_.dtype, under + ", but not in float32");
    } else if (exact.is_finite && !is_random_) {
      compare_outputs(exact, low, under);
    }
    for (const auto& [product, modules] : unaligned_products_) {
      add(report_.device.is_cuda() ? FindingSeverity::warning : FindingSeverity::note, "dimensions",
          join_names({modules.begin(), modules.end()}),
          product + " has a dimension that is not a multiple of 8, which tensor cores need",
          "pad batch, vocabulary or width to the next multiple of 8");
    }
  }

  void add_exception(const ForwardResult& result, const std::string& when, const char* remedy) {
    add(FindingSeverity::error, "forward", last_module_,
        "forward() throws " + when +
            (last_op_threw_ ? ", in " : ", in the model's code outside any op, after ") + last_op_ +
            ": " + result.error,
        remedy);
  }

  /// Adds a finding for a non-finite output, with the first anomaly of an AnomalyTrace.
  void add_nonfinite(std::optional<at::ScalarType> autocast_dtype, const std::string& when) {
    const AnomalyTrace trace(parameters_);
    run_forward(autocast_dtype);
    const std::vector<Anomaly> anomalies = trace.anomalies();
    add(FindingSeverity::error, "forward", "(model)",
        "the output contains inf or NaN " + when +
            (anomalies.empty() ? "" : ": " + anomalies.front().message()));
  }

  void compare_outputs(const ForwardResult& exact, const ForwardResult& low,
                       const std::string& under) {
    constexpr double kMaxError = 0.1;
    if (low.output.numel() != exact.output.numel()) return;
    const double error = ((low.output - exact.output).norm() / exact.output.norm()).item<double>();
    if (is_nonfinite(error) || error <= kMaxError) return;
    add(FindingSeverity::warning, "forward", "(model)",
        "the output " + under + " differs from float32 by " + format_significant(100 * error, 2) +
            " % (relative norm); the responsible op is unknown: run parts of the model with "
            "autocast disabled");
  }

  /// Checks for values that are not finite, or outside the dtype's range in a tensor that an op
  /// casts (in all tensors if no forward pass completed). Buffers and inputs may be inf, as masks
  /// are.
  void check_values(const std::string& kind, const TensorsByName& tensors) {
    const bool is_parameter = kind == "parameter";
    std::vector<std::string> nonfinite, overflowing, underflowing;
    double max_abs = 0;
    for (const auto& [name, tensor] : tensors) {
      if (!tensor.is_floating_point() || !is_readable(tensor)) continue;
      const TensorSummary summary = summarize({tensor}).front();
      if (summary.nans > 0 || (is_parameter && summary.infs > 0)) nonfinite.push_back(name);
      if (has_completed_ && !cast_tensor_names_.contains(name)) continue;
      if (overflows(summary.max_abs, report_.dtype)) {
        overflowing.push_back(name);
        max_abs = std::max(max_abs, summary.max_abs);
      }
      if (!is_parameter) continue;
      const at::NoGradGuard no_grad;
      const at::Tensor values = comparable_values(tensor);
      const auto nonzero = values.count_nonzero().item<double>();
      const auto nonzero_after_cast = values.to(report_.dtype).count_nonzero().item<double>();
      if (nonzero_after_cast < 0.9 * nonzero) underflowing.push_back(name);
    }
    const char* const use_bfloat16 = "mezzo::AutocastGuard autocast({.dtype = torch::kBFloat16});";
    add(FindingSeverity::error, "range", join_names(nonfinite),
        "this " + kind + " contains inf or NaN", "torch::load(model, \"earlier.pt\");");
    add(is_parameter ? FindingSeverity::error : FindingSeverity::warning, "range",
        join_names(overflowing),
        "this " + kind + " contains " + format_significant(max_abs) + " in magnitude, beyond " +
            describe_max(report_.dtype) + ": a cast makes it inf",
        kind == "buffer" ? "mask.clamp_min(-65504.0);  // or -inf, or bfloat16" : use_bfloat16);
    add(FindingSeverity::warning, "range", join_names(underflowing),
        "a cast to " + std::string(dtype_name(report_.dtype)) +
            " rounds more than 10 % of the values of this parameter to 0",
        use_bfloat16);
  }

  /// Checks for 16-bit weights that do not change when the learning rate is added or subtracted.
  void check_updates() {
    const double learning_rate = *options_.learning_rate;
    const at::NoGradGuard no_grad;
    std::vector<std::string> names;
    for (const auto& [name, weight] : parameters_) {
      if (!is_low_precision(weight) || !weight.requires_grad() || weight.numel() == 0) continue;
      double unchanged = 0;  // fraction
      for (const double update : {learning_rate, -learning_rate}) {
        const at::Tensor updated = (weight.to(at::kFloat) + update).to(weight.scalar_type());
        unchanged += updated.eq(weight).to(at::kFloat).mean().item<double>() / 2;
      }
      if (unchanged >= 0.1) {
        names.push_back(name + " (" + format_significant(100 * unchanged, 2) + " %)");
      }
    }
    add(FindingSeverity::warning, "updates", join_names(names),
        "with WeightStorage::plain, rounding discards updates of " +
            format_significant(learning_rate) +
            ", about those of Adam, for this percentage of the values",
        "mezzo::optim::WeightStorage::fp32_master  // or stochastic_rounding");
  }

  TensorsByName parameters_, buffers_, inputs_;
  TensorNameLookup tensor_names_;  // of all three
  std::function<std::vector<at::Tensor>()> forward_;
  PrecisionCheckOptions options_;
  PrecisionReport report_;
  const at::AutoGradMode grad_mode_{true};  // training keeps activations

  // Observations of the forward passes.
  std::map<std::string, std::set<std::string>> unaligned_products_;  // with their modules
  std::set<std::string> cast_tensor_names_;
  std::string last_op_, last_module_ = "before the first layer";
  bool last_op_threw_ = false;
  bool is_random_ = false;      // whether an op drew random numbers
  bool has_completed_ = false;  // whether the low-precision forward pass did
};

}  // namespace detail

/// Checks a model: reads its parameters and buffers, and runs `forward` on `sample` in float32 and
/// under autocast, with autograd enabled but without a backward pass. float16 can be checked on any
/// CPU.
///
///     const auto report = mezzo::check_precision(model, batch.ids, torch::kCPU);
///     std::cout << report;
///     return static_cast<int>(report.max_severity());  // 0: notes at most, 1: warning, 2: error
///
/// \param model   a module, module holder, std::shared_ptr to a module, or torch::jit::Module
/// \param sample  the argument of `forward`, or a std::tuple of several; for a torch::jit::Module a
///   std::vector of IValues, where an empty one checks only parameters and buffers
/// \param device  of model and sample
///
/// Parameters are not modified; buffers and the default random generators are restored. The model
/// runs in its current mode, `train()` or `eval()`. An exception of `forward` becomes a finding.
/// Synchronizes with the device.
/// \throws c10::Error for a model without parameters or on another device, for a device or dtype
///   without autocast, and in an autocast region
template <class Model, class Sample>
PrecisionReport check_precision(Model&& model, const Sample& sample, c10::Device device,
                                const PrecisionCheckOptions& options = {}) {
  if constexpr (detail::ModelHandle<std::remove_cvref_t<Model>>) {
    const auto module = detail::module_pointer(model);
    TORCH_CHECK(module != nullptr,
                "check_precision: the model is an empty holder or a null pointer; construct it "
                "first");
    return check_precision(*module, sample, device, options);
  } else {
    // TorchScript's interpreter then runs the ops as written, without fusion.
    const torch::jit::GraphOptimizerEnabledGuard disable_optimizer(false);
    TensorsByName inputs;
    detail::for_each_tensor(sample, [&inputs](const at::Tensor& tensor) {
      const std::string name = "input " + std::to_string(inputs.size());
      if (tensor.defined()) inputs.emplace_back(name, tensor);
    });
    std::function<std::vector<at::Tensor>()> forward = [&model, &sample] {
      const auto call = [&model](const auto&... arguments) { return model.forward(arguments...); };
      auto result = [&] {
        if constexpr (detail::TupleLike<Sample> && !requires { model.forward(sample); }) {
          return std::apply(call, sample);
        } else {
          return call(sample);
        }
      }();
      std::vector<at::Tensor> outputs;
      detail::for_each_tensor(result,
                              [&outputs](const at::Tensor& tensor) { outputs.push_back(tensor); });
      return outputs;
    };
    if constexpr (std::is_same_v<Sample, std::vector<c10::IValue>>) {
      if (sample.empty()) forward = nullptr;
    }
    const auto parameters =
        detail::UniqueTensorCollector().collect_floating(model.named_parameters());
    const auto buffers = detail::UniqueTensorCollector().collect(model.named_buffers());
    return detail::PrecisionChecker(parameters, buffers, inputs, forward, device, options).run();
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
