#include <mezzo/diagnostics/finding.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace {

TEST(Finding, PrintsWrappedWithUnbrokenRemedy) {
  const mezzo::Finding finding{.severity = mezzo::FindingSeverity::warning,
                               .check = "range",
                               .location = "encoder.0",
                               .description = "words" + std::string(30, ' ') + "of a reason " +
                                              std::string(80, 'x') + " that is long",
                               .remedy = std::string(120, 'y')};
  EXPECT_THAT(finding.message(), testing::StartsWith("encoder.0: words"));
  EXPECT_THAT(finding.message(), testing::EndsWith("; " + finding.remedy));
  std::ostringstream text;
  text << finding;
  EXPECT_THAT(text.str(), testing::StartsWith("  warning  encoder.0: words of a reason\n"));
  EXPECT_THAT(text.str(), testing::HasSubstr("\n           > " + finding.remedy + "\n"));
}

}  // namespace
