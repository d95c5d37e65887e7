/// \file
/// Apex's optimization levels O0 to O3 as values: the dtype that the model is cast to, whether it
/// runs under autocast, what stays float32, and the loss scale.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/mixed_precision_policy.h>
#include <mezzo/base/version.h>
#include <mezzo/scaling/skipped_step.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <charconv>
#include <concepts>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A loss scale: 128.0, "128.0", "dynamic" or GradScalerOptions.
class LossScaleArg {
 public:
  /// Takes options unchanged. \throws c10::Error as GradScalerOptions::validated does
  LossScaleArg(const GradScalerOptions& options) : options_(options.validated()) {}

  /// Makes a constant scale.
  /// \throws c10::Error unless it is positive and finite as a float
  LossScaleArg(double scale) : options_(GradScalerOptions::fixed(scale)) {}

  /// Parses a number, or "dynamic": as in Apex, starts at 2^16, doubles after 2000 consecutive
  /// steps without inf/NaN up to 2^24, and halves after an overflow. For other bounds use
  /// `GradScalerOptions::dynamic({...})`.
  /// \throws c10::Error for any other text
  template <std::convertible_to<std::string_view> Text>
  LossScaleArg(const Text& text) : options_(parse(text)) {}

  /// Returns the options of the loss scale.
  const GradScalerOptions& options() const noexcept { return options_; }

 private:
  static GradScalerOptions parse(std::string_view text);

  GradScalerOptions options_;
};

/// Overrides of a level's properties, by Apex's names. Unset members keep the level's value.
struct OptLevelOverrides {
  /// Dtype that the model's weights and inputs are cast to: float32, float16 or bfloat16.
  std::optional<at::ScalarType> cast_model_type = std::nullopt;
  /// Whether the forward pass runs under autocast. Nothing is patched.
  std::optional<bool> patch_torch_functions = std::nullopt;
  /// Whether batch norms stay float32 in a model that is cast.
  std::optional<bool> keep_batchnorm_fp32 = std::nullopt;
  /// Whether the optimizer keeps float32 copies of low-precision weights.
  std::optional<bool> master_weights = std::nullopt;
  /// Loss scale: 128.0, "dynamic" or GradScalerOptions. Allowed at every level.
  std::optional<LossScaleArg> loss_scale = std::nullopt;
  /// Dtype that the model's outputs are cast to. Unset: float32 if the model is cast.
  std::optional<at::ScalarType> cast_model_outputs = std::nullopt;
};

/// An optimization level with its overrides, an immutable value. Text converts to a level:
///
///     auto amp = mezzo::initialize(model, optimizer, "O1");
///     auto level = mezzo::OptLevel::O2({.keep_batchnorm_fp32 = false, .loss_scale = 128.0});
///     auto level = mezzo::OptLevel::parse(flags.opt_level, {.loss_scale = flags.loss_scale});
///
/// |                       | O0      | O1      | O2      | O3      |
/// |-----------------------|---------|---------|---------|---------|
/// | cast_model_type       | float32 |         | float16 | float16 |
/// | patch_torch_functions | no      | yes     | no      | no      |
/// | keep_batchnorm_fp32   |         |         | yes     | no      |
/// | master_weights        | no      |         | yes     | no      |
/// | loss_scale            | 1       | dynamic | dynamic | 1       |
///
/// O1_bf16, O2_bf16 and O3_bf16 are O1 to O3 in bfloat16, with loss scale 1, since bfloat16 has
/// float32's range.
///
/// Throws c10::Error for contradictory overrides:
/// - O1 with cast_model_type other than float32, keep_batchnorm_fp32 or master_weights: its weights
///   stay float32, also those of batch norms. As in Apex.
/// - patch_torch_functions = true with any level but O1. As in Apex.
/// - O0 with a low-precision cast_model_type, a bf16 level with float16, and master_weights for a
///   float32 model. Apex accepts these silently.
///
/// A dynamic loss scale for a model without float16 is accepted, as in Apex.
class OptLevel {
 public:
  /// Converts text, as `parse` does, so that functions take "O1" for a level.
  template <std::convertible_to<std::string_view> Text>
  OptLevel(const Text& name) : OptLevel(find_properties(name), {}) {}

  /// Returns the level named "O0" to "O3" (the letter O) or "O1_bf16" to "O3_bf16".
  /// \throws c10::Error that lists the names, for any other
  static OptLevel parse(std::string_view name, const OptLevelOverrides& overrides = {}) {
    return {find_properties(name), overrides};
  }

  /// float32; changes nothing.
  static OptLevel O0(const OptLevelOverrides& overrides = {}) { return parse("O0", overrides); }
  /// Autocast to float16, with a dynamic loss scale.
  static OptLevel O1(const OptLevelOverrides& overrides = {}) { return parse("O1", overrides); }
  /// float16 weights with float32 masters, float32 batch norms, and a dynamic loss scale.
  static OptLevel O2(const OptLevelOverrides& overrides = {}) { return parse("O2", overrides); }
  /// float16 weights, without masters and without a loss scale.
  static OptLevel O3(const OptLevelOverrides& overrides = {}) { return parse("O3", overrides); }
  /// Autocast to bfloat16, without a loss scale.
  static OptLevel O1_bf16(const OptLevelOverrides& overrides = {}) {
    return parse("O1_bf16", overrides);
  }
  /// bfloat16 weights with float32 masters, and float32 batch norms.
  static OptLevel O2_bf16(const OptLevelOverrides& overrides = {}) {
    return parse("O2_bf16", overrides);
  }
  /// bfloat16 weights, without masters.
  static OptLevel O3_bf16(const OptLevelOverrides& overrides = {}) {
    return parse("O3_bf16", overrides);
  }

  /// Returns the name, such as "O1".
  std::string_view name() const noexcept { return properties_.name; }

  /// Returns the dtype that the model's weights and inputs are cast to; none if they are not cast.
  std::optional<at::ScalarType> cast_model_type() const noexcept {
    return properties_.cast_model_type;
  }
  /// Returns the dtype that the model's outputs are cast to; none if they are not cast.
  std::optional<at::ScalarType> cast_model_outputs() const noexcept {
    if (properties_.cast_model_outputs) return properties_.cast_model_outputs;
    return cast_model_type() ? std::optional(at::ScalarType::Float) : std::nullopt;
  }
  /// Returns whether the forward pass runs under autocast, in
  /// `mixed_precision_policy().compute_dtype`.
  bool uses_autocast() const noexcept { return properties_.uses_autocast; }
  /// Returns whether batch norms stay in float32.
  bool keep_batchnorm_fp32() const noexcept {
    return properties_.keep_batchnorm_fp32.value_or(false);
  }
  /// Returns whether 16-bit weights have float32 masters.
  bool master_weights() const noexcept { return properties_.master_weights.value_or(false); }
  /// Returns the loss scale; GradScalerOptions::none() for 1.
  const GradScalerOptions& loss_scale() const noexcept { return loss_scale_; }

  /// Returns the dtypes of the level. `param_dtype` is that of the weights in the optimizer:
  /// float32 with master weights. `output_dtype` equals `compute_dtype` if outputs are not cast.
  MixedPrecisionPolicy mixed_precision_policy() const;

  /// Returns the text that Apex prints, from "Selected optimization level O1:" to the options after
  /// overrides.
  std::string describe() const;

 private:
  /// A column of the table of levels, or the result of overrides.
  struct Properties {
    std::string_view name;
    std::string_view description;
    at::ScalarType low_precision;  ///< float32 for O0
    std::optional<at::ScalarType> cast_model_type;
    bool uses_autocast;
    std::optional<bool> keep_batchnorm_fp32;
    std::optional<bool> master_weights;
    bool dynamic_scale;
    std::optional<at::ScalarType> cast_model_outputs{};
  };

  OptLevel(const Properties& level, const OptLevelOverrides& overrides);

  static const Properties& find_properties(std::string_view name);
  static void check_overrides(const Properties& level, const OptLevelOverrides& overrides);
  std::string list_properties() const;

  Properties properties_;
  GradScalerOptions loss_scale_;
};

inline GradScalerOptions LossScaleArg::parse(std::string_view text) {
  if (text == "dynamic") return GradScalerOptions::dynamic({.max_scale = kApexMaxScale});
  double scale = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), scale);
  TORCH_CHECK(error == std::errc() && end == text.data() + text.size(), "loss_scale \"", text,
              "\" is neither a number nor \"dynamic\"; write 128.0, \"128.0\" or \"dynamic\"");
  return GradScalerOptions::fixed(scale);
}

inline const OptLevel::Properties& OptLevel::find_properties(std::string_view name) {
  constexpr auto kFloat = at::ScalarType::Float;
  constexpr auto kHalf = at::ScalarType::Half;
  constexpr auto kBFloat16 = at::ScalarType::BFloat16;
  constexpr std::nullopt_t kNone = std::nullopt;
  static constexpr std::array<Properties, 7> kLevels = {
      {{"O0", "Pure FP32 training.", kFloat, kFloat, false, kNone, false, false},
       {"O1", "Insert automatic casts around Pytorch functions and Tensor methods.", kHalf, kNone,
        true, kNone, kNone, true},
       {"O2", "FP16 training with FP32 batchnorm and FP32 master weights.", kHalf, kHalf, false,
        true, true, true},
       {"O3", "Pure FP16 training.", kHalf, kHalf, false, false, false, false},
       {"O1_bf16", "Insert automatic casts to BF16 around Pytorch functions and Tensor methods.",
        kBFloat16, kNone, true, kNone, kNone, false},
       {"O2_bf16", "BF16 training with FP32 batchnorm and FP32 master weights.", kBFloat16,
        kBFloat16, false, true, true, false},
       {"O3_bf16", "Pure BF16 training.", kBFloat16, kBFloat16, false, false, false, false}}};
  for (const Properties& level : kLevels) {
    if (level.name == name) return level;
  }
  TORCH_CHECK(
      false, "Unexpected optimization level ", name,
      ". Options are 'O0', 'O1', 'O2', 'O3'. Note that in `O0`, `O1`, etc., the prefix O is "
      "the letter O, not the number zero. mezzo adds 'O1_bf16', 'O2_bf16' and 'O3_bf16'.");
}

inline OptLevel::OptLevel(const Properties& level, const OptLevelOverrides& overrides)
    : properties_(level),
      loss_scale_(overrides.loss_scale  ? overrides.loss_scale->options()
                  : level.dynamic_scale ? LossScaleArg("dynamic").options()
                                        : GradScalerOptions::none()) {
  check_overrides(level, overrides);
  if (overrides.cast_model_type) properties_.cast_model_type = overrides.cast_model_type;
  if (overrides.cast_model_outputs) properties_.cast_model_outputs = overrides.cast_model_outputs;
  if (overrides.patch_torch_functions) properties_.uses_autocast = *overrides.patch_torch_functions;
  if (overrides.keep_batchnorm_fp32)
    properties_.keep_batchnorm_fp32 = overrides.keep_batchnorm_fp32;
  if (overrides.master_weights) properties_.master_weights = overrides.master_weights;
  const at::ScalarType model = cast_model_type().value_or(at::ScalarType::Float);
  TORCH_CHECK(
      !master_weights() || model != at::ScalarType::Float, "OptLevel ", name(),
      ": master_weights = true contradicts cast_model_type = float32: masters are float32 "
      "copies of float16 or bfloat16 weights; set master_weights = false, or cast the model");
}

/// Throws for dtypes that cannot be trained, and for overrides that contradict the level.
inline void OptLevel::check_overrides(const Properties& level, const OptLevelOverrides& overrides) {
  const at::ScalarType type = overrides.cast_model_type.value_or(at::ScalarType::Float);
  TORCH_CHECK(detail::is_training_dtype(type) && type != at::ScalarType::Double, "OptLevel ",
              level.name, ": cast_model_type is ", detail::dtype_name(type),
              "; it should be float32, float16 or bfloat16");
  const at::ScalarType outputs = overrides.cast_model_outputs.value_or(at::ScalarType::Float);
  TORCH_CHECK(detail::is_training_dtype(outputs), "OptLevel ", level.name,
              ": cast_model_outputs is ", detail::dtype_name(outputs),
              "; it should be float32, bfloat16, float16 or float64");
  const auto throw_contradiction = [&](const std::string& option, const char* remedy) {
    TORCH_CHECK(false, "OptLevel ", level.name, ": ", option,
                " contradicts opt_level = ", level.name, remedy);
  };
  const auto to_text = [](bool value) { return value ? "true" : "false"; };
  if (overrides.patch_torch_functions.value_or(false) && !level.uses_autocast) {
    throw_contradiction(
        "patch_torch_functions = true",
        ": only O1 and O1_bf16 run under autocast; choose one of them, or leave the option out");
  }
  if (level.uses_autocast && overrides.keep_batchnorm_fp32) {
    throw_contradiction(
        c10::str("keep_batchnorm_fp32 = ", to_text(*overrides.keep_batchnorm_fp32)),
        ", whose weights are float32, also those of batch norms; leave the option out, or pass "
        "OpOverrides");
  }
  if (level.uses_autocast && overrides.master_weights) {
    throw_contradiction(c10::str("master_weights = ", to_text(*overrides.master_weights)),
                        ", whose weights are float32; leave the option out, or choose O2");
  }
  if (type == at::ScalarType::Float) return;
  const std::string option = c10::str("cast_model_type = ", detail::dtype_name(type));
  if (level.uses_autocast) {
    throw_contradiction(option,
                        ", which casts inputs of ops and keeps weights float32; choose O2 or O3 to "
                        "cast the model, or leave the option out");
  }
  if (level.low_precision == at::ScalarType::Float) {
    throw_contradiction(option, ", which is float32 throughout; choose O2 or O3");
  }
  if (level.low_precision == at::ScalarType::BFloat16 && type == at::ScalarType::Half) {
    throw_contradiction(option, ", which is bfloat16 without a loss scale; choose O2 or O3");
  }
}

inline MixedPrecisionPolicy OptLevel::mixed_precision_policy() const {
  const at::ScalarType model = cast_model_type().value_or(at::ScalarType::Float);
  const at::ScalarType compute_dtype = uses_autocast() ? properties_.low_precision : model;
  return {.param_dtype = master_weights() ? at::ScalarType::Float : model,
          .compute_dtype = compute_dtype,
          .output_dtype = cast_model_outputs().value_or(compute_dtype)};
}

inline std::string OptLevel::describe() const {
  const std::string before = parse(name()).list_properties(), after = list_properties();
  std::string selected = c10::str("Selected optimization level ", name(), ":  ",
                                  properties_.description, "\n", before);
  if (after == before) return selected;
  return c10::str(selected,
                  "Processing user overrides (options that were given)...\n"
                  "After processing overrides, optimization options are:\n",
                  after);
}

inline std::string OptLevel::list_properties() const {
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
  line("patch_torch_functions", flag(uses_autocast()));
  line("keep_batchnorm_fp32", flag(properties_.keep_batchnorm_fp32));
  line("master_weights", flag(properties_.master_weights));
  line("loss_scale", loss_scale_.mode == LossScaleMode::dynamic
                         ? "dynamic"
                         : detail::format_python_float(static_cast<float>(loss_scale_.init_scale)));
  if (properties_.cast_model_outputs) line("cast_model_outputs", dtype(cast_model_outputs()));
  return text;
}

/// Prints `describe()`.
inline std::ostream& operator<<(std::ostream& stream, const OptLevel& level) {
  return stream << level.describe();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
