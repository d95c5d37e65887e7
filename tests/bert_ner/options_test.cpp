#include "options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bert_ner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Arguments = std::vector<std::string>;

Arguments with_files(Arguments more) {
  Arguments arguments{"--model", "m", "--data", "d"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::string usage_error(const Arguments& arguments) {
  try {
    parse_command_line(arguments);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(CommandLine, WithoutAPrecisionAsksForTheTable) {
  const auto request = parse_command_line(with_files({"--epochs", "2"}));
  const auto* table = std::get_if<TableRequest>(&request);
  ASSERT_NE(table, nullptr);
  EXPECT_THAT(table->arguments, ElementsAre("--model", "m", "--data", "d", "--epochs", "2"));
}

TEST(CommandLine, APrecisionAsksForOneRun) {
  const auto request = parse_command_line(
      with_files({"--precision", "amp-no-scale", "--seed", "7", "--dropout", "0.25", "--json", "a",
                  // What the table appends for its rows wins over what the user gave.
                  "--precision", "fp32", "--json", "b"}));
  const auto* run = std::get_if<RunOptions>(&request);
  ASSERT_NE(run, nullptr);
  EXPECT_EQ(run->training.precision, Precision::fp32);
  EXPECT_EQ(run->json, "b");
  EXPECT_EQ(run->training.seed, 7U);
  EXPECT_EQ(run->training.dropout, 0.25);
}

TEST(CommandLine, KnowsEveryPrecisionByItsFlag) {
  for (const auto precision : all_precisions()) {
    const auto request = parse_command_line(with_files({"--precision", flag_of(precision)}));
    EXPECT_EQ(std::get<RunOptions>(request).training.precision, precision);
    EXPECT_EQ(nlohmann::json(flag_of(precision)).get<Precision>(), precision);
  }
}

TEST(CommandLine, TakesTheSeedThatTheTableAppendsForItsRows) {
  const auto request = parse_command_line(with_files(
      {"--seed", "5", "--seeds", "3", "--precision", "amp", "--seed", "7", "--seeds", "1"}));
  EXPECT_EQ(std::get<RunOptions>(request).training.seed, 7U);
  EXPECT_EQ(std::get<TableRequest>(parse_command_line(with_files({"--seeds", "3"}))).options.seeds,
            3);
}

TEST(CommandLine, TakesAResumeWithoutTheFlagsOfTheRun) {
  const auto request = parse_command_line({"--resume", "r", "--save", "r", "--max-steps", "9"});
  const auto* run = std::get_if<RunOptions>(&request);
  ASSERT_NE(run, nullptr);
  EXPECT_EQ(run->max_steps, 9);
  EXPECT_THAT(usage_error({"--resume", "r", "--batch-size", "4"}),
              HasSubstr("--batch-size: a resumed run keeps what it began with"));
}

TEST(CommandLine, PredictTakesATextOrAFile) {
  const auto request = parse_command_line({"predict", "--saved", "s", "some text"});
  const auto* predict = std::get_if<PredictOptions>(&request);
  ASSERT_NE(predict, nullptr);
  EXPECT_EQ(predict->text, "some text");
  EXPECT_THAT(usage_error({"predict", "--saved", "s"}), HasSubstr("give a sentence"));
  EXPECT_THAT(usage_error({"predict", "text"}), HasSubstr("--saved is required"));
  EXPECT_THAT(usage_error({"predict", "--saved", "s", "--file", "f", "text"}),
              HasSubstr("excludes"));
}

TEST(CommandLine, HelpListsTheFlags) {
  const auto request = parse_command_line({"--help"});
  const auto* help = std::get_if<HelpRequest>(&request);
  ASSERT_NE(help, nullptr);
  EXPECT_THAT(help->text, testing::AllOf(HasSubstr("--learning-rate"), HasSubstr("predict")));
}

TEST(CommandLine, ImpossibleFlagsAreUsageErrorsOfOneLine) {
  const std::vector<std::pair<Arguments, const char*>> cases{
      {{}, "--model: name the folder"},
      {{"--model", "m"}, "--data: name a CoNLL file"},
      {{"--model", "m", "--train", "t"}, "--data: name a CoNLL file"},
      {with_files({"--train", "t", "--valid", "v"}), "--data excludes --"},
      {{"--model", "m", "--train", "t", "--valid", "v", "--held-out", "0.5"}, "--held-out"},
      {with_files({"--batch-size", "0"}),
       "--batch-size 0: give a whole number from 1 to 1000000000"},
      {with_files({"--batch-size", "1.5"}), "--batch-size 1.5: give a whole number"},
      {with_files({"--batch-size"}), "--batch-size: give a value"},
      {with_files({"--batch-size", "99999999999999999999"}), "--batch-size"},
      {with_files({"--epochs", "-1"}), "--epochs"},
      {with_files({"--accumulate", "0"}), "--accumulate"},
      {with_files({"--learning-rate", "nan"}), "--learning-rate nan: give a number from 0 to 10"},
      {with_files({"--learning-rate", "fast"}), "--learning-rate"},
      {with_files({"--warmup", "2"}), "--warmup"},
      {with_files({"--dropout", "1"}), "--dropout"},
      {with_files({"--max-grad-norm", "0"}), "--max-grad-norm"},
      {with_files({"--threads", "0"}), "--threads"},
      {with_files({"--threads", "1000000"}), "--threads"},
      {with_files({"--seed", "-1"}),
       "--seed -1: give a whole number from 0 to 18446744073709551615"},
      {with_files({"--seed", "18446744073709551616"}), "--seed"},
      {with_files({"--seed", "7x"}), "--seed"},
      {with_files({"--precision", "bf17"}), "--precision bf17: choose fp32, amp-no-scale, amp, "},
      {with_files({"--precision", "amp", "--save", ""}), "--save \"\": name a file or a folder"},
      {with_files({"--json", ""}), "--json \"\": name a file"},
      {{"--model", "m", "--data", "b\xff"}, "argument 4, after --data, is not UTF-8"},
      {with_files({"--precision", "fp8"}), "--precision"},
      {with_files({"--device", "tpu"}), "--device tpu: choose cpu, cuda"},
      {with_files({"--seeds", "0"}), "--seeds 0: give a whole number from 1 to 1000"},
      {with_files({"--precision", "amp", "--seeds", "3"}), "--seeds: compares rows"},
      {with_files({"--save", "s"}), "--save: is for one run; choose it with --precision"},
      {with_files({"--report", "r.html"}), "--report: is for one run; choose it with --precision"},
      {with_files({"--precision", "amp", "--save-every", "5"}), "--save-every requires --save"},
      {with_files({"--no-such-flag"}), "--no-such-flag"},
      {with_files({"--seed"}), "--seed"}};
  for (const auto& [arguments, message] : cases) {
    const auto error = usage_error(arguments);
    EXPECT_THAT(error, HasSubstr(message));
    EXPECT_THAT(error, testing::Not(HasSubstr("\n"))) << message;
  }
}

}  // namespace
}  // namespace bert_ner
