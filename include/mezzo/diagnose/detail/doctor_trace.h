/// \file
/// What the ops of a forward pass tell the doctor: constants at the edge of a dtype, products of
/// awkward sizes, and casts of weights.
#pragma once

#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/autocast/detail/op_policy/trace_recorder.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/parameter_names.h>
#include <mezzo/diagnose/detail/value_range.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The factors of mm, addmm, bmm and baddbmm, where they hold floating numbers.
inline std::optional<std::pair<at::Tensor, at::Tensor>> matrix_factors(std::string_view op,
                                                                       OpArguments inputs) {
  const bool adds = op == "aten::addmm" || op == "aten::baddbmm";
  if (!adds && op != "aten::mm" && op != "aten::bmm") return std::nullopt;
  const std::size_t left = adds ? 1 : 0;
  if (inputs.size() < left + 2 || !inputs[left].isTensor() || !inputs[left + 1].isTensor()) {
    return std::nullopt;
  }
  std::pair factors(inputs[left].toTensor(), inputs[left + 1].toTensor());
  if (!factors.first.is_floating_point()) return std::nullopt;
  return factors;
}

/// "masked_fill" of "aten::masked_fill.Scalar"
inline std::string short_name(const std::string& op) {
  const std::size_t colons = op.rfind("::");
  const std::string name = colons == std::string::npos ? op : op.substr(colons + 2);
  return name.substr(0, name.find('.'));
}

/// A constant that half, the narrowest dtype, does not hold.
struct SeenConstant {
  std::string op;      ///< "aten::masked_fill.Scalar"
  std::string module;  ///< where it is
  double value = 0;
  at::ScalarType dtype = at::kFloat;  ///< that the op computes in

  bool operator==(const SeenConstant&) const = default;

  static bool is_worth_noting(double value) {
    return overflows(value, at::kHalf) || vanishes(value, at::kHalf);
  }
};

/// A product with a size that is no multiple of 8.
struct SeenProduct {
  std::string module;
  bool is_of_weight = false;    ///< whether the module's parameter is a factor, k x n
  bool is_convolution = false;  ///< then n and k are channels
  std::int64_t m = 0;           ///< rows; 8 of a convolution, which has none
  std::int64_t n = 0;
  std::int64_t k = 0;

  bool operator==(const SeenProduct&) const = default;
};

/// Casts of one parameter.
struct SeenWeight {
  std::string name;
  bool requires_grad = false;
  std::int64_t casts = 0;
  std::int64_t bytes = 0;  ///< read and written by them
};

/// Notes what this thread's ops do, while it lives. Modules of C++ have no hooks: an op belongs to
/// the module whose parameter it reads, and one that reads none comes after the last that did.
class DoctorTrace : public OpListener<DoctorTrace, int> {
 public:
  /// \param others  buffers and inputs, of which `casts` tells too
  explicit DoctorTrace(const NamedTensors& parameters, NamedTensors others = {})
      : names_(parameters), others_(std::move(others)) {
    for (const auto& [name, parameter] : parameters) {
      weights_.push_back({.name = name, .requires_grad = parameter.requires_grad()});
    }
    TORCH_CHECK(
        !is_nested(),
        "diagnose: it is called within another diagnose; call it outside of the model's forward");
  }

  using OpListener::stop;

  const std::vector<SeenConstant>& constants() const { return constants_; }
  const std::vector<SeenProduct>& products() const { return products_; }
  const std::vector<SeenWeight>& weights() const { return weights_; }
  /// The names of the parameters, buffers and inputs that were cast or copied.
  const std::set<std::string>& casts() const { return casts_; }

  /// What is compared with inf or 0 in place of a constant comes out as it should.
  static bool compares(std::string_view op) {
    constexpr std::array<std::string_view, 6> names = {"aten::gt", "aten::ge", "aten::lt",
                                                       "aten::le", "aten::eq", "aten::ne"};
    return std::find(names.begin(), names.end(), op) != names.end();
  }

  /// Norms of layers add their eps in float32, where it holds.
  static bool adds_in_float32(std::string_view op) {
    return op.find("_norm") != std::string_view::npos && !op.starts_with("aten::linalg");
  }

  /// The last op that the user called, and where.
  const c10::OperatorName& last_op() const { return op_; }
  /// Whether that op threw. Else what threw is the model's own code behind it: a check, or one of
  /// libtorch's modules that has a loop over types of its own.
  bool last_op_threw() const { return op_threw_; }

  /// Whether an op drew random numbers, which are others in another dtype.
  bool draws_random() const { return draws_random_; }

  /// The ops that autocast ran in low precision, by their full names, the last first.
  std::vector<std::string> lowered_ops() const { return {lowered_.rbegin(), lowered_.rend()}; }
  std::string place() const {
    if (owner_) return *owner_;
    return last_ ? "after " + *last_ : "before the first layer";
  }

 private:
  friend OpListener;

  /// \returns how many ops are under way around this one
  int entered(const at::RecordFunction& function) {
    if (depth_++ == 0) {  // another op of the user's
      owner_.reset();
      op_threw_ = false;
    }
    if (const auto name = function.operator_name()) note(*name, recorded_inputs(function));
    return depth_ - 1;
  }
  void left(int depth) {
    depth_ = depth;
    if (depth_ < cast_depth_) cast_depth_ = 0;
    if (depth_ == 0) op_threw_ = std::uncaught_exceptions() > exceptions_;
  }

  void note(const c10::OperatorName& name, OpArguments inputs) {
    if (depth_ == 1) op_ = name;
    if (auto module = names_.module_of(inputs)) owner_ = last_ = std::move(module);
    if (name.name == "aten::_to_copy" && !inputs.empty()) note_cast(inputs[0]);
    if (name.name == "aten::copy_" && inputs.size() > 1) note_cast(inputs[1]);
    note_product(name.name, inputs);
    if (const auto op = c10::Dispatcher::singleton().findSchema(name)) {
      draws_random_ = draws_random_ || op->hasTag(at::Tag::nondeterministic_seeded);
      note_constants(*op, inputs);
      note_lowered(*op, inputs);
    }
  }

  void note_lowered(const c10::OperatorHandle& op, OpArguments inputs) {
    const auto device = first_device(inputs);
    if (!device || !is_policy_device(*device) || !at::autocast::is_autocast_enabled(*device)) {
      return;
    }
    if (decided_category(op, *device).category != OpCategory::lower_precision) return;
    std::erase(lowered_, full_name(op.operator_name()));
    lowered_.push_back(full_name(op.operator_name()));
  }

  void note_cast(const c10::IValue& input) {
    if (!input.isTensor()) return;
    const auto weight = names_.find(input.toTensor());
    casts_.insert(weight ? weights_[*weight].name : others_.name_of(input.toTensor()));
    if (!weight || cast_depth_ > 0) return;  // a cast is made of copies
    cast_depth_ = depth_;
    const at::Tensor& tensor = input.toTensor();
    weights_[*weight].casts += 1;
    weights_[*weight].bytes +=
        tensor.numel() * static_cast<std::int64_t>(tensor.element_size() + 2);
  }

  void note_product(std::string_view op, OpArguments inputs) {
    if (const auto factors = matrix_factors(op, inputs)) {
      const auto& [left, right] = *factors;
      note_product(
          {.module = place(), .m = left.size(-2), .n = right.size(-1), .k = left.size(-1)});
    } else if (op == "aten::convolution") {
      const at::Tensor& weight = inputs[1].toTensor();
      note_product({.module = place(),
                    .is_convolution = true,
                    .m = 8,
                    .n = weight.size(0),
                    .k = weight.size(1)});
    }
  }

  void note_product(SeenProduct product) {
    if (product.m % 8 == 0 && product.n % 8 == 0 && product.k % 8 == 0) return;
    product.is_of_weight = owner_.has_value();
    add_once(products_, product);
  }

  void note_constants(const c10::OperatorHandle& op, OpArguments inputs) {
    if (compares(op_.name)) return;  // also the copy that it makes of the constant
    if (adds_in_float32(op_.name)) return;
    if (compares(op.operator_name().name)) return;
    if (is_product(op_.name) && !is_product(op.operator_name().name)) return;
    const auto& arguments = op.schema().arguments();
    for (std::size_t i = 0; i < std::min(arguments.size(), inputs.size()); ++i) {
      const auto value = constant_in(inputs[i], arguments[i]);
      if (!value || !SeenConstant::is_worth_noting(*value)) continue;
      auto dtype = computed_in(op, inputs);
      if (!dtype) continue;
      if (holds_result(op.operator_name().name, inputs, i, *value, *dtype)) dtype = at::kFloat;
      add_once(constants_, SeenConstant{.op = full_name(op_),  // the user's, whatever it is made of
                                        .module = place(),
                                        .value = *value,
                                        .dtype = *dtype});
    }
  }

  /// A number, or a tensor without dimensions on the CPU, which takes part as one. Not what the op
  /// writes or makes a view of: that may be memory which holds nothing yet.
  static std::optional<double> constant_in(const c10::IValue& input,
                                           const c10::Argument& argument) {
    if (argument.alias_info() != nullptr) return std::nullopt;
    if (input.isDouble()) return input.toDouble();
    if (input.isInt() && argument.type()->annotation_str().find("number") != std::string::npos) {
      return static_cast<double>(input.toInt());
    }
    if (!input.isTensor() || !input.toTensor().defined()) return std::nullopt;
    const at::Tensor& tensor = input.toTensor();
    if (tensor.dim() != 0 || !tensor.is_cpu() || tensor.requires_grad()) return std::nullopt;
    if (tensor.scalar_type() == at::kDouble) return *tensor.const_data_ptr<double>();
    if (tensor.scalar_type() == at::kFloat) return *tensor.const_data_ptr<float>();
    return std::nullopt;
  }

  /// Products with a number, which make a copy of it that their kernels do not read.
  static bool is_product(std::string_view op) {
    return op == "aten::mul" || op == "aten::mul_" || op == "aten::div" || op == "aten::div_";
  }

  /// Whether input i is a factor or divisor of a tensor of 16 bits, and `dtype` holds the result:
  /// libtorch's kernels compute with the number in float32.
  static bool holds_result(std::string_view op, OpArguments inputs, std::size_t i, double value,
                           at::ScalarType dtype) {
    if (!is_product(op) || i > 1 || inputs.size() < 2 || !inputs[1 - i].isTensor()) return false;
    const bool multiplies = op.starts_with("aten::mul");
    if (!multiplies && i == 0) return false;
    const at::NoGradGuard no_grad;
    const at::DisableRecordFunctionGuard untraced;
    const at::Tensor& tensor = inputs[1 - i].toTensor();
    if (!is_readable(tensor) || tensor.scalar_type() != dtype) return false;
    const double largest = value_ranges({tensor}).front().largest;
    const double result = multiplies ? largest * value : largest / value;
    return !overflows(result, dtype) && !vanishes(result, dtype);
  }

  /// The dtype in which the op meets its constants; none where it has no floating tensor.
  static std::optional<at::ScalarType> computed_in(const c10::OperatorHandle& op,
                                                   OpArguments inputs) {
    const auto device = first_device(inputs);
    if (!device) return std::nullopt;
    std::optional<at::ScalarType> target;
    if (is_policy_device(*device) && at::autocast::is_autocast_enabled(*device)) {
      const OpCategory category = decided_category(op, *device).category;
      const bool sets_dtype =
          category == OpCategory::fp32_set_opt_dtype || category == OpCategory::fp32_append_dtype;
      target = sets_dtype ? at::kFloat : cast_target(category, inputs, *device);
    }
    std::optional<at::ScalarType> dtype, of_scalars;  // tensors without dimensions give way
    for_each_tensor(inputs, [&](const at::Tensor& tensor) {
      const bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (!tensor.defined() || !tensor.is_floating_point() || is_number) return;
      const auto own = target && is_eligible(tensor, *device) ? *target : tensor.scalar_type();
      auto& known = tensor.dim() == 0 ? of_scalars : dtype;
      known = known ? c10::promoteTypes(*known, own) : own;
    });
    return dtype ? dtype : of_scalars;
  }

  template <class T>
  static void add_once(std::vector<T>& all, T one) {
    if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(std::move(one));
  }

  ParameterNames names_, others_;
  std::set<std::string> casts_;
  std::vector<SeenWeight> weights_;
  std::vector<SeenConstant> constants_;
  std::vector<SeenProduct> products_;
  std::optional<std::string> owner_;  // of the op that the user called
  std::optional<std::string> last_;
  std::vector<std::string> lowered_;
  c10::OperatorName op_{"", ""};
  bool op_threw_ = false;
  bool draws_random_ = false;
  const int exceptions_ = std::uncaught_exceptions();  // that are under way around this trace
  int depth_ = 0;                                      // of ops that have begun and not returned
  int cast_depth_ = 0;                                 // of the cast under way; 0: none
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
