/// \file
/// The doctor: what will low precision do to this model, on this machine? docs/doctor.md has
/// examples.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/autocast/detail/recommended.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/hardware.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/model_list.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly_trace.h>
#include <mezzo/diagnose/detail/op_observer.h>
#include <mezzo/diagnose/finding.h>
#include <mezzo/diagnose/summarize.h>

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
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// All that was found. The topics of findings are "forward" (the pass throws, gives inf or NaN, or
/// differs from float32's), "range" (values, constants and eps that the dtype does not hold),
/// "hardware", "dimensions" (sizes that are no multiples of 8) and "updates" (16-bit weights that
/// an update of the learning rate's size leaves as they are).
struct Diagnosis {
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< that was asked for
  at::ScalarType dtype = at::kBFloat16;                    ///< that the model was looked at for
  std::int64_t parameters = 0;                             ///< elements of all parameters
  std::vector<Finding> findings = {};                      ///< the worst first

  /// Returns 0 for nothing but notes, 1 for a warning, 2 for an error.
  int exit_status() const {
    int status = 0;
    for (const Finding& finding : findings) {
      status = std::max(status, static_cast<int>(finding.severity));
    }
    return status;
  }
};

/// Writes a report for a terminal of 100 columns.
inline std::ostream& operator<<(std::ostream& stream, const Diagnosis& diagnosis) {
  std::array<int, 3> counts{};
  for (const Finding& finding : diagnosis.findings) {
    ++counts.at(static_cast<std::size_t>(finding.severity));
  }
  std::ostringstream text;
  text << "mezzo's doctor: " << std::to_string(diagnosis.parameters) << " parameters on "
       << diagnosis.device << ", looked at for " << detail::dtype_name(diagnosis.dtype) << ": "
       << counts[2] << " errors, " << counts[1] << " warnings, " << counts[0] << " notes\n\n";
  for (const Finding& finding : diagnosis.findings) text << finding;
  return stream << text.str();
}

/// What the doctor looks for.
struct DoctorOptions {
  /// Half or bfloat16; unset: default_autocast_dtype(device).
  std::optional<at::ScalarType> dtype = std::nullopt;
  PolicyRef policy = {};  ///< as the training's regions have it
  /// Of training with weights of 16 bits and WeightStorage::plain. Adam moves a weight by about the
  /// rate; unset: updates are not looked at.
  std::optional<double> learning_rate = std::nullopt;
};

namespace detail {

/// Returns "a, b, c and 4 more".
inline std::string some_of(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  return names.size() > kShown ? text + " and " + std::to_string(names.size() - kShown) + " more"
                               : text;
}

/// Returns "float16, which ends at 65504".
inline std::string end_of(at::ScalarType dtype) {
  return std::string(dtype_name(dtype)) + ", which ends at " +
         (dtype == at::kHalf ? "65504" : "3.39e+38");
}

/// Tells whether the hardware has instructions for the dtype, as far as it lets itself be asked.
inline Finding hardware_finding(c10::Device device, at::ScalarType dtype) {
  const std::string name(dtype_name(dtype));
  Finding finding{.topic = "hardware", .where = device.str()};
  finding.reason = "products in " + name + " are computed by instructions of their own";
  std::string why;
  if (const auto gpu = device.is_cuda() ? compute_capability(device) : std::nullopt) {
    if (gpu->major < (dtype == at::kHalf ? 7 : 8)) why = "this GPU has no tensor cores for it";
  } else if (const CpuFeatures cpu = cpu_features(); device.is_cpu() && cpu.known) {
    if (!(dtype == at::kHalf ? cpu.fp16 : cpu.bf16)) {
      why = lack_of_instructions(name);
    }
  } else {
    finding.reason = "which instructions this hardware has is not known: time a step in " + name;
  }
  if (why.empty()) return finding;
  finding.severity = FindingSeverity::warning;
  finding.reason =
      why + ", and emulates products in " + name + ": autocast saves memory here and no time";
  finding.remedy = "auto setting = mezzo::recommended(torch::" +
                   std::string(device.is_cpu() ? "kCPU" : "kCUDA") +
                   ");  // float32 where nothing else is fast";
  return finding;
}

/// Notes what the ops of a forward pass show: constants that the dtype of their result does not
/// hold, products of sizes that are no multiples of 8, and which tensors are cast.
class DoctorTrace final : public OpObserver {
 public:
  /// \param others  buffers and inputs, whose casts are noted too
  /// \param dtype   that constants are judged for; a pass in bfloat16 may stand for one in half
  DoctorTrace(const NamedTensors& parameters, NamedTensors others, at::ScalarType dtype)
      : OpObserver(parameters), others_(std::move(others)), dtype_(dtype) {
    start();
  }
  ~DoctorTrace() override { stop(); }

  std::vector<Finding> constants;
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::vector<std::string>> products;
  std::set<std::string> casts;
  std::string last_op, place = "before the first layer";  ///< of the last op that was called
  bool threw = false;         ///< whether that op threw; else the model's own code behind it
  bool draws_random = false;  ///< whether an op drew random numbers

 private:
  void entered(ObservedOp& op) override {
    const std::string& name = op.name();
    draws_random |= op.handle.hasTag(at::Tag::nondeterministic_seeded);
    if (op.depth == 0) {
      last_op = c10::toString(op.handle.operator_name());
      threw = false;
      if (!op.module.empty()) place = (op.reads_module ? "" : "after ") + op.module;
    }
    if (name == "aten::_to_copy" || name == "aten::copy_") {
      const c10::IValue& read = op.inputs[name == "aten::copy_" ? 1 : 0];
      if (read.isTensor()) {
        casts.insert(names().name_of(read.toTensor()));
        casts.insert(others_.name_of(read.toTensor()));
      }
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

  void left(const ObservedOp& op, OpArguments returned) override {
    if (op.depth > 0) return;
    threw = op.threw;
    // Norms add their eps in float32, and kernels multiply by a number in float32: where a product
    // is too large, its result shows it.
    for (const char* const other : {"_norm", "::mul", "::div"}) {
      if (op.name().find(other) != std::string::npos) return;
    }
    at::ScalarType dtype = at::ScalarType::Undefined;  // of the result, or of what the op read
    const OpArguments shown = op.threw ? arguments_in(op.inputs) : returned;
    for (const at::Tensor& tensor : tensors_in(shown)) {
      if (!tensor.defined() || !tensor.is_floating_point()) continue;
      if (dtype == at::ScalarType::Undefined) dtype = tensor.scalar_type();
    }
    if (dtype != at::kHalf && dtype != at::kBFloat16) return;
    if (dtype_ == at::kHalf) dtype = at::kHalf;
    const auto& arguments = op.handle.schema().arguments();
    for (std::size_t i = 0; i < std::min(op.inputs.size(), arguments.size()); ++i) {
      const c10::IValue& input = op.inputs[i];
      const bool is_number =
          arguments[i].type()->annotation_str().find("number") != std::string::npos;
      double value = input.isDouble() ? input.toDouble() : 0;
      if (is_number && input.isInt()) value = static_cast<double>(input.toInt());
      if (overflows(value, dtype) || vanishes(value, dtype)) note_constant(op, value, dtype);
    }
  }

  void note(std::int64_t m, std::int64_t k, std::int64_t n, const ObservedOp& op) {
    if (m % 8 == 0 && k % 8 == 0 && n % 8 == 0) return;
    auto& places = products[{m, k, n}];
    const std::string where = (op.reads_module ? "" : "after ") + op.module;
    if (std::find(places.begin(), places.end(), where) == places.end()) places.push_back(where);
  }

  void note_constant(const ObservedOp& op, double value, at::ScalarType dtype) {
    const std::string name = op.name().substr(op.name().rfind(':') + 1);
    Finding finding{.topic = "range", .where = place};
    finding.reason =
        name + " with " + digits(value) + " computes in " + std::string(dtype_name(dtype));
    if (overflows(value, dtype)) {
      finding.severity = FindingSeverity::error;
      finding.reason = name + " with " + digits(value) + " computes in " + end_of(dtype) +
                       ": it throws, or makes inf and NaN";
      finding.remedy = name.starts_with("masked_fill")
                           ? "scores.masked_fill(mask, -std::numeric_limits<float>::infinity());"
                       : name.starts_with("clamp")
                           ? "x.clamp_min(-65504.0)  // a number that the dtype holds"
                           : "";
    } else {
      finding.severity = FindingSeverity::warning;
      finding.reason += ", whose smallest number is " +
                        digits(std::ldexp(1, ExponentRange::of(dtype).smallest), 2) +
                        ": it becomes 0 and guards nothing";
      finding.remedy =
          "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps);  // a larger eps may overflow it";
    }
    for (const Finding& known : constants) {
      if (known.where == finding.where && known.reason == finding.reason) return;
    }
    constants.push_back(std::move(finding));
  }

  Names others_;
  at::ScalarType dtype_;
};

/// A model as the doctor takes it, whatever it was.
struct DoctorCase {
  NamedTensors parameters;   ///< those of a floating dtype
  NamedTensors buffers;      ///< of any dtype
  NamedTensors inputs = {};  ///< the sample's tensors: "input 0", ...
  /// Runs the sample, and gives the outputs; null: there is none.
  std::function<std::vector<at::Tensor>()> forward = nullptr;
};

class Doctor {
 public:
  Doctor(DoctorCase one, c10::Device device, const DoctorOptions& options)
      : case_(std::move(one)),
        options_(options),
        found_{.device = device,
               .dtype = options.dtype.value_or(default_autocast_dtype(device.type()))} {
    check_has_autocast(device.type());
    TORCH_CHECK(autocast_accepts(device.type(), found_.dtype), "diagnose: dtype is ", found_.dtype,
                "; use torch::kHalf or torch::kBFloat16");
    TORCH_CHECK(!at::autocast::is_autocast_enabled(device.type()),
                "diagnose: call it outside of Autocast regions, it opens its own");
    TORCH_CHECK(!options.learning_rate || *options.learning_rate > 0, "diagnose: learning_rate is ",
                options.learning_rate.value_or(0), "; it should be positive");
    TORCH_CHECK(!case_.parameters.empty(),
                "diagnose: the model has no parameters; register them and its modules, or diagnose "
                "the model that trains");
    for (const auto& [name, parameter] : case_.parameters) {
      TORCH_CHECK(parameter.device().type() == device.type(), "diagnose: parameter ", name,
                  " is on ", parameter.device(), " and device is ", device,
                  "; call model->to(device) first");
      found_.parameters += parameter.numel();
    }
  }

  Diagnosis examine() {
    found_.findings.push_back(hardware_finding(found_.device, found_.dtype));
    if (case_.forward != nullptr) examine_forward();
    examine_values("parameter", case_.parameters);
    examine_values("buffer", case_.buffers);
    examine_values("input", case_.inputs);
    if (options_.learning_rate) examine_updates();
    std::stable_sort(found_.findings.begin(), found_.findings.end(),
                     [](const auto& a, const auto& b) { return a.severity > b.severity; });
    return std::move(found_);
  }

 private:
  void add(FindingSeverity severity, const char* topic, std::string where, std::string reason,
           std::string remedy = "") {
    found_.findings.push_back(
        {severity, topic, std::move(where), std::move(reason), std::move(remedy)});
  }

  /// What a forward pass came to.
  struct Outcome {
    std::string thrown = {};
    bool is_finite = true;
    std::vector<at::Tensor> outputs = {};  // the floating ones, as doubles
  };

  Outcome run(std::optional<at::ScalarType> low) {
    Outcome outcome;
    const RandomState random;
    std::vector<at::Tensor> kept;  // the buffers' memory; the pass gets other memory
    for (const auto& [name, buffer] : case_.buffers) {
      const Unobserved unobserved;
      kept.push_back(buffer.variable_data());
      buffer.set_data(kept.back().clone());
    }
    const auto restore = c10::make_scope_exit([&] {
      const Unobserved unobserved;
      for (std::size_t i = 0; i < kept.size(); ++i) case_.buffers[i].second.set_data(kept[i]);
      random.install();
    });
    try {
      const AutocastGuard region({.device = found_.device.type(),
                                  .dtype = low.value_or(found_.dtype),
                                  .enabled = low.has_value(),
                                  .policy = options_.policy});
      for (const at::Tensor& output : case_.forward()) {
        const Unobserved unobserved;  // this is not the model's
        if (!output.defined() || !output.is_floating_point()) continue;
        outcome.is_finite &= output.isfinite().all().item<bool>();
        outcome.outputs.push_back(output.detach().to(at::kDouble, false, /*copy=*/true));
      }
    } catch (const std::exception& thrown) {
      const auto* const error = dynamic_cast<const c10::Error*>(&thrown);
      outcome.thrown = error != nullptr ? error->what_without_backtrace() : thrown.what();
      const std::size_t cause =
          outcome.thrown.rfind("RuntimeError: ");  // TorchScript's stack first
      if (cause != std::string::npos) outcome.thrown = outcome.thrown.substr(cause + 14);
      outcome.thrown = outcome.thrown.substr(0, outcome.thrown.find('\n'));
    }
    return outcome;
  }

  /// Runs the pass. If it throws, tells where.
  Outcome traced_run(std::optional<at::ScalarType> low, const DoctorTrace& trace) {
    const Outcome outcome = run(low);
    if (outcome.thrown.empty()) return outcome;
    const std::string when =
        low ? "under autocast to " + std::string(dtype_name(*low)) : "in float32 already";
    add(FindingSeverity::error, "forward", trace.place,
        "the forward pass throws " + when +
            (trace.threw ? ", in " : ", in the model's code and in no op, after ") + trace.last_op +
            ": " + outcome.thrown,
        low ? "mezzo::AutocastGuard exact({.enabled = false});  // around it: float32" : "");
    return outcome;
  }

  void examine_forward() {
    NamedTensors others = case_.buffers;
    others.insert(others.end(), case_.inputs.begin(), case_.inputs.end());
    DoctorTrace trace(case_.parameters, others, found_.dtype);
    const Outcome exact = traced_run(std::nullopt, trace);
    if (exact.thrown.empty()) compare(exact, trace);
    found_.findings.insert(found_.findings.end(), trace.constants.begin(), trace.constants.end());
  }

  /// Runs the pass under autocast.
  void compare(const Outcome& exact, DoctorTrace& trace) {
    if (!exact.is_finite) tell_nonfinite(std::nullopt);
    const Outcome low = traced_run(found_.dtype, trace);
    // bfloat16 asks for the same casts, and may get to the end.
    if (!low.thrown.empty() && found_.dtype == at::kHalf) run(at::kBFloat16);
    add_dimensions(trace);
    if (!low.thrown.empty()) return;
    casts_ = trace.casts;
    if (!low.is_finite && exact.is_finite) tell_nonfinite(found_.dtype);
    if (!low.is_finite || !exact.is_finite || trace.draws_random) return;
    double differences = 0, squares = 0;
    for (std::size_t i = 0; i < std::min(low.outputs.size(), exact.outputs.size()); ++i) {
      if (low.outputs[i].sizes() != exact.outputs[i].sizes()) return;
      differences += (low.outputs[i] - exact.outputs[i]).square().sum().item<double>();
      squares += exact.outputs[i].square().sum().item<double>();
    }
    const double error = std::sqrt(differences / squares);
    if (nonfinite_bits(error) || error <= 0.1) return;
    add(FindingSeverity::warning, "forward", "(model)",
        "the result under autocast to " + std::string(dtype_name(found_.dtype)) +
            " differs from float32's by " + digits(100 * error, 2) +
            " % of it: which op loses it is not known; run parts of the model with autocast off");
  }

  /// Tells of a pass whose result is not finite, with what an AnomalyTrace says of it.
  void tell_nonfinite(std::optional<at::ScalarType> low) {
    const AnomalyTrace trace(case_.parameters);
    run(low);
    const std::vector<Anomaly> anomalies = trace.anomalies();
    const std::string when =
        low ? "under autocast to " + std::string(dtype_name(*low)) + " and none in float32"
            : "without autocast already";
    add(FindingSeverity::error, "forward", "(model)",
        "the output has inf or NaN " + when +
            (anomalies.empty() ? "" : ": " + anomalies.front().message()));
  }

  void add_dimensions(const DoctorTrace& trace) {
    for (const auto& [size, places] : trace.products) {
      const auto [m, k, n] = size;
      using std::to_string;
      add(found_.device.is_cuda() ? FindingSeverity::warning : FindingSeverity::note, "dimensions",
          some_of(places),
          (m == 0 ? "a convolution of " + to_string(k) + " to " + to_string(n) + " channels"
                  : "a product of " + to_string(m) + " x " + to_string(k) + " with " +
                        to_string(k) + " x " + to_string(n)) +
              " has a size that is no multiple of 8, which tensor cores want",
          "pad batch, vocabulary or width to the next multiple of 8");
    }
  }

  /// Tensors whose values the dtype does not hold, if an op casts them or no run tells. A mask of
  /// -inf is fine; a weight of inf is not.
  void examine_values(const std::string& kind, const NamedTensors& tensors) {
    const bool is_parameter = kind == "parameter";
    std::vector<std::string> bad, large, lost;
    double largest = 0;
    for (const auto& [name, tensor] : tensors) {
      if (!tensor.is_floating_point() || !is_readable(tensor)) continue;
      const TensorSummary summary = summarize({tensor}).front();
      const bool is_cast = !casts_ || casts_->contains(name);
      if (summary.nans > 0 || (is_parameter && summary.infs > 0)) bad.push_back(name);
      if (!is_cast) continue;
      if (overflows(summary.largest, found_.dtype)) {
        large.push_back(name);
        largest = std::max(largest, summary.largest);
      }
      if (!is_parameter) continue;
      const at::NoGradGuard no_grad;
      const at::Tensor values = ordered_values(tensor);
      const auto used = values.count_nonzero().item<double>();
      const auto kept = values.to(found_.dtype).count_nonzero().item<double>();
      if (kept < 0.9 * used) lost.push_back(name);
    }
    const char* const in_bfloat16 = "mezzo::AutocastGuard autocast({.dtype = torch::kBFloat16});";
    if (!bad.empty()) {
      add(FindingSeverity::error, "range", some_of(bad),
          "this " + kind + " holds inf or NaN already", "torch::load(model, \"earlier.pt\");");
    }
    if (!large.empty()) {
      add(is_parameter ? FindingSeverity::error : FindingSeverity::warning, "range", some_of(large),
          "this " + kind + " holds " + digits(largest) + " in magnitude, beyond " +
              end_of(found_.dtype) + ": a cast makes it inf",
          kind == "buffer" ? "mask.clamp_min(-65504.0);  // or -inf, or bfloat16" : in_bfloat16);
    }
    if (!lost.empty()) {
      add(FindingSeverity::warning, "range", some_of(lost),
          "a cast to " + std::string(dtype_name(found_.dtype)) +
              " makes more than a tenth of the values of this parameter 0",
          in_bfloat16);
    }
  }

  /// Weights of 16 bits that stay what they are when the learning rate is added or subtracted.
  /// Masters add updates up in float, and stochastic rounding keeps them on average.
  void examine_updates() {
    const double rate = *options_.learning_rate;
    const at::NoGradGuard no_grad;
    std::vector<std::string> names;
    for (const auto& [name, parameter] : case_.parameters) {
      if (!is_low_precision(parameter) || !parameter.requires_grad() || parameter.numel() == 0) {
        continue;
      }
      const auto stays = [&weight = parameter](double change) {
        const at::Tensor moved = (weight.to(at::kFloat) + change).to(weight.scalar_type());
        return moved.eq(weight).to(at::kFloat).mean().item<double>();
      };
      const double share = (stays(rate) + stays(-rate)) / 2;
      if (share >= 0.1) names.push_back(name + " (" + digits(100 * share, 2) + " %)");
    }
    if (names.empty()) return;
    add(FindingSeverity::warning, "updates", some_of(names),
        "an update of " + digits(rate) +
            ", as Adam makes, rounds to nothing at this share of the values with "
            "WeightStorage::plain",
        "mezzo::optim::WeightStorage::master  // or stochastic, in the optimizer's options");
  }

  DoctorCase case_;
  DoctorOptions options_;
  Diagnosis found_;
  const at::AutoGradMode with_gradients_{true};  // which keep activations
  std::optional<std::set<std::string>> casts_;   // of a whole run in low precision
};

template <class T>
inline constexpr bool kIsTuple = false;
template <class... T>
inline constexpr bool kIsTuple<std::tuple<T...>> = true;

/// Calls `keep` with the tensors of a model's result or sample; of TorchScript's too.
template <class Value, class Keep>
void visit_tensors(Value& value, const Keep& keep) {
  if constexpr (std::is_same_v<std::remove_const_t<Value>, c10::IValue>) {
    value.visit([&keep](const c10::IValue& inner) {
      if (inner.isTensor()) keep(inner.toTensor());
      return false;
    });
  } else if constexpr (std::is_same_v<std::remove_const_t<Value>, std::vector<c10::IValue>>) {
    for (const c10::IValue& one : value) visit_tensors(one, keep);
  } else {
    for_each_tensor(value, keep);
  }
}

template <class Module, class Sample>
Diagnosis diagnose_module(Module& module, const Sample& sample, c10::Device device,
                          const DoctorOptions& options) {
  // What TorchScript's interpreter runs is then the graph's own ops, and not what they fuse to.
  const torch::jit::GraphOptimizerEnabledGuard as_written(false);
  DoctorCase one{.parameters = NamedOnce().floating(module.named_parameters()),
                 .buffers = NamedOnce().all(module.named_buffers())};
  visit_tensors(sample, [&one](const at::Tensor& tensor) {
    if (tensor.defined())
      one.inputs.emplace_back("input " + std::to_string(one.inputs.size()), tensor);
  });
  one.forward = [&module, &sample] {
    const auto call = [&module](const auto&... arguments) { return module.forward(arguments...); };
    std::vector<at::Tensor> outputs;
    const auto keep = [&outputs](const at::Tensor& tensor) { outputs.push_back(tensor); };
    if constexpr (kIsTuple<Sample>) {
      auto result = std::apply(call, sample);
      visit_tensors(result, keep);
    } else {
      auto result = call(sample);
      visit_tensors(result, keep);
    }
    return outputs;
  };
  if constexpr (std::is_same_v<Sample, std::vector<c10::IValue>>) {
    if (sample.empty()) one.forward = nullptr;
  }
  return Doctor(std::move(one), device, options).examine();
}

}  // namespace detail

/// Examines `model`: reads its parameters and buffers, and runs `forward` on `sample` in float32
/// and under autocast, with gradients enabled but no backward pass. Nothing of it needs a GPU, and
/// half can be examined on a CPU without instructions for it.
///
///     const auto diagnosis = mezzo::diagnose(model, batch.ids, torch::kCPU);
///     std::cout << diagnosis;                            // a report for people
///     return diagnosis.exit_status();                    // and a number for scripts
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
Diagnosis diagnose(Model&& model, const Sample& sample, c10::Device device,
                   const DoctorOptions& options = {}) {
  if constexpr (detail::ModelHandle<std::remove_cvref_t<Model>>) {
    const auto module = detail::module_pointer(model);
    TORCH_CHECK(module != nullptr,
                "diagnose: the model is an empty holder or a null pointer; construct it first");
    return detail::diagnose_module(*module, sample, device, options);
  } else {
    return detail::diagnose_module(model, sample, device, options);
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
