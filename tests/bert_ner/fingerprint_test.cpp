#include "fingerprint.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace bert_ner {
namespace {

std::uint64_t of(const std::vector<std::string_view>& parts) {
  Fingerprint fingerprint;
  for (const auto part : parts) fingerprint.add(part);
  return fingerprint.value();
}

TEST(Fingerprint, ChangesWithEveryBit) {
  for (const std::size_t length : {1u, 7u, 8u, 9u, 24u}) {
    const std::string text(length, 'a');
    std::set<std::uint64_t> seen{of({text})};
    for (std::size_t i = 0; i < 8 * length; ++i) {
      auto changed = text;
      changed[i / 8] = static_cast<char>(changed[i / 8] ^ (1 << i % 8));
      seen.insert(of({changed}));
    }
    EXPECT_EQ(seen.size(), 8 * length + 1) << length;
  }
}

TEST(Fingerprint, TellsWhereAPartEnds) {
  const std::set<std::uint64_t> all{of({}),
                                    of({""}),
                                    of({"abc"}),
                                    of({"a", "bc"}),
                                    of({"ab", "c"}),
                                    of({"abc", ""}),
                                    of({std::string_view("abc\0", 4)})};
  EXPECT_EQ(all.size(), 7u);
}

}  // namespace
}  // namespace bert_ner
