#include <gtest/gtest.h>
#include <mezzo/checkpoint/detail/sha256.h>

#include <algorithm>
#include <cstddef>
#include <string>

namespace {

std::string hex(const mezzo::detail::Sha256Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[std::to_integer<int>(byte) >> 4];
    text += kDigits[std::to_integer<int>(byte) & 15];
  }
  return text;
}

/// FIPS 180-4's examples, and lengths about the ends of blocks against the other implementation.
TEST(Sha256, HasTheStandardsDigestsOnAnyCpuInPiecesOfAnyLength) {
  using mezzo::detail::Sha256;
  const auto digest = [](const std::string& text, std::size_t piece, auto compress) {
    Sha256 sum(compress);
    for (std::size_t i = 0; i < text.size(); i += piece) {
      sum.add(text.data() + i, std::min(piece, text.size() - i));
    }
    return hex(sum.finish());
  };
  const auto plain = &mezzo::detail::sha256_compress_plain;
  const auto best = mezzo::detail::best_sha256_compress();
  for (const auto compress : {plain, best}) {
    EXPECT_EQ(digest("", 1, compress),
              "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(digest("abc", 1, compress),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 7, compress),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(digest(std::string(1000000, 'a'), 4099, compress),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
  for (std::size_t size = 0; size < 200; ++size) {
    const std::string text(size, 'x');
    EXPECT_EQ(digest(text, 64, best), digest(text, 13, plain)) << size;
  }
}

}  // namespace
