#include <mezzo/opt_levels/opt_level.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using mezzo::GradScalerOptions;
using mezzo::LossScaleMode;
using mezzo::MixedPrecisionPolicy;
using mezzo::OptLevel;
using mezzo::OptLevelOverrides;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string format_policy(const OptLevel& level) {
  return level.mixed_precision_policy().to_string();
}

TEST(OptLevel, PropertiesMatchApex) {
  constexpr std::nullopt_t kNotCast = std::nullopt;
  struct Row {
    OptLevel level;
    std::optional<torch::ScalarType> model;
    bool uses_autocast, keeps_norms, masters, scales;
    std::string precision;
  };
  for (const Row& row :
       std::vector<Row>{{OptLevel::O0(), torch::kFloat, false, false, false, false,
                         "params=float32,compute=float32,output=float32"},
                        {OptLevel::O1(), kNotCast, true, false, false, true,
                         "params=float32,compute=float16,output=float16"},
                        {OptLevel::O2(), torch::kHalf, false, true, true, true,
                         "params=float32,compute=float16,output=float32"},
                        {OptLevel::O3(), torch::kHalf, false, false, false, false,
                         "params=float16,compute=float16,output=float32"},
                        {OptLevel::O1_bf16(), kNotCast, true, false, false, false,
                         "params=float32,compute=bfloat16,output=bfloat16"},
                        {OptLevel::O2_bf16(), torch::kBFloat16, false, true, true, false,
                         "params=float32,compute=bfloat16,output=float32"},
                        {OptLevel::O3_bf16(), torch::kBFloat16, false, false, false, false,
                         "params=bfloat16,compute=bfloat16,output=float32"}}) {
    const OptLevel& level = row.level;
    EXPECT_EQ(level.cast_model_type(), row.model) << level;
    EXPECT_EQ(level.cast_model_outputs(), row.model ? std::optional(torch::kFloat) : kNotCast)
        << level;
    EXPECT_EQ(level.uses_autocast(), row.uses_autocast) << level;
    EXPECT_EQ(level.keep_batchnorm_fp32(), row.keeps_norms) << level;
    EXPECT_EQ(level.master_weights(), row.masters) << level;
    EXPECT_EQ(level.loss_scale().mode, row.scales ? LossScaleMode::dynamic : LossScaleMode::none);
    EXPECT_EQ(format_policy(level), row.precision);
  }
}

TEST(OptLevel, DynamicScaleMatchesApex) {
  const GradScalerOptions options = OptLevel::O2().loss_scale();
  EXPECT_EQ(options.init_scale, 65536);
  EXPECT_EQ(options.growth_factor, 2);
  EXPECT_EQ(options.backoff_factor, 0.5);
  EXPECT_EQ(options.growth_interval, 2000);
  EXPECT_EQ(options.max_scale, 16777216);
}

TEST(OptLevelOverrides, ReplaceOnlyNamedProperties) {
  const OptLevel level = OptLevel::O2({.cast_model_type = torch::kBFloat16,
                                       .keep_batchnorm_fp32 = false,
                                       .loss_scale = 128.0,
                                       .cast_model_outputs = torch::kHalf});
  EXPECT_EQ(level.cast_model_type(), torch::kBFloat16);
  EXPECT_FALSE(level.keep_batchnorm_fp32());
  EXPECT_TRUE(level.master_weights());
  EXPECT_EQ(level.loss_scale().mode, LossScaleMode::fixed);
  EXPECT_EQ(level.loss_scale().init_scale, 128);
  EXPECT_EQ(format_policy(level), "params=float32,compute=bfloat16,output=float16");

  EXPECT_EQ(OptLevel::O2({.cast_model_type = torch::kBFloat16}).loss_scale().mode,
            LossScaleMode::dynamic);
  EXPECT_EQ(format_policy(OptLevel::O2({.master_weights = false})),
            "params=float16,compute=float16,output=float32");
  EXPECT_EQ(format_policy(OptLevel::O1({.cast_model_outputs = torch::kFloat})),
            "params=float32,compute=float16,output=float32");
  EXPECT_EQ(format_policy(OptLevel::O1({.patch_torch_functions = false})),
            "params=float32,compute=float32,output=float32");
}

TEST(OptLevelOverrides, AcceptNumericOrTextLossScale) {
  EXPECT_EQ(OptLevel::O3({.loss_scale = "dynamic"}).loss_scale().max_scale, 16777216);
  EXPECT_EQ(OptLevel::O3({.loss_scale = std::string("128.0")}).loss_scale().init_scale, 128);
  EXPECT_EQ(OptLevel::O3({.loss_scale = 64}).loss_scale().init_scale, 64);
  const GradScalerOptions options = GradScalerOptions::dynamic({.init_scale = 8, .min_scale = 2});
  EXPECT_EQ(OptLevel::O3({.loss_scale = options}).loss_scale().min_scale, 2);
  for (const char* text : {"dynamics", "", "128x", " 1"}) {
    EXPECT_THAT([&] { OptLevel::O2({.loss_scale = text}); },
                ThrowsMessage<c10::Error>(HasSubstr("loss_scale \"" + std::string(text) +
                                                    "\" is neither a number nor \"dynamic\"")));
  }
  EXPECT_THROW(OptLevel::O2({.loss_scale = -1.0}), c10::Error);
}

TEST(OptLevelOverrides, AcceptDynamicScaleWithoutFloat16) {
  EXPECT_EQ(OptLevel::O0({.loss_scale = "dynamic"}).loss_scale().mode, LossScaleMode::dynamic);
  EXPECT_EQ(OptLevel::O3_bf16({.loss_scale = "dynamic"}).loss_scale().mode, LossScaleMode::dynamic);
}

using Make = std::function<OptLevel()>;

TEST(OptLevelOverrides, ThrowForContradictions) {
  const std::vector<std::pair<Make, std::string>> cases{
      {[] { return OptLevel::O1({.cast_model_type = torch::kHalf}); },
       "OptLevel O1: cast_model_type = float16 contradicts opt_level = O1, which casts inputs of "
       "ops and keeps weights float32; choose O2 or O3 to cast the model, or leave the option "
       "out"},
      {[] { return OptLevel::O1_bf16({.cast_model_type = torch::kBFloat16}); },
       "cast_model_type = bfloat16 contradicts opt_level = O1_bf16"},
      {[] { return OptLevel::O1({.keep_batchnorm_fp32 = true}); },
       "keep_batchnorm_fp32 = true contradicts opt_level = O1, whose weights are"},
      {[] { return OptLevel::O1({.master_weights = false}); },
       "master_weights = false contradicts opt_level = O1, whose weights are float32"},
      {[] { return OptLevel::O2({.patch_torch_functions = true}); },
       "patch_torch_functions = true contradicts opt_level = O2: only O1 and O1_bf16 run under "
       "autocast"},
      {[] { return OptLevel::O0({.cast_model_type = torch::kHalf}); },
       "cast_model_type = float16 contradicts opt_level = O0, which is float32 throughout"},
      {[] { return OptLevel::O2_bf16({.cast_model_type = torch::kHalf, .loss_scale = 8.0}); },
       "cast_model_type = float16 contradicts opt_level = O2_bf16, which is bfloat16 without a "
       "loss scale; choose O2 or O3"},
      {[] { return OptLevel::O0({.master_weights = true}); },
       "OptLevel O0: master_weights = true contradicts cast_model_type = float32"},
      {[] { return OptLevel::O2({.cast_model_type = torch::kFloat}); },
       "OptLevel O2: master_weights = true contradicts cast_model_type = float32: masters are "
       "float32 copies of float16 or bfloat16 weights; set master_weights = false, or cast the "
       "model"},
      {[] { return OptLevel::O3({.cast_model_type = torch::kDouble}); },
       "cast_model_type is float64; it should be float32, float16 or bfloat16"},
      {[] { return OptLevel::O3({.cast_model_type = torch::kLong}); }, "cast_model_type is Long"},
      {[] { return OptLevel::O3({.cast_model_outputs = torch::kLong}); },
       "cast_model_outputs is Long"}};
  for (const auto& [make, error] : cases) {
    EXPECT_THAT(make, ThrowsMessage<c10::Error>(HasSubstr(error)));
  }
}

TEST(OptLevelOverrides, AcceptRedundantOverrides) {
  EXPECT_NO_THROW(OptLevel::O1({.cast_model_type = torch::kFloat}));
  EXPECT_NO_THROW(OptLevel::O1({.patch_torch_functions = true}));
  EXPECT_NO_THROW(OptLevel::O2({.patch_torch_functions = false}));
  EXPECT_NO_THROW(OptLevel::O2_bf16({.cast_model_type = torch::kBFloat16}));
  EXPECT_EQ(OptLevel::O2({.cast_model_type = torch::kFloat, .master_weights = false})
                .mixed_precision_policy(),
            MixedPrecisionPolicy());
  EXPECT_NO_THROW(OptLevel::O0({.keep_batchnorm_fp32 = true, .master_weights = false}));
}

TEST(OptLevelParse, AcceptsEveryName) {
  for (const char* name : {"O0", "O1", "O2", "O3", "O1_bf16", "O2_bf16", "O3_bf16"}) {
    EXPECT_EQ(OptLevel::parse(name).name(), name);
  }
  EXPECT_EQ(OptLevel::parse("O2", {.loss_scale = 16.0}).loss_scale().init_scale, 16);
}

TEST(OptLevelParse, ThrowsApexErrorForUnknownName) {
  for (const std::string name : {"O4", "02", "o1", ""}) {
    EXPECT_THAT([&] { OptLevel::parse(name); },
                ThrowsMessage<c10::Error>(HasSubstr("Unexpected optimization level " + name +
                                                    ". Options are 'O0', 'O1', 'O2', 'O3'.")));
  }
}

TEST(OptLevelDescribe, MatchesApex) {
  std::ostringstream text;
  text << OptLevel::O2({.keep_batchnorm_fp32 = false, .loss_scale = 128.0});
  EXPECT_EQ(text.str(),
            "Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master "
            "weights.\n"
            "enabled                : True\n"
            "opt_level              : O2\n"
            "cast_model_type        : torch.float16\n"
            "patch_torch_functions  : False\n"
            "keep_batchnorm_fp32    : True\n"
            "master_weights         : True\n"
            "loss_scale             : dynamic\n"
            "Processing user overrides (options that were given)...\n"
            "After processing overrides, optimization options are:\n"
            "enabled                : True\n"
            "opt_level              : O2\n"
            "cast_model_type        : torch.float16\n"
            "patch_torch_functions  : False\n"
            "keep_batchnorm_fp32    : False\n"
            "master_weights         : True\n"
            "loss_scale             : 128.0\n");
}

TEST(OptLevelDescribe, ListsPropertiesOnceWithoutOverrides) {
  EXPECT_THAT(OptLevel::O2().describe(), Not(HasSubstr("After processing overrides")));
  EXPECT_THAT(OptLevel::O2({.loss_scale = 128.0}).describe(),
              HasSubstr("After processing overrides"));
}

TEST(OptLevelDescribe, PrintsNoneForUnsetProperties) {
  const std::string text = OptLevel::O1().describe();
  EXPECT_THAT(text, AllOf(HasSubstr("cast_model_type        : None\n"),
                          HasSubstr("patch_torch_functions  : True\n"),
                          HasSubstr("keep_batchnorm_fp32    : None\n"),
                          HasSubstr("master_weights         : None\n")));
  EXPECT_THAT(OptLevel::O0().describe(), HasSubstr("loss_scale             : 1.0\n"));
}

}  // namespace
