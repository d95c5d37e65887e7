#include <gtest/gtest.h>
#include <mezzo/base/version.h>

#include <string>

TEST(Version, IsTheOneThatCMakeReadFromTheHeader) {
  const std::string header = std::to_string(MEZZO_VERSION_MAJOR) + "." +
                             std::to_string(MEZZO_VERSION_MINOR) + "." +
                             std::to_string(MEZZO_VERSION_PATCH);
  EXPECT_EQ(header, CMAKE_SAYS_VERSION);
}
