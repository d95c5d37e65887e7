#include <mezzo/base/detail/crc32c.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace {

/// The examples of RFC 3720, B.4, and the check value of the CRC catalogue.
TEST(Crc32c, MatchesStandardVectors) {
  using mezzo::detail::crc32c;
  EXPECT_EQ(crc32c("", 0), 0U);
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0').data(), 32), 0x8A9136AAU);
  EXPECT_EQ(crc32c(std::string(32, '\xff').data(), 32), 0x62A8AB43U);
  EXPECT_EQ(mezzo::detail::crc32c_hex("123456789", 9), "e3069283");
}

TEST(Crc32c, ConcatenationMatchesWhole) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += static_cast<char>(i * 37);
  for (std::size_t size = 0; size <= text.size(); ++size) {
    std::uint32_t bytewise = 0;
    for (std::size_t i = 0; i < size; ++i) {
      bytewise = mezzo::detail::crc32c(text.data() + i, 1, bytewise);
    }
    EXPECT_EQ(mezzo::detail::crc32c(text.data(), size), bytewise) << size;
    const std::size_t first = size / 3;
    EXPECT_EQ(mezzo::detail::crc32c(text.data() + first, size - first,
                                    mezzo::detail::crc32c(text.data(), first)),
              bytewise);
  }
}

}  // namespace
