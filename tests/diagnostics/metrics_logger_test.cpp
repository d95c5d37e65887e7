#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/overflow_report.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <locale>
#include <memory>
#include <optional>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../support/temp_dir.h"
#include "../support/warning_recorder.h"

namespace {

using mezzo::MetricsLogger;
using mezzo::StepMetrics;
using mezzo::StepResult;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// A step that a device has not decided yet.
struct LateStep final : mezzo::StepFuture {
  bool ready() const noexcept override { return there; }
  const StepResult::Values& values() override {
    if (!there) ++waits;
    return known;
  }
  bool there = false;
  int waits = 0;
  StepResult::Values known{.applied = true, .scale = 8, .grad_norm = 2.0};
};

auto into(std::vector<StepMetrics>& records) {
  return [&records](const StepMetrics& record) { records.push_back(record); };
}

TEST(MetricsLogger, KeepsStepsUntilTheyAreReadyAndHandsThemOverInOrder) {
  std::vector<StepMetrics> records;
  MetricsLogger logger;
  logger.add_callback(into(records));
  const auto late = std::make_shared<LateStep>();
  logger.record(StepResult(late), torch::tensor(1.5));
  logger.record(StepResult(StepResult::Values{.applied = true}), torch::tensor(1.25));
  EXPECT_TRUE(records.empty()) << "the second step waits for the first";
  EXPECT_EQ(late->waits, 0);
  late->there = true;
  logger.record(StepResult(StepResult::Values{.found_inf = true}), at::Tensor());
  ASSERT_EQ(records.size(), 3);
  EXPECT_EQ(late->waits, 0) << "nobody waited";
  EXPECT_EQ(records[0].step, 1);
  EXPECT_EQ(records[0].loss, 1.5);
  EXPECT_EQ(records[0].scale, 8);
  EXPECT_EQ(records[1].loss, 1.25);
  EXPECT_FALSE(records[1].skipped);
  EXPECT_TRUE(records[2].skipped);
  EXPECT_EQ(records[2].loss, std::nullopt);
}

TEST(MetricsLogger, FlushAndTheDestructorWaitForTheRest) {
  std::vector<StepMetrics> records;
  const auto late = std::make_shared<LateStep>();
  {
    MetricsLogger logger(/*first_step=*/100);
    logger.add_callback(into(records));
    logger.record(StepResult(late), torch::tensor(1.5));
    logger.flush();
    EXPECT_EQ(records.size(), 1);
    EXPECT_GT(late->waits, 0);
    logger.record(StepResult(late), torch::tensor(1.5));
  }
  ASSERT_EQ(records.size(), 2);
  EXPECT_EQ(records[1].step, 101);
}

TEST(MetricsLogger, Of1024KeptStepsTheEarliestIsWaitedFor) {
  std::vector<StepMetrics> records;
  MetricsLogger logger;
  logger.add_callback(into(records));
  const auto late = std::make_shared<LateStep>();
  logger.record(StepResult(late), torch::tensor(1.0));
  const StepResult ran(StepResult::Values{.applied = true});
  for (int step = 2; step <= 1024; ++step) logger.record(ran, torch::tensor(2.0));
  EXPECT_TRUE(records.empty());
  EXPECT_EQ(late->waits, 0);
  logger.record(ran, torch::tensor(2.0));
  EXPECT_GT(late->waits, 0);
  ASSERT_EQ(records.size(), 1025) << "with what it held up";
  EXPECT_EQ(records[0].step, 1);
}

TEST(MetricsLogger, RecordsWhatARunOfTheScalerDid) {
  std::vector<StepMetrics> records;
  MetricsLogger logger;
  logger.add_callback(into(records));
  torch::nn::Linear model(4, 4);
  mezzo::GradScaler scaler(mezzo::GradScalerOptions::dynamic({.init_scale = 16}));
  scaler.on_skip(nullptr);
  mezzo::optim::AdamW optimizer(model->parameters());
  for (const float factor : {1.0F, std::numeric_limits<float>::infinity(), 1.0F}) {
    optimizer.zero_grad();
    const torch::Tensor loss = model->forward(torch::ones({2, 4})).square().sum();
    scaler.scale(loss * factor).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 0.5});
    scaler.update();
    logger.record(result, loss, {.tokens = 10});
  }
  logger.flush();
  ASSERT_EQ(records.size(), 3);
  EXPECT_EQ(records[0].scale, 16);
  EXPECT_EQ(records[2].scale, 8);
  EXPECT_TRUE(records[1].skipped);
  EXPECT_GT(records[0].grad_norm.value(), 0.5) << "before clipping";
  EXPECT_EQ(records[0].tokens_per_second, std::nullopt) << "since when?";
  EXPECT_GT(records[1].tokens_per_second.value(), 0);
  EXPECT_GT(records[1].memory_bytes.value(), 1 << 20);
  EXPECT_GT(records[0].wall_time, 1.7e9);
}

TEST(MetricsLogger, SaysWhatIsNoLossAndKeepsRecordsThatAWriterRefused) {
  MetricsLogger logger;
  const StepResult ran(StepResult::Values{.applied = true});
  EXPECT_THAT([&] { logger.record(ran, torch::ones({2})); },
              ThrowsMessage<c10::Error>(HasSubstr("loss has 2 elements")));
  EXPECT_THAT([] { mezzo::CsvWriter("/no/such/folder/run.csv"); },
              ThrowsMessage<c10::Error>(HasSubstr("/no/such/folder/run.csv: cannot be written")));
  std::vector<StepMetrics> records;
  logger.add_callback(into(records));
  logger.record(ran, torch::ones({1}));
  ASSERT_EQ(records.size(), 1);
  EXPECT_EQ(records[0].step, 1) << "what was refused took no number";
}

/// A step whose device was lost.
struct LostStep final : mezzo::StepFuture {
  bool ready() const noexcept override { return true; }
  const StepResult::Values& values() override { throw std::runtime_error("device lost"); }
};

TEST(MetricsLogger, GoesOnAfterAResultThatThrows) {
  std::vector<StepMetrics> records;
  MetricsLogger logger;
  logger.add_callback(into(records));
  EXPECT_THAT([&] { logger.record(StepResult(std::make_shared<LostStep>()), at::Tensor()); },
              ThrowsMessage<std::runtime_error>("device lost"));
  logger.record(StepResult(StepResult::Values{.applied = true}), at::Tensor());
  ASSERT_EQ(records.size(), 1);
  EXPECT_EQ(records[0].step, 2);
}

TEST(MetricsLogger, HandsARecordToAllWritersThoughOneThrows) {
  std::vector<StepMetrics> records;
  MetricsLogger logger;
  logger.add_callback([](const StepMetrics&) { throw std::runtime_error("disk full"); });
  logger.add_callback(into(records));
  logger.add_callback([](const StepMetrics&) { throw std::runtime_error("not the first"); });
  const auto record = [&] {
    logger.record(StepResult(StepResult::Values{.applied = true}), at::Tensor());
  };
  EXPECT_THAT(record, ThrowsMessage<std::runtime_error>("disk full"));
  EXPECT_THAT(record, ThrowsMessage<std::runtime_error>("disk full"));
  ASSERT_EQ(records.size(), 2);
  EXPECT_EQ(records[1].step, 2);
}

TEST(MetricsLogger, WriterMayAddAWriter) {
  MetricsLogger logger;
  std::vector<StepMetrics> records;
  logger.add_callback([&, name = std::string(100, 'x')](const StepMetrics& record) {
    for (int i = 0; record.step == 1 && i < 50; ++i) logger.add_callback(into(records));
    EXPECT_EQ(name.size(), 100U);
  });
  for (int step = 1; step <= 2; ++step) {
    logger.record(StepResult(StepResult::Values{.applied = true}), at::Tensor());
  }
  EXPECT_EQ(records.size(), 50U) << "from the second record on";
}

TEST(MetricsLogger, DestructorReportsWhatIsNoStdException) {
  test_support::WarningRecorder warnings;
  {
    MetricsLogger logger;
    logger.add_callback([](const StepMetrics&) { throw 7; });
    logger.record(StepResult(std::make_shared<LateStep>()), at::Tensor());
  }
  EXPECT_THAT(warnings.texts, testing::ElementsAre(HasSubstr("the last records were not written")));
}

TEST(MetricsLogger, KeepsLossesOfDouble) {
  std::vector<StepMetrics> records;
  MetricsLogger logger;
  logger.add_callback(into(records));
  logger.record(StepResult(StepResult::Values{.applied = true}),
                torch::tensor(1e39, torch::kDouble));
  EXPECT_EQ(records.at(0).loss, 1e39);
}

/// Forty steps of a scale that climbs and falls, and one loss of each kind that is no number.
StepMetrics sample(int step) {
  StepMetrics record;
  record.step = step;
  record.wall_time = 1.75e9 + step;
  record.loss = 3 * std::exp(-step / 20.0) + 0.1 * std::sin(step);
  if (step == 11) record.loss = std::numeric_limits<double>::quiet_NaN();
  if (step == 12) record.loss = -std::numeric_limits<double>::infinity();
  record.skipped = step % 13 == 7;
  record.scale = std::exp2(16 - (step + 5) / 13);
  if (!record.skipped) record.grad_norm = 1 + 0.5 * std::cos(step);
  if (step > 1) record.tokens_per_second = 4096.5;
  record.memory_bytes = 1e9;
  return record;
}

void add_sections(mezzo::RunReport& report) {
  torch::nn::Linear layer(3, 2);
  const mezzo::AnomalyTrace trace(*layer);
  layer->forward(torch::zeros({4, 3})).mul(0).log();
  report.add_section("Where it began", trace);
  mezzo::UnderflowReport exponents(torch::kHalf);
  exponents.add("layer <1>", torch::full({4096}, 1e-3));
  exponents.add("layer 2", torch::full({4096}, 1e4));
  report.add_section("Exponents", exponents);
  report.add_section("Overflows", std::string("head.<weight> has 1 inf"));
}

TEST(MetricsFiles, HoldWhatWasRecorded) {
  // read_metrics_files.py sets it, and reads what is written here with Python's own readers.
  const char* const asked = std::getenv("MEZZO_METRICS_DIRECTORY");
  const test_support::TempDir temp_dir;
  const std::string folder = asked != nullptr ? asked : temp_dir.path().string();
  mezzo::RunReport report("run <1> & \"more\"");
  {
    mezzo::CsvWriter csv(folder + "/run.csv");
    mezzo::TensorBoardWriter events(folder + "/events");
    for (int step = 1; step <= 40; ++step) {
      csv(sample(step));
      events(sample(step));
      report(sample(step));
    }
  }
  add_sections(report);
  report.save(folder + "/run.html");

  EXPECT_THAT(test_support::read_file(folder + "/run.csv"),
              testing::StartsWith("step,wall_time,loss,scale,skipped,grad_norm,"
                                  "tokens_per_second,memory_bytes,learning_rate\n1,1750000001,"));
  EXPECT_THAT(test_support::read_file(folder + "/run.csv"),
              HasSubstr("\n11,1750000011,nan,32768,0,1.0022128489940254,4096.5,1e+09,\n"));
  const std::string page = test_support::read_file(folder + "/run.html");
  EXPECT_THAT(page, HasSubstr("<title>run &lt;1&gt; &amp; &quot;more&quot;</title>"));
  EXPECT_THAT(page, HasSubstr("<title>step 7 skipped</title>"));
  EXPECT_THAT(page, HasSubstr("<title>loss is -inf</title>"));
  EXPECT_THAT(page, HasSubstr("layer &lt;1&gt;"));
  EXPECT_THAT(page, Not(HasSubstr("Lnan")));
  EXPECT_THAT(page, HasSubstr("<h2>Overflows</h2><pre>head.&lt;weight&gt; has 1 inf"));
  EXPECT_THAT(page,
              HasSubstr("<h2>Where it began</h2><pre>forward pass: aten::log, after (model)"));
}

TEST(MetricsFiles, EventRecordsAreThoseOfTensorFlow) {
  EXPECT_EQ(mezzo::detail::varint(300), "\xAC\x02");
}

TEST(RunReport, DrawsALongRunOnASmallPageAndLosesNoSkip) {
  mezzo::RunReport report("long");
  for (int step = 1; step <= 20000; ++step) {
    StepMetrics record;
    record.step = step;
    record.loss = 1;
    record.skipped = step % 1000 == 0;
    report(record);
  }
  const std::string page = report.html();
  EXPECT_THAT(page, HasSubstr("<dt>steps</dt><dd>20000</dd>"));
  EXPECT_THAT(page, HasSubstr("<dt>skipped</dt><dd>20</dd>"));
  EXPECT_LT(page.size(), 400000);
}

TEST(RunReport, ShowsScoresOptionsAndWhereItRan) {
  mezzo::RunReport report("scored");
  report.set_score("F1", 0.25);
  report.set_score("F1", 0.513);
  report.set_hparam("ended", "stopped by SIGTERM");
  report.set_hparam("seed", "7");
  const std::string page = report.html();
  EXPECT_THAT(page, HasSubstr("<div><dt>F1</dt><dd>0.513</dd>"));
  EXPECT_THAT(page, Not(HasSubstr("0.25<")));
  EXPECT_THAT(page, HasSubstr("ended: stopped by SIGTERM\nseed: 7\n"));
  for (const char* const line : {"\nmezzo: ", "\nlibtorch: ", "\nwritten: "}) {
    EXPECT_THAT(page, HasSubstr(line));
  }
  EXPECT_THAT(page, Not(HasSubstr("class=trouble>")));
}

TEST(RunReport, DoesNotLookHealthyWhereAScoreIsNothing) {
  mezzo::RunReport report("failed");
  report.set_score("F1", 0);
  EXPECT_THAT(report.html(), HasSubstr("<p class=trouble>F1 is 0: "));
  EXPECT_THAT(report.html(), HasSubstr("<div class=bad><dt>F1</dt>"));
  report.set_score("F1", std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(report.html(), HasSubstr("<p class=trouble>F1 is nan: "));
}

TEST(RunReport, SaysTheMeanRateOverAllStepsAndDrawsWhatWasMeasured) {
  mezzo::RunReport report("rates");
  report({.step = 1, .tokens_per_second = 100, .seconds = 3, .learning_rate = 0.5});
  report({.step = 2, .tokens_per_second = 500, .seconds = 1, .memory_bytes = 3 * 1048576.0});
  const std::string page = report.html();
  EXPECT_THAT(page, HasSubstr("<dt>mean tokens/s</dt><dd>200</dd>"));
  EXPECT_THAT(page, HasSubstr("<dt>most memory at a step, MiB</dt><dd>3</dd>"));
  for (const char* const chart : {"tokens/s", "learning rate", "memory, MiB"}) {
    EXPECT_THAT(page, HasSubstr("<figcaption>" + std::string(chart) + ", by step"));
  }
  mezzo::RunReport nothing("nothing measured");
  nothing({.step = 1});
  EXPECT_THAT(nothing.html(), Not(HasSubstr("<figcaption>learning rate")));
}

TEST(MetricsLogger, DoesNotCountWhatTheHostDidAfterRestartClock) {
  std::vector<StepMetrics> records;
  mezzo::MetricsLogger logger;
  logger.add_callback([&](const StepMetrics& record) { records.push_back(record); });
  const StepResult ran(StepResult::Values{.applied = true, .scale = 1});
  logger.restart_clock();
  logger.record(ran, torch::tensor(1.0), {.tokens = 10});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  logger.restart_clock();
  logger.record(ran, torch::tensor(1.0), {.tokens = 10, .learning_rate = 0.5});
  ASSERT_EQ(records.size(), 2U);
  EXPECT_TRUE(records[0].tokens_per_second) << "timed since restart_clock";
  EXPECT_LT(records[1].seconds, 0.2);
  EXPECT_EQ(records[1].learning_rate, 0.5);
}

/// German numbers: "1.200,5".
struct CommaNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(RunReport, IsTheSameUnderALocaleWithCommas) {
  const auto page = [] {
    torch::manual_seed(0);
    mezzo::RunReport report("locale");
    for (int step = 1200; step <= 1240; ++step) report(sample(step));
    add_sections(report);
    const std::string html = report.html();
    return std::regex_replace(html, std::regex("\nwritten: [^\n]*"), "");
  };
  const std::string plain = page();
  const std::locale before =
      std::locale::global(std::locale(std::locale::classic(), new CommaNumbers));
  const std::string with_commas = page();
  std::locale::global(before);
  EXPECT_EQ(plain, with_commas);
}

TEST(MetricsFiles, TwoEventFilesOfOneSecondAreTwo) {
  const test_support::TempDir temp_dir;
  const mezzo::TensorBoardWriter first(temp_dir.path()), second(temp_dir.path());
  const auto files = std::filesystem::directory_iterator(temp_dir.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 2);
}

TEST(MetricsFiles, ACsvFileOfAResumedRunIsAppendedTo) {
  const test_support::TempDir temp_dir;
  const std::string path = temp_dir.path() / "run.csv";
  for (int begin : {1, 3}) {
    mezzo::CsvWriter csv(path, {.append = true});
    csv(sample(begin));
    csv(sample(begin + 1));
  }
  const std::string text = test_support::read_file(path);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5);
  EXPECT_EQ(text.rfind("step,wall_time"), 0);
  mezzo::CsvWriter anew(path);
  EXPECT_EQ(test_support::read_file(path).find("1750000001"), std::string::npos);
}

}  // namespace
