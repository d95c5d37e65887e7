/// \file
/// What an AnomalyTrace tells: the op that made an inf or NaN, and the ops before it.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What one tensor holds.
struct ValueRange {
  std::string parameter = {};  ///< its name, where the tensor is one, or autocast's copy of one
  /// Undefined of what holds no floating numbers, which is not read.
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::int64_t> sizes = {};  ///< the tensor's shape
  /// Of the values that are finite, with sign (of complex ones the magnitudes); 0 where there are
  /// none.
  double minimum = 0;
  double maximum = 0;              ///< likewise
  double smallest = 0;             ///< magnitude of the values that are finite
  double largest = 0;              ///< likewise
  std::int64_t infs = 0;           ///< of either sign
  std::int64_t negative_infs = 0;  ///< how many of `infs` are -inf
  std::int64_t nans = 0;           ///< how many values are NaN

  /// Whether no value is inf or NaN.
  bool is_finite() const { return infs + nans == 0; }
  /// "encoder.weight float16 [8, 4] -3.1 to 3.2, |x| from 0.001, 1 inf".
  std::string to_string() const;
};

/// One op that ran.
struct AnomalyFrame {
  std::string op = {};      ///< "aten::addmm"
  std::string caller = {};  ///< the op that the program called, if that is another: "aten::linear"
  /// The autograd node in whose backward pass the op ran: "AddmmBackward0"; empty in the forward
  /// pass.
  std::string node = {};
  /// The name, in the model, of the module whose parameters the op reads. An op that reads none has
  /// the module of the op before it; an op of the backward pass has that of the forward op that
  /// made its node. Empty until a parameter has been read.
  std::string module = {};
  bool reads_module = false;             ///< whether the op itself reads a parameter of `module`
  std::vector<ValueRange> outputs = {};  ///< of what it returned

  /// Whether the op ran in a backward pass.
  bool is_backward() const { return !node.empty(); }
  /// "aten::addmm (in aten::linear), in encoder.fc".
  std::string place() const;
};

/// What made the first value that is not finite.
enum class AnomalyCause : std::uint8_t {
  /// An input was inf or NaN, and no op that was watched made it: a parameter, the batch, a
  /// constant.
  arrived,
  /// In the backward pass, and the dtype would have held the result without the loss scale: the
  /// scaler lowers it, and nothing is wrong with the model.
  loss_scale,
  low_precision,  ///< the op's dtype does not hold the result; float32 does
  /// A wider type gives an inf or NaN of the same inputs too. The inputs themselves may come from
  /// rounding where `after_low_precision`.
  model,
  unknown,  ///< the op could not be run again
};

/// An op whose result has an inf or NaN that was not in what it read.
struct Anomaly {
  AnomalyFrame frame = {};                     ///< the op, and what it returned
  std::vector<ValueRange> inputs = {};         ///< before the op ran
  AnomalyCause cause = AnomalyCause::unknown;  ///< what made the inf or NaN
  /// The dtype in which the op ran again, float32 or, of an op in float32, float64; and what the
  /// result was then.
  std::optional<at::ScalarType> wide_dtype = std::nullopt;
  std::vector<ValueRange> wide_outputs = {};  ///< of what the op returned in `wide_dtype`
  double loss_scale = 1;                      ///< at that time; 1 in the forward pass
  /// An eps that was added to an input, or that it was clamped to, and that `lost_in`, the dtype of
  /// that op's result, rounds to 0.
  std::optional<double> lost_scalar = std::nullopt;
  at::ScalarType lost_in = at::ScalarType::Undefined;  ///< see `lost_scalar`
  /// Whether a floating op ran in 16 bits before: what this op read may carry its rounding.
  bool after_low_precision = false;
  std::optional<int> rank = std::nullopt;  ///< of AnomalyTraceOptions

  /// All of this as one line.
  std::string message() const;
};

/// What a trace records.
struct AnomalyTraceOptions {
  std::size_t frames = 20;  ///< how many ops before the first anomaly are kept
  /// Asked when a backward pass makes an inf or NaN: `[&] { return scaler.get_scale(); }`. Without
  /// it loss_scale is never named as a cause.
  std::function<double()> loss_scale = {};
  std::optional<int> rank = std::nullopt;  ///< of this process in a job of several: it is named
};

namespace detail {

inline std::string ranges_text(const std::vector<ValueRange>& ranges) {
  std::string text;
  for (const ValueRange& range : ranges) {
    if (range.dtype == at::ScalarType::Undefined) continue;
    text += (text.empty() ? "" : "; ") + range.to_string();
  }
  return text.empty() ? "nothing" : text;
}

inline bool has_zero(const ValueRange& range) {
  return range.infs + range.nans < c10::multiply_integers(range.sizes) && range.smallest == 0;
}

/// Whether a 0 that the op read may be an eps that its dtype lost: what it divides by, or the
/// number that it takes the logarithm or root of, unless another of these is negative.
inline bool blames_eps(const Anomaly& anomaly) {
  if (!anomaly.lost_scalar || anomaly.inputs.empty()) return false;
  const ValueRange& last = anomaly.inputs.back();
  return has_zero(last) && (anomaly.inputs.size() > 1 || last.minimum >= 0);
}

inline bool has_nan(const Anomaly& anomaly) {
  return std::any_of(anomaly.frame.outputs.begin(), anomaly.frame.outputs.end(),
                     [](const ValueRange& range) { return range.nans > 0; });
}

inline std::ptrdiff_t count_inputs(const Anomaly& anomaly, bool (*holds)(const ValueRange& range)) {
  return std::count_if(anomaly.inputs.begin(), anomaly.inputs.end(), holds);
}

inline bool has_infs(const ValueRange& range) { return range.infs > 0; }

/// Whether the last number that the op read, its divisor, has a 0; so has an integer divisor, which
/// is not among the inputs.
inline bool divides_by_zero(const Anomaly& anomaly) {
  const bool is_integer = anomaly.frame.op.starts_with("aten::div") && anomaly.inputs.size() == 1;
  return is_integer || (!anomaly.inputs.empty() && has_zero(anomaly.inputs.back()));
}

/// The last input of a batch norm is the running variance, where it has one; a parameter is its
/// bias.
inline bool reads_negative_variance(const Anomaly& anomaly) {
  return anomaly.inputs.size() > 2 && anomaly.inputs.back().parameter.empty() &&
         anomaly.inputs.back().minimum < 0;
}

/// What leaves an op without a finite result in any type, and what to do.
struct InputFault {
  /// Names that a space parts: of ops without "aten::" and a last "_", for the forward pass, and of
  /// nodes without "Backward0", for the backward pass. "*": any.
  std::string_view ops, nodes;
  bool (*holds)(const Anomaly& anomaly);
  const char* says;

  bool fits(const Anomaly& anomaly) const {
    const AnomalyFrame& frame = anomaly.frame;
    const std::string node = frame.node.substr(0, frame.node.find("Backward"));
    const bool is_named =
        frame.is_backward()
            ? is_in(nodes, node)
            : is_in(ops, plain(frame.op)) || (is_inside(frame) && is_in(ops, plain(frame.caller)));
    return is_named && holds(anomaly);
  }

  /// Whether the program called another op, of which this is a part.
  static bool is_inside(const AnomalyFrame& frame) {
    return !frame.caller.empty() && !is_in("divide true_divide", plain(frame.caller));
  }

 private:
  static bool is_in(std::string_view names, std::string_view name) {
    return names == "*" ||
           c10::str(' ', names, ' ').find(c10::str(' ', name, ' ')) != std::string::npos;
  }

  static std::string_view plain(std::string_view op) {
    op.remove_prefix(std::min(op.size(), op.rfind(':') + 1));
    if (op.ends_with('_')) op.remove_suffix(1);
    return op;
  }
};

/// The faults in the order in which they are tried. Each follows from the op and the ranges alone.
inline constexpr auto kInputFaults = std::to_array<InputFault>({
    {"*", "*",
     [](const Anomaly& anomaly) {
       return count_inputs(anomaly, [](const ValueRange& range) {
                return c10::multiply_integers(range.sizes) == 0;
              }) > 0;
     },
     "it is the mean, deviation or loss of no elements: skip such a batch"},
    {"_softmax _log_softmax _safe_softmax", "Softmax LogSoftmax SafeSoftmax Logsumexp",
     [](const Anomaly& anomaly) {
       return count_inputs(anomaly,
                           [](const ValueRange& range) { return range.negative_infs > 0; }) > 0;
     },
     "a row is -inf as a whole: leave each row a finite number"},
    {"mul mm bmm addmm baddbmm", "",
     [](const Anomaly& anomaly) {
       return count_inputs(anomaly, has_infs) > 0 && count_inputs(anomaly, has_zero) > 0;
     },
     "it multiplied inf by 0: masked_fill or torch::where in place of the product"},
    {"add sub rsub", "", [](const Anomaly& anomaly) { return count_inputs(anomaly, has_infs) > 1; },
     "it took inf from inf: leave each row a finite number"},
    {"*", "",
     [](const Anomaly& anomaly) {
       return anomaly.inputs.empty() && !InputFault::is_inside(anomaly.frame);
     },
     "a number that the program gave it is not finite"},
    {"sum mean nll_loss_forward nll_loss2d_forward", "",
     [](const Anomaly& anomaly) {
       return count_inputs(anomaly, has_infs) > 0 && !has_nan(anomaly);
     },
     "it adds up the inf of a mask: leave what is masked without label and weight, or mask it with "
     "a finite number"},
    {"nll_loss_forward nll_loss2d_forward", "", [](const Anomaly&) { return true; },
     "no label counts: skip a batch without labels"},
    {"_ctc_loss _cudnn_ctc_loss", "", [](const Anomaly&) { return true; },
     "a target has more labels than steps to hold them: zero_infinity(true), or skip it"},
    {"std std_mean var var_mean", "", [](const Anomaly&) { return true; },
     "it took the deviation of a single value: unbiased = false, or more values"},
    {"native_batch_norm cudnn_batch_norm", "", reads_negative_variance,
     "the running variance is negative: reset_running_stats(), or load a checkpoint from before"},
    {"native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm", "",
     [](const Anomaly&) { return true; },
     "a variance of 0 without eps: give the layer a larger eps"},
    {"acos asin atanh erfinv", "Acos Asin Atanh Erfinv", [](const Anomaly&) { return true; },
     "the input of the inverse function reaches 1 or exceeds it: clamp it to less than 1"},
    {"acosh", "Acosh", [](const Anomaly&) { return true; },
     "it takes numbers above 1: clamp_min(1 + eps) before it"},
    {"log1p", "Log1P", [](const Anomaly&) { return true; },
     "it takes numbers above -1: clamp_min(eps - 1) before it"},
    {"logit", "Logit", [](const Anomaly&) { return true; },
     "it takes probabilities between 0 and 1: clamp(eps, 1 - eps) before it"},
    {"logdet slogdet linalg_slogdet", "", [](const Anomaly&) { return true; },
     "the determinant is 0 or negative: add an eps to the diagonal of a covariance"},
    {"log log2 log10 sqrt rsqrt pow", "", has_nan,
     "it read negative numbers, which have no logarithm, root or broken power: clamp_min(eps) "
     "before it, or add an eps to a difference that rounding makes negative"},
    {"log log2 log10 rsqrt pow xlogy", "Pow",
     [](const Anomaly& anomaly) { return count_inputs(anomaly, has_zero) > 0; },
     "it read 0, which has no logarithm, inverse root or negative power: clamp_min(eps) before it"},
    {"div reciprocal fmod remainder", "",
     [](const Anomaly& anomaly) {
       return divides_by_zero(anomaly) && !InputFault::is_inside(anomaly.frame);
     },
     "it divided by 0: add an eps to the divisor"},
    {"div reciprocal", "", divides_by_zero,
     "it divided by 0, inside of the op that was called: change what that reads"},
    {"", "Sqrt", divides_by_zero, "it divided by 0, the root of 0: add an eps under the root"},
    {"", "Log Log2 Log10", divides_by_zero, "it divided by 0: clamp_min(eps) before the logarithm"},
    {"", "*",
     [](const Anomaly& anomaly) {
       return anomaly.frame.op.find("div") != std::string::npos && divides_by_zero(anomaly);
     },
     "it divided by 0, for its forward op has no gradient at what it read: keep that away from "
     "there, or detach it"},
});

/// Names the fault; where op and ranges do not decide, "not known".
inline std::string fault_of_inputs(const Anomaly& anomaly) {
  const auto* const found =
      std::find_if(kInputFaults.begin(), kInputFaults.end(),
                   [&](const InputFault& fault) { return fault.fits(anomaly); });
  return found != kInputFaults.end() ? found->says
                                     : "why is not known; the ranges of what it read are above";
}

/// Why, and what to do.
inline std::string cause_text(const Anomaly& anomaly) {
  const auto bad = std::find_if(anomaly.frame.outputs.begin(), anomaly.frame.outputs.end(),
                                [](const ValueRange& range) { return !range.is_finite(); });
  const std::string dtype(dtype_name(bad->dtype));
  const std::string wide(dtype_name(anomaly.wide_dtype.value_or(at::kFloat)));
  double largest = 0;
  for (const ValueRange& range : anomaly.wide_outputs) largest = std::max(largest, range.largest);
  switch (anomaly.cause) {
    case AnomalyCause::arrived:
      for (const ValueRange& input : anomaly.inputs) {
        if (!input.is_finite() && !input.parameter.empty()) {
          return "The parameter " + input.parameter +
                 " is not finite: no step repairs it, load a checkpoint from before";
        }
      }
      return "An input is not finite, and no op that was watched made it: look at the batch, at "
             "constants and buffers, and at what was computed before the trace";
    case AnomalyCause::loss_scale:
      return c10::str("In ", wide, " it is finite, up to ", digits(largest), ", and ", dtype,
                      " would hold it without the loss scale of ", digits(anomaly.loss_scale, 6),
                      ": the scaler lowers that, nothing is wrong with the model");
    case AnomalyCause::low_precision:
      return c10::str("In ", wide, " it is finite, up to ", digits(largest),
                      anomaly.loss_scale > 1 ? ", too large even without the loss scale: " : ": ",
                      dtype == "float32" ? "keep its result smaller"
                                         : "use bfloat16, or run this op and those that read its "
                                           "result in float32");
    case AnomalyCause::model:
      if (blames_eps(anomaly)) {
        return c10::str(
            "An input was made with ", digits(*anomaly.lost_scalar), ", which ",
            dtype_name(anomaly.lost_in),
            " rounds to 0: use float32, or a larger eps: numerator / eps, and numerator / eps^2 in "
            "the backward pass, have to stay within the range of ",
            dtype_name(anomaly.lost_in));
      }
      return "In " + wide + " it is not finite either: " + fault_of_inputs(anomaly) +
             (anomaly.after_low_precision
                  ? ". Ops before it ran in 16 bits, and rounding can make 0 or a negative number "
                    "of a small positive one: trace the step in float32 to know"
                  : "");
    case AnomalyCause::unknown:
      break;
  }
  return "It could not be run again in " + wide;
}

}  // namespace detail

inline std::string ValueRange::to_string() const {
  std::string text = parameter.empty() ? std::string() : parameter + " ";
  text += c10::str(detail::dtype_name(dtype), " [", c10::Join(", ", sizes), "]");
  if (infs + nans < c10::multiply_integers(sizes)) {
    text += c10::str(" ", detail::digits(minimum), " to ", detail::digits(maximum));
    if (minimum < 0 && maximum > 0) text += ", |x| from " + detail::digits(smallest);
  }
  if (infs > 0) text += c10::str(" ", infs, negative_infs == infs ? " -inf" : " inf");
  if (nans > 0) text += c10::str(" ", nans, " NaN");
  return text;
}

inline std::string AnomalyFrame::place() const {
  std::string text = op;
  if (!caller.empty()) text += " (in " + caller + ")";
  if (is_backward() && node != op) text += " of " + node;
  if (!module.empty()) text += (reads_module ? ", in " : ", after ") + module;
  return text;
}

inline std::string Anomaly::message() const {
  const std::string where = rank ? c10::str("rank ", *rank, ", ") : std::string();
  return c10::str(where, frame.is_backward() ? "backward pass: " : "forward pass: ", frame.place(),
                  cause == AnomalyCause::arrived ? " passed on " : " made ",
                  detail::ranges_text(frame.outputs), ". It read ", detail::ranges_text(inputs),
                  ". ", detail::cause_text(*this));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
