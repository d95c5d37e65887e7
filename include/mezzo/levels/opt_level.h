/// \file
/// Apex's optimization levels O0 to O3 as values. A level holds the dtype that the model is cast
/// to, whether ops are cast one by one, what stays float32, and the loss scale. It changes nothing
/// by itself.
#pragma once

#include <mezzo/base/loss_scale.h>
#include <mezzo/base/precision.h>
#include <mezzo/base/version.h>

#include <c10/core/ScalarType.h>

#include <concepts>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A loss scale, given as 128.0, "128.0", "dynamic" or a LossScale.
class LossScaleChoice {
 public:
  /// Takes a rule as it is. \throws c10::Error as LossScale::checked does
  LossScaleChoice(const LossScale& rule) : rule_(rule.checked()) {}

  /// Makes a constant scale.
  /// \throws c10::Error unless it is positive and finite as a float
  LossScaleChoice(double scale) : rule_(LossScale::fixed(scale)) {}

  /// Parses a number, or "dynamic": Apex's rule, which starts at 2^16, doubles after 2000 clean
  /// steps up to 2^24, and halves after an overflow. For other bounds use
  /// `LossScale::dynamic({...})`.
  /// \throws c10::Error for any other text
  template <std::convertible_to<std::string_view> Text>
  LossScaleChoice(const Text& text) : rule_(parsed(text)) {}

  /// Returns the rule of the loss scale.
  const LossScale& rule() const noexcept { return rule_; }

 private:
  static LossScale parsed(std::string_view text);

  LossScale rule_;
};

/// Overrides of a level's properties, by Apex's names. Unset members keep the level's value.
struct OptLevelOverrides {
  /// The dtype that the model's weights and inputs are cast to: float32, half or bfloat16.
  std::optional<at::ScalarType> cast_model_type = std::nullopt;
  /// Whether ops are cast one by one, by the op lists. Nothing is patched; autocast does it.
  std::optional<bool> patch_torch_functions = std::nullopt;
  /// Whether batch norms stay float32 in a model that is cast.
  std::optional<bool> keep_batchnorm_fp32 = std::nullopt;
  /// Whether the optimizer keeps float32 copies of low-precision weights.
  std::optional<bool> master_weights = std::nullopt;
  /// The loss scale: 128.0, "dynamic" or a LossScale. Allowed at every level.
  std::optional<LossScaleChoice> loss_scale = std::nullopt;
  /// The dtype that the model's outputs are cast to. Unset: float32 if the model is cast.
  std::optional<at::ScalarType> cast_model_outputs = std::nullopt;
};

/// An optimization level with its overrides, an immutable value:
///
///     auto level = mezzo::OptLevel::O2({.keep_batchnorm_fp32 = false, .loss_scale = 128.0});
///     auto level = mezzo::OptLevel::parse(flags.opt_level, {.loss_scale = flags.loss_scale});
///
/// |                       | O0      | O1      | O2      | O3   |
/// |-----------------------|---------|---------|---------|------|
/// | cast_model_type       | float32 |         | half    | half |
/// | patch_torch_functions | no      | yes     | no      | no   |
/// | keep_batchnorm_fp32   |         |         | yes     | no   |
/// | master_weights        | no      |         | yes     | no   |
/// | loss_scale            | 1       | dynamic | dynamic | 1    |
///
/// O1_bf16, O2_bf16 and O3_bf16 are O1 to O3 in bfloat16, with loss scale 1, since bfloat16 has
/// float32's range.
///
/// A contradiction throws c10::Error, which names both sides and what to do:
/// - O1 with cast_model_type other than float32, keep_batchnorm_fp32 or master_weights. O1 leaves
///   weights in float32, and its op lists run batch norms in float32. As in Apex.
/// - patch_torch_functions = true with any level but O1. As in Apex.
/// - O0 with a low-precision cast_model_type, a bf16 level with half, and master_weights
///   for a model in float32. Apex accepts these silently.
/// A dynamic loss scale for a model without half is accepted, as in Apex.
class OptLevel {
 public:
  /// float32; changes nothing.
  static OptLevel O0(const OptLevelOverrides& set = {}) { return parse("O0", set); }
  /// Autocast to half, with a dynamic loss scale.
  static OptLevel O1(const OptLevelOverrides& set = {}) { return parse("O1", set); }
  /// Weights of half with float32 masters, batch norms in float32, and a dynamic loss scale.
  static OptLevel O2(const OptLevelOverrides& set = {}) { return parse("O2", set); }
  /// Weights of half, without masters and without a loss scale.
  static OptLevel O3(const OptLevelOverrides& set = {}) { return parse("O3", set); }
  /// Autocast to bfloat16, without a loss scale.
  static OptLevel O1_bf16(const OptLevelOverrides& set = {}) { return parse("O1_bf16", set); }
  /// Weights of bfloat16 with float32 masters, and batch norms in float32.
  static OptLevel O2_bf16(const OptLevelOverrides& set = {}) { return parse("O2_bf16", set); }
  /// Weights of bfloat16, without masters.
  static OptLevel O3_bf16(const OptLevelOverrides& set = {}) { return parse("O3_bf16", set); }

  /// Returns the level of this name: "O0" to "O3" (the letter O), "O1_bf16" to "O3_bf16".
  /// \throws c10::Error for any other name, in Apex's words
  static OptLevel parse(std::string_view name, const OptLevelOverrides& overrides = {});

  /// Returns the name, such as "O1".
  std::string_view name() const noexcept { return own_.name; }

  /// Returns the dtype that the model's weights and inputs are cast to; none if they are not cast.
  std::optional<at::ScalarType> cast_model_type() const noexcept { return own_.cast_model_type; }
  /// Returns the dtype that the model's outputs are cast to; none if they are not cast.
  std::optional<at::ScalarType> cast_model_outputs() const noexcept {
    if (own_.cast_model_outputs) return own_.cast_model_outputs;
    return cast_model_type() ? std::optional(at::ScalarType::Float) : std::nullopt;
  }
  /// Whether the forward pass runs under autocast, in the dtype `precision().compute`.
  bool uses_op_lists() const noexcept { return own_.op_lists; }
  /// Returns whether batch norms stay in float32.
  bool keep_batchnorm_fp32() const noexcept { return own_.keep_batchnorm_fp32.value_or(false); }
  /// Returns whether 16-bit weights have float32 masters.
  bool master_weights() const noexcept { return own_.master_weights.value_or(false); }
  /// Returns the loss scale; LossScale::none() for 1.
  const LossScale& loss_scale() const noexcept { return loss_scale_; }

  /// Returns the dtypes of the level. `param` is the dtype of the weights in the optimizer: float32
  /// with master weights. `output` equals `compute` if outputs are not cast.
  Precision precision() const;

  /// Returns the text that Apex prints, from "Selected optimization level O1:" to the options after
  /// overrides.
  std::string describe() const;

 private:
  /// A row of the table of levels, or what overrides make of it.
  struct Properties {
    std::string_view name;
    std::string_view brief;
    at::ScalarType low_precision;  ///< what it lowers to; float32 where it does not
    std::optional<at::ScalarType> cast_model_type;
    bool op_lists;
    std::optional<bool> keep_batchnorm_fp32;
    std::optional<bool> master_weights;
    bool dynamic_scale;
    std::optional<at::ScalarType> cast_model_outputs{};
  };

  OptLevel(const Properties& level, const OptLevelOverrides& set);

  static const Properties& properties_of(std::string_view name);
  static void check(const Properties& level, const OptLevelOverrides& set);
  std::string listing() const;

  Properties own_;
  LossScale loss_scale_;
};

/// Writes `describe()`.
inline std::ostream& operator<<(std::ostream& stream, const OptLevel& level);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/levels/detail/opt_level_impl.h>
