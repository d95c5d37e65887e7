/// \file
/// Runs a model under the doctor's eyes.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/cast_trace.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/diagnose/anomaly_trace.h>
#include <mezzo/diagnose/detail/doctor_findings.h>
#include <mezzo/diagnose/detail/doctor_machine.h>
#include <mezzo/diagnose/detail/doctor_trace.h>
#include <mezzo/diagnose/doctor.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A model as the doctor takes it, whatever it was.
struct DoctorCase {
  NamedTensors parameters = {};  ///< those of a floating dtype
  NamedTensors buffers = {};     ///< of any dtype
  NamedTensors inputs = {};      ///< the sample's tensors: "input 0", ...
  void add_input(const at::Tensor& tensor) {
    if (tensor.defined()) inputs.emplace_back(c10::str("input ", inputs.size()), tensor);
  }

  /// Runs the sample, and gives the outputs; null: there is none.
  std::function<std::vector<at::Tensor>()> forward = nullptr;
};

/// The sentence that matters of what a model threw.
inline std::string first_line(const std::exception& thrown) {
  const auto* const error = dynamic_cast<const c10::Error*>(&thrown);
  std::string text = error != nullptr ? error->what_without_backtrace() : thrown.what();
  const std::size_t cause = text.rfind("RuntimeError: ");  // TorchScript tells its stack first
  if (cause != std::string::npos) text = text.substr(cause + 14);
  return text.substr(0, text.find('\n'));
}

/// Lends buffers other memory, and at the end gives them back their own, with their versions; and
/// the default random generators.
class BorrowedBuffers {
 public:
  explicit BorrowedBuffers(const NamedTensors& buffers) {
    for (const auto& [name, tensor] : buffers) {
      TORCH_CHECK(!tensor.is_inference(), name,
                  " was made in inference mode; make the model outside of it");
      all_.push_back(
          {tensor, tensor.variable_data(), torch::autograd::impl::version_counter(tensor)});
      torch::autograd::impl::set_version_counter(tensor, c10::VariableVersion(0));
    }
  }
  ~BorrowedBuffers() {
    const at::NoGradGuard no_grad;
    for (Lent& lent : all_) {
      lent.tensor.set_data(lent.value);
      torch::autograd::impl::set_version_counter(lent.tensor, lent.version);
    }
    random_.install();
  }
  BorrowedBuffers(const BorrowedBuffers&) = delete;
  BorrowedBuffers& operator=(const BorrowedBuffers&) = delete;

  /// Fresh copies of what the buffers held, and of the random state.
  void reset() {
    const at::NoGradGuard no_grad;
    const at::DisableRecordFunctionGuard untraced;
    for (Lent& lent : all_) lent.tensor.set_data(lent.value.clone());
    random_.install();
  }

 private:
  struct Lent {
    at::Tensor tensor;  // the model's own
    at::Tensor value;   // its memory
    c10::VariableVersion version;
  };

  std::vector<Lent> all_;
  RandomState random_;
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
    TORCH_CHECK(options.micro_batches >= 1, "diagnose: micro_batches is ", options.micro_batches,
                "; it should be at least 1");
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
    examine_machine(found_, options_.measure);
    found_.memory = kept_weights();
    if (case_.forward != nullptr) examine_forward();
    examine_values();
    add_constants(found_, constants_);
    std::stable_sort(found_.findings.begin(), found_.findings.end(),
                     [](const auto& a, const auto& b) { return a.severity > b.severity; });
    return std::move(found_);
  }

 private:
  /// What a forward pass came to.
  struct Outcome {
    std::string thrown;
    bool finite = true;
    bool is_low = false;             ///< a floating output has 16 bits
    std::vector<at::Tensor> floats;  ///< copies of the floating outputs, where they are kept
  };

  void examine_values() {
    const at::NoGradGuard no_grad;
    JudgedTensors parameters("parameter", true), buffers("buffer", false), inputs("input", false);
    const auto add = [this](JudgedTensors& judged, const NamedTensors& tensors) {
      for (const auto& [name, tensor] : tensors) {
        judged.add(name, tensor, found_.dtype, !casts_ || casts_->contains(name));
      }
    };
    add(parameters, case_.parameters);
    add(buffers, case_.buffers);
    add(inputs, case_.inputs);
    for (const JudgedTensors* judged : {&parameters, &buffers, &inputs}) judged->tell(found_);
    add_accumulation(found_, case_.parameters, options_.micro_batches);
    if (options_.learning_rate) add_updates(found_, case_.parameters, *options_.learning_rate);
  }

  struct RunOptions {
    bool keeps_outputs = false;  ///< for a comparison
    OpPolicy tried = {};         ///< on top of the user's
  };

  Outcome run(std::optional<at::ScalarType> low) { return run(low, RunOptions()); }

  Outcome run(std::optional<at::ScalarType> low, const RunOptions& how) {
    Outcome outcome;
    borrowed_.reset();
    try {
      const AutocastGuard region({.device = found_.device.type(),
                                  .dtype = low.value_or(found_.dtype),
                                  .enabled = low.has_value(),
                                  .cache = options_.cache,
                                  .policy = options_.policy});
      std::optional<AutocastGuard> trial;
      if (!how.tried.empty()) {
        const OpPolicy tried = install_op_overrides(how.tried);
        trial.emplace(AutocastSetting{.device = found_.device.type(),
                                      .dtype = low.value_or(found_.dtype),
                                      .cache = options_.cache,
                                      .policy = tried});
      }
      const std::vector<at::Tensor> outputs = case_.forward();
      const at::NoGradGuard no_grad;
      const at::DisableRecordFunctionGuard untraced;  // what follows is not the model's
      for (const at::Tensor& output : outputs) {
        if (output.defined() && output.is_floating_point()) {
          outcome.finite &= output.isfinite().all().item<bool>();
          outcome.is_low |= is_low_precision(output);
          if (how.keeps_outputs)
            outcome.floats.push_back(output.detach().to(at::kDouble, false, /*copy=*/true));
        }
      }
    } catch (const std::exception& thrown) {
      outcome.thrown = first_line(thrown);
    }
    return outcome;
  }

  /// How far outputs are from those in float32, as a share of these; inf where they cannot be
  /// compared.
  double error_of(const Outcome& outcome) const {
    constexpr double kNone = std::numeric_limits<double>::infinity();
    if (!outcome.thrown.empty() || !outcome.finite || !exact_is_finite_) return kNone;
    if (outcome.floats.empty() || outcome.floats.size() != exact_.size()) return kNone;
    const at::NoGradGuard no_grad;
    double differences = 0, squares = 0;
    for (std::size_t i = 0; i < exact_.size(); ++i) {
      if (outcome.floats[i].sizes() != exact_[i].sizes()) return kNone;
      differences += (outcome.floats[i] - exact_[i]).square().sum().item<double>();
      squares += exact_[i].square().sum().item<double>();
    }
    return squares > 0 ? std::sqrt(differences / squares) : differences > 0 ? kNone : 0;
  }

  /// Runs the model with one edit more. Whether the policy is taken, the pass ends, and its result
  /// is float32's but for rounding: no further from it than `error` and a little.
  template <class Edit>
  bool helps(const Edit& edit, double error) {
    const double limit = std::isfinite(error) ? std::max(kSmallError, 1.5 * error) : kSmallError;
    try {
      const OpPolicy policy = edit(OpPolicy());
      return error_of(run(found_.dtype, {.keeps_outputs = true, .tried = policy})) <= limit;
    } catch (const c10::Error&) {  // an op that no policy takes
      return false;
    }
  }

  /// A line that was tried and lets the pass end with float32's result: the op that threw in
  /// float32, else one of the ops that ran in low precision before; else no autocast, which was
  /// tried first.
  std::string tried_remedy(const DoctorTrace& ops) {
    std::vector<std::string> candidates = ops.lowered_ops();
    if (ops.last_op_threw()) candidates.insert(candidates.begin(), full_name(ops.last_op()));
    constexpr std::size_t kMostTried = 8;
    for (std::size_t i = 0; i < std::min(candidates.size(), kMostTried); ++i) {
      const std::string& op = candidates[i];
      if (helps([&op](const OpPolicy& policy) { return policy.deny(op); }, 0)) {
        return "mezzo::install_op_overrides(mezzo::OpPolicy().deny(\"" + op + "\"));";
      }
    }
    return c10::str("mezzo::AutocastGuard exact({.device = ", cpp_name(found_.device.type()),
                    ", .enabled = false});");
  }

  /// Tells of a pass whose result is not finite, with what an AnomalyTrace says of it.
  void tell_nonfinite(std::optional<at::ScalarType> low) {
    const AnomalyTrace trace(case_.parameters);
    run(low);
    const std::vector<Anomaly> found = trace.anomalies();
    const std::string when =
        low ? c10::str("under autocast to ", dtype_name(*low), " and none in float32")
            : "without autocast already";
    tell_forward("the output has inf or NaN " + when +
                     (found.empty() ? std::string() : ": " + found.front().message()),
                 "");
  }

  void examine_forward() {
    const Outcome exact = first_run(std::nullopt);
    if (!exact.thrown.empty()) return;  // there is nothing to compare with
    exact_ = exact.floats;
    exact_is_finite_ = exact.finite;
    if (!exact.finite) tell_nonfinite(std::nullopt);
    // The first run fills caches; what the second one does, every later one does.
    const Outcome first = first_run(found_.dtype);
    if (first.thrown.empty()) {
      if (!first.finite && exact.finite) tell_nonfinite(found_.dtype);
      if (first.is_low && !exact.is_low) add_output(found_);
      trace(found_.dtype, error_of(first));
      return;
    }
    // bfloat16 asks for the same casts, and may get to the end.
    if (found_.dtype == at::kHalf && run(at::kBFloat16).thrown.empty()) {
      trace(at::kBFloat16, error_of(first));
    }
  }

  /// If it throws, tells where, and notes the constants before that. If its result is finite and
  /// far from float32's, tells how far: a number that overflowed may have been divided by.
  Outcome first_run(std::optional<at::ScalarType> low) {
    DoctorTrace ops(case_.parameters);
    Outcome outcome = run(low, {.keeps_outputs = true});
    ops.stop();
    if (outcome.thrown.empty()) {
      const double error = low && !ops.draws_random() ? error_of(outcome) : 0;
      if (std::isfinite(error) && error > kSmallError) {
        tell_forward(c10::str("the result under autocast to ", dtype_name(*low), " differs from ",
                              "float32's by ", digits(100 * error, 2),
                              " % of it: which op loses it is not known"),
                     tried_remedy(ops));
        found_.findings.back().severity = FindingSeverity::warning;
      }
      return outcome;
    }
    const std::string when =
        low ? c10::str("under autocast to ", dtype_name(*low)) : "in float32 already";
    const char* const in =
        ops.last_op_threw() ? ", in " : ", in the model's code and in no op, after ";
    // Without autocast the model throws too: there is nothing to compare a remedy with.
    tell_forward(c10::str("the forward pass throws ", when, in, full_name(ops.last_op()), ": ",
                          outcome.thrown),
                 low ? tried_remedy(ops) : "", ops.place());
    note_constants(ops.constants());
    return outcome;
  }

  /// `error` is that of a pass without any remedy.
  void trace(at::ScalarType low, double error) {
    std::vector<CastRecord> records;
    {
      const CastTrace casts;
      NamedTensors others = case_.buffers;
      others.insert(others.end(), case_.inputs.begin(), case_.inputs.end());
      const DoctorTrace ops(case_.parameters, std::move(others));
      const bool is_whole = run(low).thrown.empty();
      if (is_whole) casts_ = ops.casts();
      std::vector<SeenConstant> seen = ops.constants();
      for (SeenConstant& constant : seen) {
        if (constant.dtype == low) constant.dtype = found_.dtype;
      }
      note_constants(seen);
      add_weight_casts(found_, ops.weights());
      add_dimensions(found_, ops.products());
      records = casts.records();
    }
    for (CastRecord& record : records) {
      std::replace(record.inputs.begin(), record.inputs.end(), low, found_.dtype);
    }
    add_float32_ops(found_, records, [&](const std::string& op) {
      return helps([&op](const OpPolicy& policy) { return policy.allow(op); }, error);
    });
  }

  void note_constants(const std::vector<SeenConstant>& seen) {
    for (const SeenConstant& one : seen) {
      if (std::find(constants_.begin(), constants_.end(), one) == constants_.end()) {
        constants_.push_back(one);
      }
    }
  }

  void tell_forward(std::string reason, std::string remedy, std::string where = "(model)") {
    found_.findings.push_back({.severity = FindingSeverity::error,
                               .topic = FindingTopic::forward,
                               .where = std::move(where),
                               .reason = std::move(reason),
                               .remedy = std::move(remedy)});
  }

  /// Ways to keep the weights, float32's first.
  std::vector<PolicyMemory> kept_weights() const {
    const std::string low(found_.dtype == at::kHalf ? "fp16" : "bf16");
    std::vector<PolicyMemory> rows = {
        {.name = "O0: float32", .bytes_a_parameter = 16},
        {.name = "O1: autocast " + low, .bytes_a_parameter = 18},
        {.name = "O2: " + low + " + masters", .bytes_a_parameter = 16},
        {.name = "O3: " + low, .bytes_a_parameter = 8}};
    if (found_.dtype == at::kBFloat16) {
      rows.push_back({.name = "bf16 + split master", .bytes_a_parameter = 14});
      rows.push_back({.name = "bf16, stochastic", .bytes_a_parameter = 8});
    }
    for (PolicyMemory& row : rows) {
      row.bytes =
          static_cast<std::int64_t>(row.bytes_a_parameter * static_cast<double>(found_.parameters));
    }
    return rows;
  }

  DoctorCase case_;
  DoctorOptions options_;
  Diagnosis found_;
  const at::AutoGradMode with_gradients_{true};  // which keep activations
  BorrowedBuffers borrowed_{case_.buffers};
  std::vector<SeenConstant> constants_;
  std::optional<std::set<std::string>> casts_;  // of a whole run in low precision
  bool exact_is_finite_ = true;
  std::vector<at::Tensor> exact_;  // the floating outputs in float32

  static constexpr double kSmallError = 0.1;  // of outputs in 16 bits
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
