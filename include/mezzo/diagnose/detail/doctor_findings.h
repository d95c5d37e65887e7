/// \file
/// What the doctor says of values, sizes, casts and constants.
#pragma once

#include <mezzo/autocast/cast_trace.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/diagnose/detail/doctor_trace.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/value_range.h>
#include <mezzo/diagnose/doctor.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// "a, b, c and 4 more"
inline std::string some_of(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  return names.size() > kShown ? c10::str(text, " and ", names.size() - kShown, " more") : text;
}

inline void add_name(std::vector<std::string>& names, const std::string& name) {
  if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

/// "12.3 MiB"
inline std::string bytes_text(std::int64_t bytes) {
  constexpr std::array<const char*, 4> units = {" B", " KiB", " MiB", " GiB"};
  std::size_t unit = 0;
  auto number = static_cast<double>(bytes);
  for (; number >= 1000 && unit + 1 < units.size(); ++unit) number /= 1024;
  return digits(number) + units.at(unit);
}

inline const char* cpp_name(c10::DeviceType device) {
  return device == c10::DeviceType::CPU ? "torch::kCPU" : "torch::kCUDA";
}

/// "float16, which ends at 65504"
inline std::string end_of(at::ScalarType dtype) {
  return c10::str(dtype_name(dtype), ", which ends at ", dtype == at::kHalf ? "65504" : "3.39e+38");
}

/// Which share of the finite values that are not zero `low` makes zero.
inline double lost_share(const at::Tensor& tensor, at::ScalarType low) {
  const at::Tensor all = magnitudes(tensor);
  const at::Tensor values = at::where(all.isfinite(), all, 0.0);
  const auto used = values.count_nonzero().item<double>();
  return used > 0 ? 1 - values.to(low).count_nonzero().item<double>() / used : 0;
}

/// Tensors of a kind ("parameter", "buffer", "input") whose values a dtype does not hold.
class JudgedTensors {
 public:
  JudgedTensors(const char* kind, bool is_cast) : kind_(kind), is_cast_(is_cast) {}

  /// \param may_be_cast  false: a whole run in low precision cast it nowhere
  void add(const std::string& name, const at::Tensor& tensor, at::ScalarType low,
           bool may_be_cast) {
    if (!is_readable(tensor) || !tensor.is_floating_point()) return;
    const ValueRange range = value_ranges({tensor}).front();
    // A mask of -inf is fine; a weight of inf is not.
    if (range.nans > 0 || (is_cast_ && range.infs > 0)) bad_.push_back(name);
    if (overflows(range.largest, low) && !may_be_cast) {
      idle_.push_back(name);
    } else if (overflows(range.largest, low)) {
      large_.push_back(name);
      largest_ = std::max(largest_, range.largest);
      is_mask_ = is_mask_ && range.maximum <= 0;
    }
    constexpr double kNoticeable = 0.01;
    const double lost = is_cast_ && may_be_cast ? lost_share(tensor.detach(), low) : 0;
    if (lost > kNoticeable) {
      lost_.push_back(name);
      most_lost_ = std::max(most_lost_, lost);
    }
  }

  void tell(Diagnosis& diagnosis) const {
    if (!bad_.empty()) {
      diagnosis.findings.push_back({.severity = FindingSeverity::error,
                                    .topic = FindingTopic::range,
                                    .where = some_of(bad_),
                                    .reason = c10::str("this ", kind_, " holds inf or NaN already"),
                                    .remedy = "torch::load(model, \"earlier.pt\");"});
    }
    if (!large_.empty()) {
      diagnosis.findings.push_back(
          {.severity = is_cast_ ? FindingSeverity::error : FindingSeverity::warning,
           .topic = FindingTopic::range,
           .where = some_of(large_),
           .reason = c10::str("this ", kind_, " holds ", digits(largest_), " in magnitude, beyond ",
                              end_of(diagnosis.dtype), ": a cast makes it inf"),
           .remedy = kind_ == std::string_view("buffer") && is_mask_
                         ? std::string("mask.clamp_min(-65504.0);  // or -inf, or bfloat16")
                         : in_bfloat16(diagnosis)});
    }
    if (!idle_.empty()) {
      diagnosis.findings.push_back(
          {.topic = FindingTopic::range,
           .where = some_of(idle_),
           .reason = c10::str("this ", kind_, " holds values beyond ", end_of(diagnosis.dtype),
                              ", and no op of the traced run casts it")});
    }
    if (!lost_.empty()) {
      diagnosis.findings.push_back(
          {.severity = most_lost_ > 0.1 ? FindingSeverity::warning : FindingSeverity::note,
           .topic = FindingTopic::range,
           .where = some_of(lost_),
           .reason =
               c10::str("a cast to ", dtype_name(diagnosis.dtype), " makes up to ",
                        digits(100 * most_lost_, 2), " % of the values of this ", kind_, " 0"),
           .remedy = in_bfloat16(diagnosis)});
    }
  }

 private:
  static std::string in_bfloat16(const Diagnosis& diagnosis) {
    return c10::str("mezzo::AutocastGuard autocast({.device = ", cpp_name(diagnosis.device.type()),
                    ", .dtype = torch::kBFloat16});");
  }

  const char* kind_;
  bool is_cast_;
  bool is_mask_ = true;  // whether all that is too large is negative
  std::vector<std::string> bad_, large_, idle_, lost_;
  double largest_ = 0, most_lost_ = 0;
};

/// Gradients of 16 bits to which `micro_batches` backward passes add. A sum of equal addends stops
/// growing where an addend is half a step of the sum: in bfloat16 at 256 of them. Up to a 16th of
/// that number each sum is rounded by at most a 16th of an addend.
inline void add_accumulation(Diagnosis& diagnosis, const NamedTensors& parameters,
                             std::int64_t micro_batches) {
  if (micro_batches < 2) return;
  std::vector<std::string> names;
  std::int64_t bytes = 0, most = 0;
  for (const auto& [name, parameter] : parameters) {
    if (!is_low_precision(parameter) || parameter.grad_dtype() == at::kFloat) continue;
    names.push_back(name);
    bytes += static_cast<std::int64_t>(parameter.nbytes());
    const std::int64_t own = parameter.scalar_type() == at::kHalf ? 2048 : 256;
    most = most == 0 ? own : std::min(most, own);
  }
  if (names.empty()) return;
  diagnosis.findings.push_back(
      {.severity = micro_batches > most / 16 ? FindingSeverity::warning : FindingSeverity::note,
       .topic = FindingTopic::accumulation,
       .where = some_of(names),
       .reason =
           c10::str("gradients of ", micro_batches,
                    " micro-batches are added up in 16 bits, which round each sum and stop at ",
                    most, " equal ones; in float they take ", bytes_text(bytes), " more"),
       .remedy = "mezzo::optim::AdamWOptions(lr).accumulate_in_float(true)"});
}

/// A result of 16 bits where float32's has 32: a loss that is computed outside of the region is a
/// number of 16 bits too.
inline void add_output(Diagnosis& diagnosis) {
  diagnosis.findings.push_back(
      {.severity = FindingSeverity::note,
       .topic = FindingTopic::output,
       .where = "(model)",
       .reason = c10::str("the result is of ", dtype_name(diagnosis.dtype),
                          ": a loss that is computed outside of the region is rounded to it, or "
                          "backward throws; compute the loss inside, or let results leave the "
                          "region as float32"),
       .remedy =
           c10::str("auto result = mezzo::autocast({.device = ", cpp_name(diagnosis.device.type()),
                    ", .output = torch::kFloat}, [&] { return model->forward(x); });")});
}

/// The share of values that stay what they are when `step` is added, and when it is subtracted; the
/// mean of both.
inline double unmoved_share(const at::Tensor& weight, double step) {
  const at::Tensor wide = weight.detach().to(at::kFloat);
  const auto stays = [&](double change) {
    const at::Tensor moved = (wide + change).to(weight.scalar_type());
    return moved.eq(weight.detach()).to(at::kFloat).mean().item<double>();
  };
  return (stays(step) + stays(-step)) / 2;
}

/// Weights of 16 bits on which updates of the learning rate's size are lost to rounding. Masters
/// add them up in float, and stochastic rounding keeps them on average.
inline void add_updates(Diagnosis& diagnosis, const NamedTensors& parameters, double rate) {
  constexpr double kNoticeable = 0.1;
  std::vector<std::string> names;
  double most = 0;
  for (const auto& [name, parameter] : parameters) {
    if (!is_low_precision(parameter) || !parameter.requires_grad() || parameter.numel() == 0) {
      continue;
    }
    const double share = unmoved_share(parameter, rate);
    if (share < kNoticeable) continue;
    names.push_back(c10::str(name, " (", digits(100 * share, 2), " %)"));
    most = std::max(most, share);
  }
  if (names.empty()) return;
  diagnosis.findings.push_back(
      {.severity = FindingSeverity::warning,
       .topic = FindingTopic::updates,
       .where = some_of(names),
       .reason =
           c10::str("an update of ", digits(rate), ", as Adam makes, rounds to nothing at up to ",
                    digits(100 * most, 2), " % of the values with WeightStorage::plain"),
       .remedy = "mezzo::optim::AdamWOptions(lr).weight_storage("
                 "mezzo::optim::WeightStorage::master)  // or stochastic"});
}

inline void add_weight_casts(Diagnosis& diagnosis, const std::vector<SeenWeight>& weights) {
  std::int64_t cast = 0, again = 0, bytes = 0;
  std::vector<std::string> names;
  for (const SeenWeight& weight : weights) {
    if (weight.casts == 0) continue;
    ++cast;
    bytes += weight.bytes;
    if (weight.casts == 1) continue;
    ++again;
    names.push_back(weight.name);
  }
  if (cast == 0) return;
  DoctorFinding finding{.severity = again > 0 ? FindingSeverity::warning : FindingSeverity::note,
                        .topic = FindingTopic::weight_casts,
                        .where = again > 0 ? some_of(names) : "(model)"};
  finding.reason = c10::str(cast, " of ", weights.size(), " parameters are cast to ",
                            dtype_name(diagnosis.dtype), " in every forward pass, ",
                            bytes_text(bytes), " read and written");
  if (again > 0) finding.reason += c10::str("; ", again, " of them more than once");
  finding.remedy =
      "model->to(torch::kBFloat16);  // before the optimizer is made, with a WeightStorage of 16 "
      "bits";
  diagnosis.findings.push_back(std::move(finding));
}

/// Whether an op that autocast does not list computes in the wider dtype of its inputs. In-place
/// ops stay in the dtype of their first input, and norms take weights of another dtype.
inline bool promotes(const std::string& op) {
  constexpr std::array<std::string_view, 10> names = {
      "add", "sub", "rsub", "mul", "div", "where", "maximum", "minimum", "addcmul", "lerp"};
  return std::find(names.begin(), names.end(), short_name(op)) != names.end();
}

/// Ops that autocast, or a float32 input beside a low one, makes run in float32. `may_allow` tells
/// of an op whether the model was run with it in low precision, and its result was good.
inline void add_float32_ops(Diagnosis& diagnosis, const std::vector<CastRecord>& records,
                            const std::function<bool(const std::string& op)>& may_allow) {
  struct Cost {
    std::int64_t calls = 0, bytes = 0;
    bool is_mixed = false;
  };
  std::map<std::string, Cost> costs;
  std::int64_t all_bytes = 0;
  for (const CastRecord& record : records) {
    all_bytes += record.bytes;
    const auto& inputs = record.inputs;
    const bool was_low = std::find(inputs.begin(), inputs.end(), diagnosis.dtype) != inputs.end();
    const bool is_mixed =
        record.category == OpCategory::fallthrough || record.category == OpCategory::promote;
    if (record.runs_in != at::kFloat || !was_low) continue;
    if (record.category == OpCategory::fallthrough && !promotes(record.op)) continue;
    Cost& cost = costs[record.op];
    cost.calls += record.calls;
    cost.bytes += record.bytes;
    cost.is_mixed = is_mixed;
  }
  for (const auto& [op, cost] : costs) {
    DoctorFinding finding{.topic = FindingTopic::float32_ops, .where = op};
    finding.reason =
        c10::str("runs in float32, ", cost.calls, cost.calls == 1 ? " call" : " calls");
    if (cost.is_mixed) {
      finding.reason +=
          c10::str(": one of its inputs is float32, the other ", dtype_name(diagnosis.dtype));
      finding.remedy = "x + y.to(x.scalar_type());  // where low precision is enough";
    } else {
      const double share =
          all_bytes > 0 ? static_cast<double>(cost.bytes) / static_cast<double>(all_bytes) : 0;
      finding.reason += c10::str("; its casts read and write ", bytes_text(cost.bytes), ", ",
                                 digits(100 * share, 2), " % of all casts");
      if (may_allow(op)) {
        finding.remedy = "mezzo::install_op_overrides(mezzo::OpPolicy().allow(\"" + op +
                         "\"));  // where its range is enough";
      }
    }
    diagnosis.findings.push_back(std::move(finding));
  }
}

/// Products with a weight by its sizes, and others by the size that is awkward.
inline void add_dimensions(Diagnosis& diagnosis, const std::vector<SeenProduct>& products) {
  std::map<std::tuple<bool, std::int64_t, std::int64_t>, std::vector<std::string>> by_weight;
  std::map<std::int64_t, std::vector<std::string>> by_length;
  for (const SeenProduct& product : products) {
    const bool is_weight = product.n % 8 != 0 || product.k % 8 != 0;
    if (product.is_of_weight && is_weight) {
      add_name(by_weight[{product.is_convolution, product.k, product.n}], product.module);
      continue;
    }
    for (const std::int64_t size : {product.m, product.n, product.k}) {
      if (size % 8 != 0) add_name(by_length[size], product.module);
    }
  }
  const auto up = [](std::int64_t size) { return (size + 7) / 8 * 8; };
  const bool is_cuda = diagnosis.device.is_cuda();
  const auto add = [&](const std::vector<std::string>& modules, const std::string& what,
                       std::string remedy) {
    diagnosis.findings.push_back(
        {.severity = is_cuda ? FindingSeverity::warning : FindingSeverity::note,
         .topic = FindingTopic::dimensions,
         .where = some_of(modules),
         .reason =
             c10::str(what, ": ", is_cuda ? "" : "a GPU's ", "tensor cores take multiples of 8"),
         .remedy = std::move(remedy)});
  };
  for (const auto& [size, modules] : by_weight) {
    const auto [is_convolution, k, n] = size;
    if (is_convolution) {
      add(modules, c10::str("its channels are ", k, " in, ", n, " out"),
          c10::str("torch::nn::Conv2dOptions(", up(k), ", ", up(n),
                   ", kernel_size);  // inputs padded with channels of zeros"));
      continue;
    }
    const std::string rest = n % 8 == 0 ? "" : c10::str("  // use .slice(-1, 0, ", n, ")");
    add(modules, c10::str("its weight is ", k, " x ", n),
        c10::str("torch::nn::Linear(", up(k), ", ", up(n), ");", rest));
  }
  for (const auto& [length, modules] : by_length) {
    add(modules, c10::str("a product has a size of ", length),
        c10::str("torch::constant_pad_nd(x, {0, 0, 0, ", up(length) - length,
                 "});  // or batches and lengths of multiples of 8"));
  }
}

inline std::string start_of(at::ScalarType dtype) {
  return c10::str(dtype_name(dtype), ", whose smallest number is ",
                  dtype == at::kHalf ? "6e-08" : "9.2e-41");
}

/// An op that fills takes -inf in its place, and a bound that is beyond the dtype bounds nothing.
inline std::string remedy_of_large(const std::string& op, double value, c10::DeviceType device) {
  const bool fills = op.find("fill") != std::string::npos || op == "where";
  if (fills && value < 0) {
    return "scores.masked_fill(mask, -std::numeric_limits<float>::infinity());";
  }
  if (op.find("clamp") != std::string::npos || op.find("clip") != std::string::npos) {
    return value < 0 ? "x.clamp_min(-65504.0);" : "x.clamp_max(65504.0);";
  }
  return c10::str("mezzo::AutocastGuard exact({.device = ", cpp_name(device),
                  ", .enabled = false});  // around it and what reads its result, with "
                  "x.to(torch::kFloat)");
}

/// One constant under the eyes of `low`.
inline DoctorFinding judged(const SeenConstant& seen, at::ScalarType low, c10::DeviceType device) {
  DoctorFinding finding{.topic = FindingTopic::range};
  const std::string name = short_name(seen.op);
  const std::string what = name + " with " + digits(seen.value);
  const bool is_large = overflows(seen.value, at::kHalf);
  if (!overflows(seen.value, low) && !vanishes(seen.value, low)) {
    finding.reason = c10::str(what, " holds in ", dtype_name(low), "; float16 would make it ",
                              is_large ? "inf" : "0");
  } else if (seen.dtype != low) {
    finding.reason = c10::str(what, " computes in ", dtype_name(seen.dtype), " here; ",
                              dtype_name(low), " would make it ", is_large ? "inf" : "0");
  } else if (is_large) {
    finding.severity = FindingSeverity::error;
    finding.reason = what + " computes in " + end_of(low) + ": it throws, or makes inf and NaN";
    finding.remedy = remedy_of_large(name, seen.value, device);
  } else {
    finding.severity = FindingSeverity::warning;
    finding.reason = what + " computes in " + start_of(low) + ": it becomes 0 and guards nothing";
    finding.remedy =
        "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps);  // a larger eps may overflow it";
  }
  return finding;
}

/// Constants of one value and one verdict are one finding.
inline void add_constants(Diagnosis& diagnosis, const std::vector<SeenConstant>& constants) {
  std::vector<std::pair<DoctorFinding, std::vector<std::string>>> found;
  std::vector<double> values;
  for (const SeenConstant& seen : constants) {
    const DoctorFinding finding = judged(seen, diagnosis.dtype, diagnosis.device.type());
    std::size_t i = 0;
    while (i < found.size() &&
           !(values[i] == seen.value && found[i].first.severity == finding.severity)) {
      ++i;
    }
    if (i == found.size()) {
      found.emplace_back(finding, std::vector<std::string>());
      values.push_back(seen.value);
    }
    add_name(found[i].second, seen.module);
  }
  for (auto& [finding, modules] : found) {
    finding.where = some_of(modules);
    diagnosis.findings.push_back(std::move(finding));
  }
}

}  // namespace detail

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
