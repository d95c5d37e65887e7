// Output of the diagnostic tools for about a hundred common faults and for runs without faults, and
// whether the printed remedies fix the faults.
//
// Correct output has the cause and the location. "Unknown" with the next thing to check is accepted
// too, since the evidence may not determine the cause. A cause that is not the fault is wrong.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "diagnostics_cases.h"

namespace diagnostics_test {
namespace {

enum class Grade { correct, unknown, wrong };

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// Parts of messages that state a cause.
constexpr std::array<std::string_view, 12> kCauses = {
    "did when the DivergenceMonitor was constructed",
    "the model needs no change",
    "is not finite, and later steps cannot restore it",
    "the result is finite, up to",
    "dividing by a loss scale",
    "beyond float16",
    "no traced op produced it",
    "finite either: log",
    "finite either: square root",
    "finite either: acos",
    "finite either: asin",
    "finite either: division by 0",
};

Grade grade(const FaultCase& fault, const std::string& output) {
  const bool is_complete =
      std::all_of(fault.expected.begin(), fault.expected.end(),
                  [&](const std::string& part) { return contains(output, part); });
  const std::string claimed = output.substr(0, output.find("unknown"));  // the rest is advice
  const bool has_wrong_cause =
      std::any_of(kCauses.begin(), kCauses.end(), [&](std::string_view cause) {
        const auto is_expected = [&](const std::string& part) { return contains(part, cause); };
        return contains(claimed, cause) &&
               std::none_of(fault.expected.begin(), fault.expected.end(), is_expected);
      });
  if (!is_complete || has_wrong_cause || !contains(output, fault.remedy)) return Grade::wrong;
  return contains(output, "unknown") ? Grade::unknown : Grade::correct;
}

TEST(DiagnosticsAccuracy, CausesAreCorrectAndRemediesWork) {
  constexpr std::array<const char*, 3> kGrades = {"correct", "unknown", "WRONG"};
  std::array<int, 3> counts{};
  int faults = 0, remedies = 0;
  for (const auto& table :
       {anomaly_trace_cases(), divergence_monitor_cases(), overflow_report_cases(),
        underflow_report_cases(), precision_check_cases()}) {
    for (const FaultCase& fault : table) {
      const std::string output = fault.run(false);
      const Grade graded = grade(fault, output);
      ++faults;
      ++counts.at(static_cast<std::size_t>(graded));
      std::string outcome = "no remedy";
      if (*fault.remedy != '\0') {
        ++remedies;
        const std::string fixed_output = fault.run(true);
        outcome = fixed_output == kNothing ? "fixed" : "NOT FIXED: " + fixed_output;
        EXPECT_EQ(fixed_output, kNothing) << fault.name << ": " << fault.remedy;
      }
      EXPECT_TRUE(graded != Grade::wrong) << fault.name << ": " << output;
      std::cout << fault.name << " | " << fault.description << " | "
                << kGrades.at(static_cast<std::size_t>(graded)) << " | " << outcome << " | "
                << output << "\n";
    }
  }
  std::cout << faults << " faults: " << counts[0] << " correct, " << counts[1] << " unknown, "
            << counts[2] << " wrong; " << remedies << " remedies applied\n";
  // "Unknown" is accepted, but fewer faults or fewer correct causes are a regression.
  EXPECT_GE(faults, 94);
  EXPECT_GE(counts[0], 32);
  EXPECT_EQ(counts[2], 0);
}

TEST(DiagnosticsAccuracy, HealthyRunsHaveNoFindings) {
  int runs = 0;
  for (const auto& table : {healthy_anomaly_trace_cases(), healthy_divergence_monitor_cases(),
                            healthy_precision_check_cases(), healthy_model_cases()}) {
    for (const HealthyCase& healthy : table) {
      EXPECT_EQ(healthy.run(), kNothing) << healthy.name;
      ++runs;
    }
  }
  EXPECT_GE(runs, 20 * 8) << "20 models in three dtypes, and more";
}

}  // namespace
}  // namespace diagnostics_test
