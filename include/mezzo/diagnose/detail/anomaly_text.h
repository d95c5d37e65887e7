/// \file
/// An anomaly in words.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string ranges_text(const std::vector<ValueRange>& ranges) {
  std::string text;
  for (const ValueRange& range : ranges) {
    if (range.dtype == at::ScalarType::Undefined) continue;
    text += (text.empty() ? "" : "; ") + range.to_string();
  }
  return text.empty() ? "nothing" : text;
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
                      dtype == "float32" ? "keep what it reads smaller"
                                         : "run this op in float32, or use bfloat16");
    case AnomalyCause::model:
      if (anomaly.lost_scalar) {
        return c10::str("An input was made with ", digits(*anomaly.lost_scalar), ", which ", dtype,
                        " rounds to 0: take an eps that it holds, or float32");
      }
      return "In " + wide +
             " it is not finite either: look for a log or a division of 0, an exp, or a root of 0 "
             "in the backward pass";
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
    text += c10::str(" ", detail::digits(smallest), " to ", detail::digits(largest));
  }
  if (infs > 0) text += c10::str(" ", infs, " inf");
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
