// What is said of a hundred planted faults, and whether it helps; and of runs that are well.
//
// A right answer names the cause and the place. "Not known" with the next thing to try is right
// too, for evidence may not decide. A cause that is named and is not the fault is wrong.

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

enum class Grade { right, not_known, wrong };

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// Sentences that name a cause.
constexpr std::array<std::string_view, 9> kCauses = {
    "did when the watch was made",
    "nothing is wrong with the model",
    "is not finite: no step",
    "it is finite, up to",
    "dividing by a loss scale",
    "beyond float16",
    "no result that was watched",
    "it took",
    "it divided by 0",
};

Grade grade(const PlantedFault& fault, const std::string& said) {
  const bool is_named = std::all_of(fault.names.begin(), fault.names.end(),
                                    [&](const std::string& name) { return has(said, name); });
  const std::string claimed = said.substr(0, said.find("not known"));  // what follows is advice
  const bool accuses = std::any_of(kCauses.begin(), kCauses.end(), [&](std::string_view cause) {
    const auto covers = [&](const std::string& name) { return has(name, cause); };
    return has(claimed, cause) && std::none_of(fault.names.begin(), fault.names.end(), covers);
  });
  if (!is_named || accuses || !has(said, fault.remedy)) return Grade::wrong;
  return has(said, "not known") ? Grade::not_known : Grade::right;
}

TEST(DiagnosticsAccuracy, AreNamedOrNotKnownAndWhatIsSaidCures) {
  constexpr std::array<const char*, 3> kGrades = {"right", "not known", "WRONG"};
  std::array<int, 3> counts{};
  int faults = 0, remedies = 0;
  for (const auto& table :
       {anomalies(), divergences(), overflows(), lost_precision(), before_the_run()}) {
    for (const PlantedFault& fault : table) {
      const std::string said = fault.said(false);
      const Grade graded = grade(fault, said);
      ++faults;
      ++counts.at(static_cast<std::size_t>(graded));
      std::string cure = "no remedy";
      if (*fault.remedy != '\0') {
        ++remedies;
        const std::string after = fault.said(true);
        cure = after == kNothing ? "cured" : "NOT CURED: " + after;
        EXPECT_EQ(after, kNothing) << fault.name << ": " << fault.remedy;
      }
      EXPECT_TRUE(graded != Grade::wrong) << fault.name << ": " << said;
      std::cout << fault.name << " | " << fault.planted << " | "
                << kGrades.at(static_cast<std::size_t>(graded)) << " | " << cure << " | " << said
                << "\n";
    }
  }
  std::cout << faults << " faults: " << counts[0] << " right, " << counts[1] << " not known, "
            << counts[2] << " wrong; " << remedies << " remedies followed\n";
  // "Not known" is no wrong answer, but a fault less, or a right answer less, is a loss.
  EXPECT_GE(faults, 94);
  EXPECT_GE(counts[0], 32);
  EXPECT_EQ(counts[2], 0);
}

TEST(HealthyRuns, AreNotAccused) {
  int runs = 0;
  for (const auto& table :
       {healthy_traces(), healthy_runs(), healthy_forward_passes(), healthy_models()}) {
    for (const HealthyRun& run : table) {
      EXPECT_EQ(run.said(), kNothing) << run.name;
      ++runs;
    }
  }
  EXPECT_GE(runs, 20 * 8) << "20 models in three dtypes, and more";
}

}  // namespace
}  // namespace diagnostics_test
