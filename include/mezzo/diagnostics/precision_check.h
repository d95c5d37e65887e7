/// \file
/// The doctor: what will low precision do to this model, on this machine? docs/precision-check.md
/// has examples.
#pragma once

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/detail/recommended_autocast.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/hardware.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/rng_state.h>
#include <mezzo/base/model_refs.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/tensor_summary.h>

#include <ATen/core/Tensor.h>
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
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// All that was found. docs/precision-check.md lists the topics of findings.
struct PrecisionReport {
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< that was asked for
  at::ScalarType dtype = at::kBFloat16;                    ///< that the model was looked at for
  std::int64_t parameters = 0;                             ///< elements of all parameters
  std::vector<Finding> findings = {};                      ///< the worst first

  /// Returns 0 for nothing but notes, 1 for a warning, 2 for an error.
  int max_severity() const {
    return findings.empty() ? 0 : static_cast<int>(findings.front().severity);
  }
};

/// Writes a report for a terminal of 100 columns.
inline std::ostream& operator<<(std::ostream& stream, const PrecisionReport& report) {
  std::array<int, 3> counts{};
  for (const Finding& one : report.findings) ++counts.at(static_cast<std::size_t>(one.severity));
  const auto of = [](int count, const std::string& what) {
    return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
  };
  stream << "mezzo's doctor: " << std::to_string(report.parameters) << " parameters on "
         << report.device << ", looked at for " << detail::dtype_name(report.dtype) << ": "
         << of(counts[2], "error") << ", " << of(counts[1], "warning") << ", "
         << of(counts[0], "note") << "\n\n";
  for (const Finding& finding : report.findings) stream << finding;
  return stream;
}

/// What the doctor looks for.
struct PrecisionCheckOptions {
  /// Half or bfloat16; unset: default_autocast_dtype(device).
  std::optional<at::ScalarType> dtype = std::nullopt;
  OpOverridesHandle policy = {};  ///< as the training's regions have it
  /// Of training with weights of 16 bits and WeightStorage::plain. Adam moves a weight by about the
  /// rate; unset: updates are not looked at.
  std::optional<double> learning_rate = std::nullopt;
};

namespace detail {

/// Returns "a, b, c and 4 more".
inline std::string some_of(const std::vector<std::string>& names) {
  const std::size_t shown = std::min<std::size_t>(names.size(), 3);
  const std::string text = c10::Join(", ", c10::ArrayRef<std::string>(names).slice(0, shown));
  return text +
         (shown < names.size() ? " and " + std::to_string(names.size() - shown) + " more" : "");
}

/// Returns "float16, which ends at 65504".
inline std::string end_of(at::ScalarType dtype) {
  return std::string(dtype_name(dtype)) + ", which ends at " +
         (dtype == at::kHalf ? "65504" : "3.39e+38");
}

/// Examines one model: hears the ops of its forward passes, and reads values.
class PrecisionChecker final : OpObserver {
 public:
  /// \param inputs   the sample's tensors: "input 0", ...
  /// \param forward  runs the sample, and gives the outputs; null: there is none
  PrecisionChecker(const TensorsByName& parameters, TensorsByName buffers, TensorsByName inputs,
                   std::function<std::vector<at::Tensor>()> forward, c10::Device device,
                   const PrecisionCheckOptions& options)
      : OpObserver(parameters),
        parameters_(parameters),
        buffers_(std::move(buffers)),
        inputs_(std::move(inputs)),
        all_([this] {
          TensorsByName all = parameters_;
          all.insert(all.end(), buffers_.begin(), buffers_.end());
          all.insert(all.end(), inputs_.begin(), inputs_.end());
          return all;
        }()),
        forward_(std::move(forward)),
        options_(options),
        found_{.device = device,
               .dtype = options.dtype.value_or(default_autocast_dtype(device.type()))} {
    check_autocast_device(device.type());
    TORCH_CHECK(is_autocast_dtype_supported(device.type(), found_.dtype),
                "check_precision: dtype is ", found_.dtype,
                "; use torch::kHalf or torch::kBFloat16");
    TORCH_CHECK(!at::autocast::is_autocast_enabled(device.type()),
                "check_precision: call it outside of Autocast regions, it opens its own");
    TORCH_CHECK(!options.learning_rate || *options.learning_rate > 0,
                "check_precision: learning_rate is ", options.learning_rate.value_or(0),
                "; it should be positive");
    TORCH_CHECK(
        !parameters_.empty(),
        "check_precision: the model has no parameters; register them and its modules, or check "
        "the model that trains");
    for (const auto& [name, parameter] : parameters_) {
      TORCH_CHECK(parameter.device().type() == device.type(), "check_precision: parameter ", name,
                  " is on ", parameter.device(), " and device is ", device,
                  "; call model->to(device) first");
      found_.parameters += parameter.numel();
    }
  }

  PrecisionReport examine() {
    examine_hardware();
    if (forward_ != nullptr) examine_forward();
    examine_values("parameter", parameters_);
    examine_values("buffer", buffers_);
    examine_values("input", inputs_);
    if (options_.learning_rate) examine_updates();
    std::stable_sort(found_.findings.begin(), found_.findings.end(),
                     [](const auto& a, const auto& b) { return a.severity > b.severity; });
    return std::move(found_);
  }

 private:
  /// Adds a finding, once; nothing where `where` is empty.
  void add(FindingSeverity severity, const char* check, const std::string& where,
           const std::string& reason, const std::string& remedy = "") {
    const bool is_known = std::any_of(
        found_.findings.begin(), found_.findings.end(),
        [&](const Finding& known) { return known.where == where && known.reason == reason; });
    if (where.empty() || is_known) return;
    found_.findings.push_back({severity, check, where, reason, remedy});
  }

  /// Tells whether the hardware has instructions for the dtype, as far as it lets itself be asked.
  void examine_hardware() {
    const c10::Device device = found_.device;
    const bool is_half = found_.dtype == at::kHalf;
    const std::string name(dtype_name(found_.dtype));
    const CpuFeatures cpu = cpu_features();
    const auto gpu = device.is_cuda() ? get_compute_capability(device) : std::nullopt;
    if (!gpu && !(device.is_cpu() && cpu.known)) {
      return add(FindingSeverity::note, "hardware", device.str(),
                 "which instructions this hardware has is not known: time a step in " + name);
    }
    if (gpu ? gpu->major >= (is_half ? 7 : 8) : is_half ? cpu.fp16 : cpu.bf16) {
      return add(FindingSeverity::note, "hardware", device.str(),
                 "products in " + name + " are computed by instructions of their own");
    }
    add(FindingSeverity::warning, "hardware", device.str(),
        (gpu ? "this GPU has no tensor cores for it" : describe_missing_instructions(name)) +
            ", and emulates products in " + name + ": autocast saves memory here and no time",
        "auto setting = mezzo::recommended_autocast(torch::" + std::string(gpu ? "kCUDA" : "kCPU") +
            ");  // float32 where nothing else is fast");
  }

  /// Notes which tensors are cast, and products of sizes that are no multiples of 8.
  void on_op_begin(ObservedOp& op) override {
    const std::string& name = op.op;
    draws_random_ |= op.handle.hasTag(at::Tag::nondeterministic_seeded);
    if (op.depth == 0) {
      last_op_ = c10::toString(op.handle.operator_name());
      threw_ = false;
      if (!op.module.empty()) place_ = (op.reads_parameter ? "" : "after ") + op.module;
    }
    if (name == "aten::_to_copy" || name == "aten::copy_") {
      const c10::IValue& read = op.inputs[name == "aten::copy_" ? 1 : 0];
      if (read.isTensor()) casts_.insert(all_.name_of(read.toTensor()));
    }
    const bool adds = name == "aten::addmm" || name == "aten::baddbmm";
    if (adds || name == "aten::mm" || name == "aten::bmm") {
      const at::Tensor &left = op.inputs[adds ? 1 : 0].toTensor(),
                       &right = op.inputs[adds ? 2 : 1].toTensor();
      if (left.is_floating_point()) note(left.size(-2), left.size(-1), right.size(-1), op);
    } else if (name == "aten::convolution") {
      const at::Tensor& weight = op.inputs[1].toTensor();
      note(0, weight.size(1), weight.size(0), op);  // its rows are images
    }
  }

  void note(std::int64_t m, std::int64_t k, std::int64_t n, const ObservedOp& op) {
    if (m % 8 == 0 && k % 8 == 0 && n % 8 == 0) return;
    const std::string in = std::to_string(k), out = std::to_string(n);
    products_[m == 0
                  ? "a convolution of " + in + " to " + out + " channels"
                  : "a product of " + std::to_string(m) + " x " + in + " with " + in + " x " + out]
        .insert((op.reads_parameter ? "" : "after ") + op.module);
  }

  /// Tells of constants that the dtype of the op's result does not hold.
  void on_op_end(const ObservedOp& op, OpArguments returned) override {
    if (op.depth > 0) return;
    threw_ = op.threw;
    // Norms add their eps in float32, and kernels multiply by a number in float32: where a product
    // is too large, its result shows it.
    for (const char* const other : {"_norm", "::mul", "::div"}) {
      if (op.op.find(other) != std::string::npos) return;
    }
    at::ScalarType dtype = at::ScalarType::Undefined;  // of the result, or of what the op read
    for (const at::Tensor& tensor : tensors_in(op.threw ? arguments_in(op.inputs) : returned)) {
      if (!tensor.defined() || !tensor.is_floating_point()) continue;
      if (dtype == at::ScalarType::Undefined) dtype = tensor.scalar_type();
    }
    if (dtype != at::kHalf && dtype != at::kBFloat16) return;
    if (found_.dtype == at::kHalf) dtype = at::kHalf;  // for which a pass in bfloat16 may stand
    const auto& arguments = op.handle.schema().arguments();
    for (std::size_t i = 0; i < std::min(op.inputs.size(), arguments.size()); ++i) {
      const c10::IValue& input = op.inputs[i];
      const bool is_number =
          arguments[i].type()->annotation_str().find("number") != std::string::npos;
      double value = input.isDouble() ? input.toDouble() : 0;
      if (is_number && input.isInt()) value = static_cast<double>(input.toInt());
      tell_constant(op.op.substr(op.op.rfind(':') + 1), value, dtype);
    }
  }

  void tell_constant(const std::string& name, double value, at::ScalarType dtype) {
    const std::string start = name + " with " + format_significant(value) + " computes in ";
    if (overflows(value, dtype)) {
      add(FindingSeverity::error, "range", place_,
          start + end_of(dtype) + ": it throws, or makes inf and NaN",
          name.starts_with("masked_fill")
              ? "scores.masked_fill(mask, -std::numeric_limits<float>::infinity());"
          : name.starts_with("clamp") ? "x.clamp_min(-65504.0)  // a number that the dtype holds"
                                      : "");
    } else if (underflows(value, dtype)) {
      add(FindingSeverity::warning, "range", place_,
          start + std::string(dtype_name(dtype)) + ", whose smallest number is " +
              format_significant(std::ldexp(1, ExponentRange::from_dtype(dtype).min_subnormal), 2) +
              ": it becomes 0 and guards nothing",
          "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps);  // a larger eps may overflow it");
    }
  }

  /// What a forward pass came to.
  struct Outcome {
    std::string thrown = {};
    at::Tensor output = {};  // the numbers of the floating ones, as doubles
    bool is_finite = true;
  };

  Outcome run(std::optional<at::ScalarType> low) {
    Outcome outcome;
    const RngState random;
    std::vector<at::Tensor> kept;  // the buffers' memory; the pass gets other memory
    for (const auto& [name, buffer] : buffers_) {
      const SuspendObserversGuard unobserved;
      kept.push_back(buffer.variable_data());
      buffer.set_data(kept.back().clone());
    }
    start();
    const auto restore = c10::make_scope_exit([&] {
      stop();
      const SuspendObserversGuard unobserved;
      for (std::size_t i = 0; i < kept.size(); ++i) buffers_[i].second.set_data(kept[i]);
      random.restore();
    });
    try {
      const AutocastGuard region({.device_type = found_.device.type(),
                                  .dtype = low.value_or(found_.dtype),
                                  .enabled = low.has_value(),
                                  .op_overrides = options_.policy});
      const std::vector<at::Tensor> outputs = forward_();
      const SuspendObserversGuard unobserved;  // this is not the model's
      std::vector<at::Tensor> numbers = {at::empty({0}, at::kDouble)};
      for (const at::Tensor& output : outputs) {
        if (!output.defined() || !output.is_floating_point()) continue;
        numbers.push_back(output.detach().to(at::kCPU, at::kDouble).flatten());
      }
      outcome.output = at::cat(numbers);
      outcome.is_finite = outcome.output.isfinite().all().item<bool>();
    } catch (const std::exception& thrown) {
      const auto* const error = dynamic_cast<const c10::Error*>(&thrown);
      outcome.thrown = error != nullptr ? error->what_without_backtrace() : thrown.what();
      const std::size_t cause = outcome.thrown.rfind("RuntimeError: ");
      if (cause != std::string::npos) outcome.thrown.erase(0, cause + 14);  // TorchScript's stack
      outcome.thrown = outcome.thrown.substr(0, outcome.thrown.find('\n'));
    }
    return outcome;
  }

  void examine_forward() {
    const Outcome exact = run(std::nullopt);
    if (!exact.thrown.empty()) return tell_thrown(exact, "in float32 already", "");
    if (!exact.is_finite) tell_nonfinite(std::nullopt, "without autocast already");
    const Outcome low = run(found_.dtype);
    const std::string under = "under autocast to " + std::string(dtype_name(found_.dtype));
    is_whole_ = low.thrown.empty();
    if (!is_whole_) {
      tell_thrown(low, under,
                  "mezzo::AutocastGuard exact({.enabled = false});  // around it: float32");
      // bfloat16 asks for the same casts, and may get to the end.
      if (found_.dtype == at::kHalf) run(at::kBFloat16);
    } else if (exact.is_finite && !low.is_finite) {
      tell_nonfinite(found_.dtype, under + " and none in float32");
    } else if (exact.is_finite && !draws_random_) {
      compare(exact, low, under);
    }
    for (const auto& [product, places] : products_) {
      add(found_.device.is_cuda() ? FindingSeverity::warning : FindingSeverity::note, "dimensions",
          some_of({places.begin(), places.end()}),
          product + " has a size that is no multiple of 8, which tensor cores want",
          "pad batch, vocabulary or width to the next multiple of 8");
    }
  }

  void tell_thrown(const Outcome& outcome, const std::string& when, const char* remedy) {
    add(FindingSeverity::error, "forward", place_,
        "the forward pass throws " + when +
            (threw_ ? ", in " : ", in the model's code and in no op, after ") + last_op_ + ": " +
            outcome.thrown,
        remedy);
  }

  /// Tells of a pass whose result is not finite, with what an AnomalyTrace says of it.
  void tell_nonfinite(std::optional<at::ScalarType> low, const std::string& when) {
    const AnomalyTrace trace(parameters_);
    run(low);
    const std::vector<Anomaly> anomalies = trace.anomalies();
    add(FindingSeverity::error, "forward", "(model)",
        "the output has inf or NaN " + when +
            (anomalies.empty() ? "" : ": " + anomalies.front().message()));
  }

  void compare(const Outcome& exact, const Outcome& low, const std::string& under) {
    if (low.output.numel() != exact.output.numel()) return;
    const double error = ((low.output - exact.output).norm() / exact.output.norm()).item<double>();
    if (is_nonfinite(error) || error <= 0.1) return;
    add(FindingSeverity::warning, "forward", "(model)",
        "the result " + under + " differs from float32's by " + format_significant(100 * error, 2) +
            " % of it: which op loses it is not known; run parts of the model with autocast off");
  }

  /// Tensors whose values the dtype does not hold, if an op casts them or no run tells. A mask of
  /// -inf is fine; a weight of inf is not.
  void examine_values(const std::string& kind, const TensorsByName& tensors) {
    const bool is_parameter = kind == "parameter";
    std::vector<std::string> bad, large, lost;
    double largest = 0;
    for (const auto& [name, tensor] : tensors) {
      if (!tensor.is_floating_point() || !is_readable(tensor)) continue;
      const TensorSummary summary = summarize({tensor}).front();
      if (summary.nans > 0 || (is_parameter && summary.infs > 0)) bad.push_back(name);
      if (is_whole_ && !casts_.contains(name)) continue;
      if (overflows(summary.max_abs, found_.dtype)) {
        large.push_back(name);
        largest = std::max(largest, summary.max_abs);
      }
      if (!is_parameter) continue;
      const at::NoGradGuard no_grad;
      const at::Tensor values = ordered_values(tensor);
      const auto used = values.count_nonzero().item<double>();
      const auto kept = values.to(found_.dtype).count_nonzero().item<double>();
      if (kept < 0.9 * used) lost.push_back(name);
    }
    const char* const in_bfloat16 = "mezzo::AutocastGuard autocast({.dtype = torch::kBFloat16});";
    add(FindingSeverity::error, "range", some_of(bad), "this " + kind + " holds inf or NaN already",
        "torch::load(model, \"earlier.pt\");");
    add(is_parameter ? FindingSeverity::error : FindingSeverity::warning, "range", some_of(large),
        "this " + kind + " holds " + format_significant(largest) + " in magnitude, beyond " +
            end_of(found_.dtype) + ": a cast makes it inf",
        kind == "buffer" ? "mask.clamp_min(-65504.0);  // or -inf, or bfloat16" : in_bfloat16);
    add(FindingSeverity::warning, "range", some_of(lost),
        "a cast to " + std::string(dtype_name(found_.dtype)) +
            " makes more than a tenth of the values of this parameter 0",
        in_bfloat16);
  }

  /// Weights of 16 bits that stay what they are when the learning rate is added or subtracted.
  /// Masters add updates up in float, and stochastic rounding keeps them on average.
  void examine_updates() {
    const double rate = *options_.learning_rate;
    const at::NoGradGuard no_grad;
    std::vector<std::string> names;
    for (const auto& [name, weight] : parameters_) {
      if (!is_low_precision(weight) || !weight.requires_grad() || weight.numel() == 0) continue;
      double share = 0;
      for (const double change : {rate, -rate}) {
        const at::Tensor moved = (weight.to(at::kFloat) + change).to(weight.scalar_type());
        share += moved.eq(weight).to(at::kFloat).mean().item<double>() / 2;
      }
      if (share >= 0.1) names.push_back(name + " (" + format_significant(100 * share, 2) + " %)");
    }
    add(FindingSeverity::warning, "updates", some_of(names),
        "an update of " + format_significant(rate) +
            ", as Adam makes, rounds to nothing at this share of the values with "
            "WeightStorage::plain",
        "mezzo::optim::WeightStorage::fp32_master  // or stochastic_rounding, in the optimizer's "
        "options");
  }

  TensorsByName parameters_, buffers_, inputs_;
  Names all_;
  std::function<std::vector<at::Tensor>()> forward_;
  PrecisionCheckOptions options_;
  PrecisionReport found_;
  const at::AutoGradMode with_gradients_{true};  // which keep activations

  // What the forward passes showed.
  std::map<std::string, std::set<std::string>> products_;  // of odd sizes, and where they are
  std::set<std::string> casts_;
  std::string last_op_, place_ = "before the first layer";  // of the last op that was called
  bool threw_ = false;         // whether that op threw; else the model's own code behind it
  bool draws_random_ = false;  // whether an op drew random numbers
  bool is_whole_ = false;      // whether a pass in low precision came to its end
};

}  // namespace detail

/// Examines `model`: reads its parameters and buffers, and runs `forward` on `sample` in float32
/// and under autocast, with gradients enabled but no backward pass. Nothing of it needs a GPU, and
/// half can be examined on a CPU without instructions for it.
///
///     const auto report = mezzo::check_precision(model, batch.ids, torch::kCPU);
///     std::cout << report;                            // a report for people
///     return report.max_severity();                    // and a number for scripts
///
/// \param model   a module holder, a std::shared_ptr to a module, a module, or a torch::jit::Module
/// \param sample  what `forward` takes; a std::tuple where it takes several arguments; of a
///   torch::jit::Module the std::vector of IValues, and of an empty one nothing is run
/// \param device  where model and sample are
///
/// Parameters are only read; buffers and the default random generators are afterwards what they
/// were. The model runs in the mode, `train()` or `eval()`, that it is in. What `forward` throws
/// becomes a finding. Waits for the device.
/// \throws c10::Error for a model without parameters or on another device, for a device or dtype
///   that has no autocast, and inside of an autocast region
template <class Model, class Sample>
PrecisionReport check_precision(Model&& model, const Sample& sample, c10::Device device,
                                const PrecisionCheckOptions& options = {}) {
  if constexpr (detail::ModelHandle<std::remove_cvref_t<Model>>) {
    const auto module = detail::module_pointer(model);
    TORCH_CHECK(
        module != nullptr,
        "check_precision: the model is an empty holder or a null pointer; construct it first");
    return check_precision(*module, sample, device, options);
  } else {
    // What TorchScript's interpreter runs is then the graph's own ops, and not what they fuse to.
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
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
    return detail::PrecisionChecker(parameters, buffers, inputs, forward, device, options)
        .examine();
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
