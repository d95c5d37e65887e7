#include "table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "machine.h"

namespace bert_ner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kMebibyte = 1 << 20;

RunResult fp32_result() {
  return {.name = "fp32",
          .seed = 1,
          .autocast = "off",
          .learning_rate = 4e-4,
          .f1 = 0.5,
          .precision = 0.6,
          .recall = 0.4,
          .peak_memory_bytes = 600 * kMebibyte,
          .bytes_a_parameter = 16,
          .tokens_per_second = 1000,
          .steps = 240};
}

RunResult fp16_result() {
  auto result = fp32_result();
  result.name = "fp16 dynamic scale";
  result.f1 = 0.45;
  result.peak_memory_bytes = 500 * kMebibyte;
  result.bytes_a_parameter = 16.94;
  result.tokens_per_second = 1500;
  result.skipped_steps = 3;
  result.loss_scale = 8192;
  return result;
}

/// The seeds that follow.
RunResult with_seed(RunResult result, uint64_t seed, double f1, double tokens_per_second) {
  result.seed = seed;
  result.f1 = f1;
  result.tokens_per_second = tokens_per_second;
  return result;
}

TEST(Table, HasAColumnForScoreMemoryAndSpeed) {
  EXPECT_EQ(
      format_table({.rows = {{fp32_result()}, {fp16_result()}}, .float32_speeds = {}}),
      "| name               |    F1 |  memory | bytes/param | tokens/s | speed | skipped |\n"
      "|--------------------|------:|--------:|------------:|---------:|------:|--------:|\n"
      "| fp32               | 0.500 | 600 MiB |        16.0 |     1000 |  1.00 |       0 |\n"
      "| fp16 dynamic scale | 0.450 | 500 MiB |        16.9 |     1500 |  1.50 |       3 |\n");
}

TEST(Table, FitsHundredColumnsWithTheLongestName) {
  auto longest = fp32_result();
  for (const auto precision : all_precisions()) {
    if (title_of(precision).size() > longest.name.size()) longest.name = title_of(precision);
  }
  const auto text = format_table({.rows = {{longest}}, .float32_speeds = {}});
  EXPECT_LE(text.find('\n'), 100U);
}

TEST(Table, OfSeveralSeedsHasMeansAndSpreads) {
  auto larger = with_seed(fp16_result(), 2, 0.51, 4000);
  larger.peak_memory_bytes = 700 * kMebibyte;
  const auto text = format_table(
      {.rows = {{fp32_result(), with_seed(fp32_result(), 2, 0.54, 2000)}, {fp16_result(), larger}},
       .float32_speeds = {}});
  EXPECT_THAT(text, HasSubstr("| 0.520 (0.500-0.540) |"));
  EXPECT_THAT(text, HasSubstr("| 0.480 (0.450-0.510) |"));
  EXPECT_THAT(text, HasSubstr("| 700 MiB |"));
  EXPECT_THAT(text, HasSubstr("|     2750 |  1.75 |       6 |"));
}

TEST(Table, SaysWhereItsSpeedsDoNotCompare) {
  const auto table = [](std::vector<double> speeds) {
    return Table{.rows = {{fp32_result()}}, .float32_speeds = std::move(speeds)};
  };
  EXPECT_THAT(format_table(table({1000, 1090, 1050})), testing::EndsWith("|\n"));
  EXPECT_EQ(table_json(table({1000, 1090, 1050}), RunOptions()).at("speeds_compare"), true);
  EXPECT_THAT(format_table(table({1000, 400, 1050})),
              HasSubstr("The speeds do not compare: the same float32 steps ran at 400 to 1050 "));
  EXPECT_EQ(table_json(table({1000, 400, 1050}), RunOptions()).at("speeds_compare"), false);
}

TEST(Table, ForProgramsHasAllRunsOfSeveralSeeds) {
  const auto one =
      table_json({.rows = {{fp32_result()}, {fp16_result()}}, .float32_speeds = {}}, RunOptions());
  EXPECT_EQ(one.at("rows").at(1).at("skipped_steps"), 3);
  EXPECT_EQ(one.at("rows").at(1).at("relative_speed"), 1.5);
  EXPECT_FALSE(one.at("rows").at(1).contains("runs"));

  const Table twice{.rows = {{fp32_result(), with_seed(fp32_result(), 2, 0.54, 2000)}},
                    .float32_speeds = {}};
  const auto runs = table_json(twice, RunOptions()).at("rows").at(0).at("runs");
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_EQ(runs.at(1).at("seed"), 2);
  EXPECT_EQ(runs.at(1).at("f1"), 0.54);
}

TEST(Table, HasNoSecondRowOfFloat16) {
  const auto rows_under = [](const char* autocast) {
    setenv("MEZZO_AUTOCAST", autocast, 1);
    auto rows = table_precisions(RunOptions());
    unsetenv("MEZZO_AUTOCAST");
    return rows;
  };
  EXPECT_THAT(
      rows_under("fp16"),
      ElementsAre(Precision::fp32, Precision::amp_no_scale, Precision::amp, Precision::amp_8bit,
                  Precision::bf16_split_master, Precision::bf16_stochastic));
  EXPECT_THAT(rows_under("bf16"),
              testing::Contains(Precision::fp16).Times(has_float16(torch::kCPU) ? 1 : 0));
}

}  // namespace
}  // namespace bert_ner
