#include <mezzo/base/version.h>

#include <gtest/gtest.h>

#include <string>

TEST(Version, MatchesCMakeProjectVersion) {
  const std::string header = std::to_string(MEZZO_VERSION_MAJOR) + "." +
                             std::to_string(MEZZO_VERSION_MINOR) + "." +
                             std::to_string(MEZZO_VERSION_PATCH);
  EXPECT_EQ(header, MEZZO_CMAKE_VERSION);
}

// MEZZO_VERSION works in the preprocessor.
#if MEZZO_VERSION < 100
#error "MEZZO_VERSION is below 0.1.0"
#endif

TEST(Version, NumberIncreasesWithEachComponent) {
  EXPECT_EQ(MEZZO_VERSION,
            MEZZO_VERSION_MAJOR * 10000 + MEZZO_VERSION_MINOR * 100 + MEZZO_VERSION_PATCH);
  EXPECT_LT(MEZZO_VERSION_MINOR, 100);
  EXPECT_LT(MEZZO_VERSION_PATCH, 100);
}
