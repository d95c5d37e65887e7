/// \file
/// Constants: those of a TorchScript model with the names of the modules that hold them, those that
/// a run saw, and what a dtype makes of them.
#pragma once

#include <mezzo/autocast/op_policy.h>
#include <mezzo/diagnose/detail/doctor_findings.h>
#include <mezzo/diagnose/detail/doctor_trace.h>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Walks the graphs of all methods, from the model to its innermost modules. An op that autocast
/// lists as float32 is taken to compute in that, every other in `low`; only a run knows better. So
/// it is with tensors whose dtype the graph does not tell: they are taken to be floating.
class ScriptConstants {
 public:
  ScriptConstants(const torch::jit::Module& model, c10::DeviceType device, at::ScalarType low)
      : lists_(autocast_op_lists(device)), low_(low) {
    visit("", model);
  }

  std::vector<SeenConstant> found() && { return std::move(found_); }

 private:
  void visit(const std::string& path, const torch::jit::Module& module) {
    const std::string name = path.empty() ? "(model)" : path;
    for (const auto& attribute : module.named_attributes(/*recurse=*/false)) {
      if (!attribute.value.isDouble()) continue;
      add({.op = attribute.name,
           .module = name,
           .value = attribute.value.toDouble(),
           .dtype = at::kFloat});
    }
    for (const torch::jit::Method& method : module.get_methods()) {
      visit(name, *method.graph()->block());
    }
    for (const auto& child : module.named_children()) {
      visit(path.empty() ? child.name : path + "." + child.name, child.value);
    }
  }

  void visit(const std::string& module, torch::jit::Block& block) {
    for (torch::jit::Node* const node : block.nodes()) {
      for (torch::jit::Block* const inner : node->blocks()) visit(module, *inner);
      if (!reads_floating(*node)) continue;
      const c10::FunctionSchema* const schema = node->maybeSchema();
      for (std::size_t i = 0; i < node->inputs().size(); ++i) {
        const auto constant = torch::jit::toIValue(node->input(i));
        if (!constant) continue;
        const bool takes_number = schema != nullptr && i < schema->arguments().size() &&
                                  schema->arguments()[i].type()->kind() == c10::NumberType::Kind;
        const auto value = value_of(*constant, takes_number);
        if (!value || DoctorTrace::compares(node->kind().toQualString())) continue;
        add({.op = op_of(*node), .module = module, .value = *value, .dtype = computes_in(*node)});
      }
    }
  }

  /// Whether an argument is a tensor, or a list of them, that may be floating. What has none
  /// computes in Python's float or int.
  static bool reads_floating(const torch::jit::Node& node) {
    const auto may_float = [](const torch::jit::Value* input) {
      const auto* type = input->type().get();
      if (const auto* list = type->castRaw<c10::ListType>()) type = list->getElementType().get();
      if (const auto* optional = type->castRaw<c10::OptionalType>()) {
        type = optional->getElementType().get();
      }
      const auto* const tensor = type->castRaw<c10::TensorType>();
      if (tensor == nullptr) return false;
      return !tensor->scalarType() || c10::isFloatingType(*tensor->scalarType());
    };
    return std::any_of(node.inputs().begin(), node.inputs().end(), may_float);
  }

  /// Of a tensor the first element that is worth noting.
  static std::optional<double> value_of(const c10::IValue& constant, bool takes_number) {
    if (constant.isDouble()) return constant.toDouble();
    if (constant.isInt() && takes_number) return static_cast<double>(constant.toInt());
    if (!constant.isTensor() || !constant.toTensor().is_floating_point()) return std::nullopt;
    const at::Tensor values = constant.toTensor().detach().to(at::kCPU, at::kDouble).contiguous();
    const double* const begin = values.const_data_ptr<double>();
    const double* const end = begin + values.numel();
    const double* const found = std::find_if(begin, end, SeenConstant::is_worth_noting);
    return found == end ? std::nullopt : std::optional(*found);
  }

  /// "aten::masked_fill.Scalar"; of a call the function's name.
  static std::string op_of(const torch::jit::Node& node) {
    if (node.kind() == c10::prim::CallFunction) {
      return node.input(0)->type()->expect<c10::FunctionType>()->function()->name();
    }
    const c10::FunctionSchema* const schema = node.maybeSchema();
    return schema == nullptr ? node.kind().toQualString() : full_name(schema->operator_name());
  }

  at::ScalarType computes_in(const torch::jit::Node& node) const {
    const OpCategory category = lists_.category(op_of(node));
    const bool is_exact = category == OpCategory::fp32 ||
                          category == OpCategory::fp32_set_opt_dtype ||
                          category == OpCategory::fp32_append_dtype;
    return is_exact ? at::kFloat : low_;
  }

  void add(SeenConstant constant) {
    if (!SeenConstant::is_worth_noting(constant.value)) return;
    if (std::find(found_.begin(), found_.end(), constant) == found_.end()) {
      found_.push_back(std::move(constant));
    }
  }

  OpList lists_;
  at::ScalarType low_;
  std::vector<SeenConstant> found_;
};

/// What a run saw, with the modules that are known for the same value and op, or else for the same
/// value in a call that the run took apart; and what is known and the run did not come to.
/// \param is_whole  whether the run got to its end
inline std::vector<SeenConstant> with_modules_of(const std::vector<SeenConstant>& known,
                                                 const std::vector<SeenConstant>& in_run,
                                                 bool is_whole) {
  const auto is_same = [](const SeenConstant& a, const SeenConstant& b) {
    return a.value == b.value && short_name(a.op) == short_name(b.op);
  };
  std::vector<SeenConstant> merged;
  std::vector<bool> is_used(known.size());
  const auto take = [&](const SeenConstant& seen, const auto& fits) {
    bool found = false;
    for (std::size_t i = 0; i < known.size(); ++i) {
      if (!fits(known[i])) continue;
      found = is_used[i] = true;
      merged.push_back({.op = seen.op,
                        .module = known[i].module,
                        .value = seen.value,
                        .dtype = seen.dtype,
                        .is_of_layer = known[i].is_of_layer});
    }
    return found;
  };
  std::vector<SeenConstant> others;
  for (const SeenConstant& seen : in_run) {
    if (!take(seen, [&](const SeenConstant& one) { return is_same(one, seen); })) {
      others.push_back(seen);
    }
  }
  const std::vector<bool> is_matched = is_used;
  for (const SeenConstant& seen : others) {
    const bool found = take(seen, [&](const SeenConstant& one) {
      return one.value == seen.value &&
             !is_matched[static_cast<std::size_t>(&one - known.data())] && !one.is_of_layer;
    });
    if (!found) merged.push_back(seen);
  }
  for (std::size_t i = 0; i < known.size(); ++i) {
    if (is_used[i]) continue;
    merged.push_back(known[i]);
    if (is_whole) merged.back().was_met = false;
  }
  return merged;
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
  const bool adds_in_float32 = name.find("norm") != std::string::npos && name != "norm";
  if (!overflows(seen.value, low) && !vanishes(seen.value, low)) {
    finding.reason = c10::str(what, " holds in ", dtype_name(low), "; float16 would make it ",
                              is_large ? "inf" : "0");
  } else if (seen.dtype != low) {
    finding.reason = c10::str(what, " computes in ", dtype_name(seen.dtype), " here; ",
                              dtype_name(low), " would make it ", is_large ? "inf" : "0");
  } else if (!seen.was_met && !seen.is_of_layer) {
    finding.reason = what + " is in the code, but the traced run met no floating tensor with it";
  } else if (is_large) {
    finding.severity = FindingSeverity::error;
    finding.reason = what + " computes in " + end_of(low) + ": it throws, or makes inf and NaN";
    finding.remedy = remedy_of_large(name, seen.value, device);
  } else if (adds_in_float32) {
    finding.reason = c10::str(what, ": the op adds it in float32, where it holds, but ",
                              dtype_name(low), " inputs have no variance so small to guard");
    finding.remedy = ".eps(1e-5)  // of the layer's options";
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
