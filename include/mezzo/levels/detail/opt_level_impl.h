/// \file
/// The table of levels, the checks of overrides, and Apex's text.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/levels/opt_level.h>
#include <mezzo/scaling/skipped_step.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <charconv>
#include <cstddef>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline LossScale apex_dynamic_scale() { return LossScale::dynamic({.max_scale = kApexMaxScale}); }

inline std::string option_text(const char* name, at::ScalarType dtype) {
  return c10::str(name, " = ", dtype_name(dtype));
}

inline std::string option_text(const char* name, bool value) {
  return c10::str(name, value ? " = true" : " = false");
}

}  // namespace detail

inline LossScale LossScaleChoice::parsed(std::string_view text) {
  if (text == "dynamic") return detail::apex_dynamic_scale();
  double scale = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), scale);
  TORCH_CHECK(error == std::errc() && end == text.data() + text.size(), "loss_scale \"", text,
              "\" is neither a number nor \"dynamic\"; write 128.0, \"128.0\" or \"dynamic\"");
  return LossScale::fixed(scale);
}

inline const OptLevel::Properties& OptLevel::properties_of(std::string_view name) {
  constexpr auto kFloat = at::ScalarType::Float;
  constexpr auto kHalf = at::ScalarType::Half;
  constexpr auto kBFloat16 = at::ScalarType::BFloat16;
  constexpr std::nullopt_t kNone = std::nullopt;
  static constexpr std::array<Properties, 7> kLevels = {
      {{"O0", "float32 throughout.", kFloat, kFloat, false, kNone, false, false},
       {"O1", "each op in half or float32, as the op lists say; weights stay float32.", kHalf,
        kNone, true, kNone, kNone, true},
       {"O2", "a half model with float32 batch norms and float32 master weights.", kHalf, kHalf,
        false, true, true, true},
       {"O3", "half throughout.", kHalf, kHalf, false, false, false, false},
       {"O1_bf16", "each op in bfloat16 or float32, as the op lists say; weights stay float32.",
        kBFloat16, kNone, true, kNone, kNone, false},
       {"O2_bf16", "a bfloat16 model with float32 batch norms and float32 master weights.",
        kBFloat16, kBFloat16, false, true, true, false},
       {"O3_bf16", "bfloat16 throughout.", kBFloat16, kBFloat16, false, false, false, false}}};
  for (const Properties& level : kLevels) {
    if (level.name == name) return level;
  }
  TORCH_CHECK(false, "Unexpected optimization level ", name,
              ". Options are 'O0', 'O1', 'O2', 'O3'. Here also 'O1_bf16', 'O2_bf16' and "
              "'O3_bf16'; O is the letter, not the number zero.");
}

inline OptLevel::OptLevel(const Properties& level, const OptLevelOverrides& set)
    : own_(level),
      loss_scale_(set.loss_scale        ? set.loss_scale->rule()
                  : level.dynamic_scale ? detail::apex_dynamic_scale()
                                        : LossScale::none()) {
  check(level, set);
  if (set.cast_model_type) own_.cast_model_type = set.cast_model_type;
  if (set.cast_model_outputs) own_.cast_model_outputs = set.cast_model_outputs;
  if (set.patch_torch_functions) own_.op_lists = *set.patch_torch_functions;
  if (set.keep_batchnorm_fp32) own_.keep_batchnorm_fp32 = set.keep_batchnorm_fp32;
  if (set.master_weights) own_.master_weights = set.master_weights;
  const at::ScalarType model = cast_model_type().value_or(at::ScalarType::Float);
  TORCH_CHECK(!master_weights() || model != at::ScalarType::Float, "OptLevel ", name(),
              ": master_weights = true contradicts cast_model_type = float32: masters are float32 "
              "copies of half or bfloat16 weights; give master_weights = false, or cast the model");
}

/// Refuses dtypes that nobody trains in, and overrides that contradict the level.
inline void OptLevel::check(const Properties& level, const OptLevelOverrides& set) {
  const at::ScalarType type = set.cast_model_type.value_or(at::ScalarType::Float);
  TORCH_CHECK(detail::is_training_dtype(type) && type != at::ScalarType::Double, "OptLevel ",
              level.name, ": cast_model_type is ", detail::dtype_name(type),
              "; it should be float32, float16 or bfloat16");
  const at::ScalarType outputs = set.cast_model_outputs.value_or(at::ScalarType::Float);
  TORCH_CHECK(detail::is_training_dtype(outputs), "OptLevel ", level.name,
              ": cast_model_outputs is ", detail::dtype_name(outputs),
              "; it should be float32, bfloat16, float16 or float64");
  const std::string contradicts = c10::str(" contradicts opt_level = ", level.name);
  const auto refuse = [&](const std::string& option, const char* advice) {
    TORCH_CHECK(false, "OptLevel ", level.name, ": ", option, contradicts, advice);
  };
  const bool by_op = level.op_lists;
  if (set.patch_torch_functions.value_or(false) && !by_op) {
    refuse("patch_torch_functions = true",
           ": only O1 and O1_bf16 cast op by op; choose one of them, or leave the option out");
  }
  if (by_op && set.keep_batchnorm_fp32) {
    refuse(detail::option_text("keep_batchnorm_fp32", *set.keep_batchnorm_fp32),
           ", whose op lists say what batch norms run in; leave the option out, or give the region "
           "an OpPolicy");
  }
  if (by_op && set.master_weights) {
    refuse(detail::option_text("master_weights", *set.master_weights),
           ", whose weights are float32 themselves; leave the option out, or choose O2");
  }
  if (type == at::ScalarType::Float) return;
  const std::string option = detail::option_text("cast_model_type", type);
  if (by_op) {
    refuse(option,
           ", which casts inputs of ops and leaves weights float32; choose O2 or O3 to "
           "cast the model, or leave the option out");
  }
  if (level.low_precision == at::ScalarType::Float) {
    refuse(option, ", which is float32 throughout; choose O2 or O3");
  }
  if (level.low_precision == at::ScalarType::BFloat16 && type == at::ScalarType::Half) {
    refuse(option, ", which is bfloat16 without a loss scale; choose O2 or O3");
  }
}

inline OptLevel OptLevel::parse(std::string_view name, const OptLevelOverrides& overrides) {
  return {properties_of(name), overrides};
}

inline Precision OptLevel::precision() const {
  const at::ScalarType model = cast_model_type().value_or(at::ScalarType::Float);
  const at::ScalarType compute = uses_op_lists() ? own_.low_precision : model;
  return {.param = master_weights() ? at::ScalarType::Float : model,
          .compute = compute,
          .output = cast_model_outputs().value_or(compute)};
}

inline std::string OptLevel::describe() const {
  const std::string before = parse(name()).listing(), after = listing();
  std::string selected =
      c10::str("Selected optimization level ", name(), ":  ", own_.brief, "\n", before);
  if (after == before) return selected;
  return c10::str(selected,
                  "Processing user overrides (options that were given)...\n"
                  "After processing overrides, optimization options are:\n",
                  after);
}

inline std::string OptLevel::listing() const {
  const auto flag = [](std::optional<bool> value) {
    return !value ? "None" : *value ? "True" : "False";
  };
  const auto dtype = [](std::optional<at::ScalarType> value) {
    return value ? c10::str("torch.", detail::dtype_name(*value)) : "None";
  };
  std::string text;
  const auto line = [&text](std::string property, const std::string& value) {
    property.resize(22, ' ');
    text += c10::str(property, " : ", value, "\n");
  };
  line("enabled", "True");
  line("opt_level", std::string(name()));
  line("cast_model_type", dtype(cast_model_type()));
  line("patch_torch_functions", flag(uses_op_lists()));
  line("keep_batchnorm_fp32", flag(own_.keep_batchnorm_fp32));
  line("master_weights", flag(own_.master_weights));
  line("loss_scale", loss_scale_.kind == LossScaleKind::dynamic
                         ? "dynamic"
                         : detail::python_float(static_cast<float>(loss_scale_.init_scale)));
  if (own_.cast_model_outputs) line("cast_model_outputs", dtype(cast_model_outputs()));
  return text;
}

inline std::ostream& operator<<(std::ostream& stream, const OptLevel& level) {
  return stream << level.describe();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
