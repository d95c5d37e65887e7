#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/csv_writer.h>
#include <mezzo/diagnostics/run_report.h>
#include <mezzo/diagnostics/step_metrics.h>
#include <mezzo/diagnostics/tensorboard_writer.h>
#include <mezzo/diagnostics/underflow_report.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <limits>
#include <locale>
#include <regex>
#include <string>

#include "../support/temp_dir.h"

namespace {

using mezzo::StepMetrics;
using testing::HasSubstr;

/// Metrics of a run of 40 steps with skips, a NaN loss and a -inf loss.
StepMetrics make_metrics(int step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.wall_time = 1.75e9 + step;
  metrics.loss = 3 * std::exp(-step / 20.0) + 0.1 * std::sin(step);
  if (step == 11) metrics.loss = std::numeric_limits<double>::quiet_NaN();
  if (step == 12) metrics.loss = -std::numeric_limits<double>::infinity();
  metrics.skipped = step % 13 == 7;
  metrics.scale = std::exp2(16 - (step + 5) / 13);
  if (!metrics.skipped) metrics.grad_norm = 1 + 0.5 * std::cos(step);
  if (step > 1) metrics.tokens_per_second = 4096.5;
  metrics.memory_bytes = 1e9;
  return metrics;
}

void add_sections(mezzo::RunReport& report) {
  torch::nn::Linear layer(3, 2);
  const mezzo::AnomalyTrace trace(*layer);
  layer->forward(torch::zeros({4, 3})).mul(0).log();
  report.add_section("First inf or NaN", trace);
  mezzo::UnderflowReport exponents(torch::kHalf);
  exponents.add("layer <1>", torch::full({4096}, 1e-3));
  exponents.add("layer 2", torch::full({4096}, 1e4));
  report.add_section("Exponents", exponents);
  report.add_section("Overflows", std::string("head.<weight> has 1 inf"));
}

TEST(MetricsFiles, ContainRecordedSteps) {
  // Set by read_metrics_files.py, which reads the files with Python.
  const char* const requested = std::getenv("MEZZO_METRICS_DIRECTORY");
  const test_support::TempDir temp_dir;
  const std::string directory = requested != nullptr ? requested : temp_dir.path().string();
  mezzo::RunReport report("run <1> & \"more\"");
  {
    mezzo::CsvWriter csv(directory + "/run.csv");
    mezzo::TensorBoardWriter events(directory + "/events");
    for (int step = 1; step <= 40; ++step) {
      csv(make_metrics(step));
      events(make_metrics(step));
      report(make_metrics(step));
    }
  }
  add_sections(report);
  report.save(directory + "/run.html");

  EXPECT_THAT(test_support::read_file(directory + "/run.csv"),
              testing::StartsWith("step,wall_time,loss,scale,skipped,grad_norm,"
                                  "tokens_per_second,memory_bytes,learning_rate\n1,1750000001,"));
  EXPECT_THAT(test_support::read_file(directory + "/run.csv"),
              HasSubstr("\n11,1750000011,nan,32768,0,1.0022128489940254,4096.5,1e+09,\n"));
  const std::string page = test_support::read_file(directory + "/run.html");
  EXPECT_THAT(page, HasSubstr("<title>run &lt;1&gt; &amp; &quot;more&quot;</title>"));
  EXPECT_THAT(page, HasSubstr("<title>step 7 skipped</title>"));
  EXPECT_THAT(page, HasSubstr("<title>loss is -inf</title>"));
  EXPECT_THAT(page, HasSubstr("layer &lt;1&gt;"));
  EXPECT_THAT(page, Not(HasSubstr("Lnan")));
  EXPECT_THAT(page, HasSubstr("<h2>Overflows</h2><pre>head.&lt;weight&gt; has 1 inf"));
  EXPECT_THAT(page,
              HasSubstr("<h2>First inf or NaN</h2><pre>forward pass: aten::log (after (model))"));
}

TEST(TensorBoardWriter, EncodesVarints) {
  EXPECT_EQ(mezzo::detail::encode_varint(300), "\xAC\x02");
}

TEST(RunReport, DrawsLongRunWithAllSkips) {
  mezzo::RunReport report("long");
  for (int step = 1; step <= 20000; ++step) {
    StepMetrics metrics;
    metrics.step = step;
    metrics.loss = 1;
    metrics.skipped = step % 1000 == 0;
    report(metrics);
  }
  const std::string page = report.to_html();
  EXPECT_THAT(page, HasSubstr("<dt>steps</dt><dd>20000</dd>"));
  EXPECT_THAT(page, HasSubstr("<dt>skipped</dt><dd>20</dd>"));
  EXPECT_LT(page.size(), 400000);
}

TEST(RunReport, ShowsScoresHparamsAndVersions) {
  mezzo::RunReport report("scored");
  report.set_score("F1", 0.25);
  report.set_score("F1", 0.513);
  report.set_hparam("ended", "stopped by SIGTERM");
  report.set_hparam("seed", "7");
  const std::string page = report.to_html();
  EXPECT_THAT(page, HasSubstr("<div><dt>F1</dt><dd>0.513</dd>"));
  EXPECT_THAT(page, Not(HasSubstr("0.25<")));
  EXPECT_THAT(page, HasSubstr("ended: stopped by SIGTERM\nseed: 7\n"));
  for (const char* const line : {"\nmezzo: ", "\nlibtorch: ", "\nwritten: "}) {
    EXPECT_THAT(page, HasSubstr(line));
  }
  EXPECT_THAT(page, Not(HasSubstr("class=alert>")));
}

TEST(RunReport, WarnsForZeroScore) {
  mezzo::RunReport report("failed");
  report.set_score("F1", 0);
  EXPECT_THAT(report.to_html(), HasSubstr("<p class=alert>F1 is 0: "));
  EXPECT_THAT(report.to_html(), HasSubstr("<div class=bad><dt>F1</dt>"));
  report.set_score("F1", std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(report.to_html(), HasSubstr("<p class=alert>F1 is nan: "));
}

TEST(RunReport, ShowsMeanSpeedAndMeasuredCharts) {
  mezzo::RunReport report("rates");
  report({.step = 1, .tokens_per_second = 100, .step_seconds = 3, .learning_rate = 0.5});
  report({.step = 2, .tokens_per_second = 500, .step_seconds = 1, .memory_bytes = 3 * 1048576.0});
  const std::string page = report.to_html();
  EXPECT_THAT(page, HasSubstr("<dt>mean tokens/s</dt><dd>200</dd>"));
  EXPECT_THAT(page, HasSubstr("<dt>peak memory, MiB</dt><dd>3</dd>"));
  for (const char* const chart : {"tokens/s", "learning rate", "memory, MiB"}) {
    EXPECT_THAT(page, HasSubstr("<figcaption>" + std::string(chart) + ", by step"));
  }
  mezzo::RunReport nothing("nothing measured");
  nothing({.step = 1});
  EXPECT_THAT(nothing.to_html(), Not(HasSubstr("<figcaption>learning rate")));
}

/// German numbers: "1.200,5".
struct CommaNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(RunReport, IsIndependentOfLocale) {
  const auto page = [] {
    torch::manual_seed(0);
    mezzo::RunReport report("locale");
    for (int step = 1200; step <= 1240; ++step) report(make_metrics(step));
    add_sections(report);
    const std::string html = report.to_html();
    return std::regex_replace(html, std::regex("\nwritten: [^\n]*"), "");
  };
  const std::string classic_page = page();
  const std::locale before =
      std::locale::global(std::locale(std::locale::classic(), new CommaNumbers));
  const std::string german_page = page();
  std::locale::global(before);
  EXPECT_EQ(classic_page, german_page);
}

TEST(TensorBoardWriter, HasUniqueFileNames) {
  const test_support::TempDir temp_dir;
  const mezzo::TensorBoardWriter first(temp_dir.path()), second(temp_dir.path());
  const auto files = std::filesystem::directory_iterator(temp_dir.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 2);
}

TEST(CsvWriter, AppendsInResumedRun) {
  const test_support::TempDir temp_dir;
  const std::string path = temp_dir.path() / "run.csv";
  for (int begin : {1, 3}) {
    mezzo::CsvWriter csv(path, {.append = true});
    csv(make_metrics(begin));
    csv(make_metrics(begin + 1));
  }
  const std::string text = test_support::read_file(path);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5);
  EXPECT_EQ(text.rfind("step,wall_time"), 0);
  const mezzo::CsvWriter truncating(path);
  EXPECT_EQ(test_support::read_file(path).find("1750000001"), std::string::npos);
}

}  // namespace
