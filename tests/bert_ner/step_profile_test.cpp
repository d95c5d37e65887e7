#include "step_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bert_ner {
namespace {

using testing::Contains;
using testing::ContainsRegex;
using testing::Key;

TEST(StepProfile, TellsOpsByKindAndPhase) {
  const auto weight = torch::ones({64, 32}).requires_grad_();
  const auto input = torch::ones({16, 64});
  StepProfile profile;
  torch::Tensor loss;
  {
    RECORD_USER_SCOPE("forward");
    loss = torch::mm(input, weight).to(torch::kBFloat16).sum();
  }
  {
    RECORD_USER_SCOPE("backward");
    loss.backward();
  }
  const auto times = profile.stop();
  EXPECT_THAT(times.milliseconds.at("matrix products"), Contains(Key("forward")));
  EXPECT_THAT(times.milliseconds.at("matrix products"), Contains(Key("backward")));
  EXPECT_THAT(times.milliseconds.at("casts"), Contains(Key("forward")));
  for (const auto& [kind, phases] : times.milliseconds) {
    for (const auto& [phase, milliseconds] : phases) EXPECT_GE(milliseconds, 0) << kind << phase;
  }
  // Forward, and the weight's gradient; the input needs none.
  EXPECT_EQ(times.operations.at(torch::kFloat32), 2 * 2.0 * 16 * 64 * 32);
}

TEST(StepProfile, CountsAnOpsOwnTimeAlone) {
  const auto matrix = torch::ones({512, 512});
  StepProfile profile;
  const auto began = std::chrono::steady_clock::now();
  {
    RECORD_USER_SCOPE("forward");
    for (int i = 0; i < 4; ++i) torch::matmul(matrix, matrix);  // calls mm
  }
  const std::chrono::duration<double, std::milli> all = std::chrono::steady_clock::now() - began;
  const auto times = profile.stop();
  double sum = 0;
  for (const auto& [kind, phases] : times.milliseconds) sum += phases.at("forward");
  EXPECT_LE(sum, all.count());
  EXPECT_GT(sum, 0.9 * all.count());
}

TEST(StepProfile, SeesNothingOnceItIsStopped) {
  StepProfile profile;
  profile.stop();
  torch::ones({4}).add(1);
  EXPECT_TRUE(profile.stop().milliseconds.empty());
  StepProfile next;  // another may follow
  torch::ones({4}).add(1);
  EXPECT_FALSE(next.stop().milliseconds.empty());
}

TEST(StepProfile, CountsTheOperationsOfEachProduct) {
  const c10::IValue left = torch::ones({3, 4}), right = torch::ones({4, 5}),
                    bias = torch::ones({5});
  EXPECT_EQ(matrix_operations("aten::mm", std::vector{left, right}), 2 * 3 * 4 * 5);
  EXPECT_EQ(matrix_operations("aten::addmm", std::vector{bias, left, right}), 2 * 3 * 4 * 5);
  const c10::IValue lefts = torch::ones({2, 3, 4}), rights = torch::ones({2, 4, 5});
  EXPECT_EQ(matrix_operations("aten::bmm", std::vector{lefts, rights}), 2 * 2 * 3 * 4 * 5);
  EXPECT_EQ(matrix_operations("aten::add", std::vector{left, left}), 0);
}

TEST(StepProfile, IsPrintedAStepWithTheCostliestFirst) {
  StepTimes times;
  times.milliseconds["casts"] = {{"forward", 10}, {"backward", 20}};
  times.milliseconds["matrix products"] = {{"forward", 40}, {"backward", 80}};
  times.milliseconds["outside of ops"] = {{"optimizer", 50}};
  times.operations[torch::kFloat32] = 1e9;
  const auto text = format_step_times(times, 10);
  EXPECT_THAT(text,
              ContainsRegex("matrix products +\\| +4.00 \\| +8.00 \\| +0.00 \\| +0.00 \\| +"
                            "12.00 \\| +60% \\|\n"
                            "\\| outside of ops +\\| [^\n]* 5.00 \\| +25% \\|\n"
                            "\\| casts +\\| +1.00 \\| +2.00 [^\n]*\n"
                            "\\| all +\\| +5.00 \\| +10.00 \\| +5.00 \\| +0.00 \\| +20.00 \\| "
                            "+100% \\|\n"
                            "matrix products in Float: 0.10 GFLOP a step, "));
  EXPECT_GT(peak_operations_per_second(torch::kFloat32), 1e9);
}

}  // namespace
}  // namespace bert_ner
