// Which parameter lies where: no tensor is needed to know.

#include <mezzo/distributed/grad_buckets.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace {

using mezzo::detail::lay_out;
using mezzo::detail::LayoutItem;
using Items = std::vector<std::size_t>;
using Offsets = std::vector<int64_t>;

TEST(BucketLayout, FillsABucketUpToItsCapInTheOrderGiven) {
  const auto buckets = lay_out({{0, 16, 4}, {0, 16, 4}, {0, 16, 4}}, 128);
  ASSERT_EQ(buckets.size(), 2U);
  EXPECT_EQ(buckets[0].items, (Items{0, 1}));
  EXPECT_EQ(buckets[0].offsets, (Offsets{0, 16}));
  EXPECT_EQ(buckets[0].count, 32);
  EXPECT_EQ(buckets[1].items, (Items{2}));
}

TEST(BucketLayout, BeginsEachItemAtAMultipleOf64Bytes) {
  const auto floats = lay_out({{0, 1, 4}, {0, 17, 4}, {0, 3, 4}}, 1 << 20);
  EXPECT_EQ(floats[0].offsets, (Offsets{0, 16, 48}));
  EXPECT_EQ(floats[0].count, 51);
  const auto halves = lay_out({{0, 1, 2}, {0, 1, 2}}, 1 << 20);
  EXPECT_EQ(halves[0].offsets, (Offsets{0, 32}));
}

TEST(BucketLayout, KeepsGroupsApartAndFillsThemSideBySide) {
  const auto buckets = lay_out({{0, 8, 4}, {1, 8, 2}, {0, 8, 4}, {1, 8, 2}}, 1 << 20);
  ASSERT_EQ(buckets.size(), 2U);
  EXPECT_EQ(buckets[0].items, (Items{0, 2}));
  EXPECT_EQ(buckets[1].items, (Items{1, 3}));
}

TEST(BucketLayout, GivesAnItemLargerThanTheCapABucketOfItsOwn) {
  const auto buckets = lay_out({{0, 4, 4}, {0, 1000, 4}, {0, 4, 4}}, 256);
  ASSERT_EQ(buckets.size(), 3U);
  EXPECT_EQ(buckets[1].items, (Items{1}));
  EXPECT_EQ(buckets[1].count, 1000);
}

TEST(BucketLayout, CountsPadding) {
  // Two of 4 bytes fit in 68, for the second begins at 64; a third does not.
  const auto buckets = lay_out({{0, 1, 4}, {0, 1, 4}, {0, 1, 4}}, 68);
  ASSERT_EQ(buckets.size(), 2U);
  EXPECT_EQ(buckets[0].items, (Items{0, 1}));
}

TEST(BucketLayout, PadsABucketThatIsToBeCut) {
  using mezzo::detail::padded_count;
  EXPECT_EQ(padded_count(101, 4, 1), 101);
  EXPECT_EQ(padded_count(101, 4, 2), 128);
  EXPECT_EQ(padded_count(128, 4, 2), 128);
  EXPECT_EQ(padded_count(101, 2, 4), 128);
  EXPECT_EQ(padded_count(129, 2, 3), 192);
  EXPECT_EQ(padded_count(0, 4, 4), 0);
}

TEST(BucketLayout, CountsBeyondTwoToTheThirtyOne) {
  constexpr int64_t kHuge = int64_t{3} << 30;
  const auto buckets = lay_out({{0, kHuge, 4}, {0, kHuge, 4}, {0, 5, 4}}, int64_t{1} << 40);
  ASSERT_EQ(buckets.size(), 1U);
  EXPECT_EQ(buckets[0].offsets, (Offsets{0, kHuge, 2 * kHuge}));
  EXPECT_EQ(buckets[0].count, 2 * kHuge + 5);
}

TEST(BucketLayout, TakesNothingAndItemsOfNothing) {
  EXPECT_TRUE(lay_out({}, 100).empty());
  const auto buckets = lay_out({{0, 0, 4}, {0, 3, 4}, {0, 0, 4}}, 100);
  ASSERT_EQ(buckets.size(), 1U);
  EXPECT_EQ(buckets[0].offsets, (Offsets{0, 0, 16}));
  EXPECT_EQ(buckets[0].count, 16);
}

}  // namespace
