#include "machine_notes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "machine.h"

namespace bert_ner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

/// Two cores with instructions for bfloat16, and nothing set.
MachineFacts usual_facts() {
  return {.threads = 2,
          .cores = 2,
          .amp = {.device = torch::kCPU, .reason = "bfloat16: the default on the CPU"},
          .recommended = {.device = torch::kCPU, .reason = "bfloat16: this CPU has avx512_bf16"}};
}

TEST(MachineNotes, SayWhoChoseTheThreads) {
  auto facts = usual_facts();
  const auto note = [&] { return machine_notes(facts).at(0); };
  EXPECT_THAT(note(), StartsWith("2 threads on 2 cores (OMP_NUM_THREADS is not set): speeds are "
                                 "those of the whole machine"));
  facts.threads = 1;
  facts.omp_num_threads = "1";
  EXPECT_THAT(note(), StartsWith("1 thread on 2 cores (OMP_NUM_THREADS=1): speeds are those of a "
                                 "part of this machine"));
  facts.threads = 8;
  facts.chose_threads = true;
  EXPECT_THAT(note(), StartsWith("8 threads on 2 cores (--threads): threads wait for one another"));
}

TEST(MachineNotes, SayWhatAutocastMeansForTheAmpRows) {
  auto facts = usual_facts();
  const auto note = [&] { return machine_notes(facts).at(1); };
  EXPECT_EQ(note(),
            "The amp rows compute in bfloat16 (MEZZO_AUTOCAST is not set), for which this "
            "machine has instructions.");
  facts.recommended = {.device = torch::kCPU,
                       .enabled = false,
                       .reason = "float32 (autocast off): this CPU has no bfloat16 instructions"};
  EXPECT_THAT(note(), HasSubstr("which this machine emulates: their speed says nothing of mixed "
                                "precision, their scores and memory do. float32 (autocast off): "
                                "this CPU has no bfloat16 instructions."));
  facts.mezzo_autocast = "off";
  facts.amp.enabled = false;
  EXPECT_EQ(note(),
            "MEZZO_AUTOCAST=off: autocast is off in the amp rows, which compute what fp32 "
            "does.");
}

TEST(MachineNotes, SayThatFloat16IsEmulatedWhereBfloat16IsNot) {
  auto facts = usual_facts();
  facts.mezzo_autocast = "fp16";
  facts.amp = {.device = torch::kCPU, .dtype = torch::kFloat16, .reason = "slow"};
  EXPECT_THAT(machine_notes(facts).at(1),
              HasSubstr("The amp rows compute in float16 (MEZZO_AUTOCAST=fp16), which this machine "
                        "emulates"));
}

TEST(MachineNotes, WarnOfOtherProgramsWhereTheyTookCores) {
  std::vector<RunResult> runs(2);
  runs[0].name = "fp32";
  runs[1].name = "amp no scale";
  runs[1].waited_part = 0.01;
  EXPECT_FALSE(busy_note(runs));
  runs[1].waited_part = 0.31;
  EXPECT_THAT(busy_note(runs).value(),
              HasSubstr("threads of \"amp no scale\" waited for a core 31% of the time"));
}

TEST(CoreTime, IsTheTimeThatWasWaitedForACore) {
  const CoreTime before{.ran = 1, .waited = 1}, after{.ran = 4, .waited = 2};
  EXPECT_DOUBLE_EQ(after.since(before).waited_part(), 0.25);
  EXPECT_EQ(before.since(before).waited_part(), 0);
  const auto own = core_time();
  double sum = 0;
  for (int i = 0; i < 50'000'000; ++i) sum += i;
  EXPECT_GT(sum, 0);
  EXPECT_GT(core_time().since(own).ran, 0.001);
}

}  // namespace
}  // namespace bert_ner
