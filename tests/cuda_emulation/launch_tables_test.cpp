// The tables that send each block to its part of a tensor count beyond 2^32 elements: no memory is
// touched to cut them.

#include <mezzo/kernels/adam_functor.h>
#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/multi_tensor_metadata.h>

#include <gtest/gtest.h>

#include <cstdint>

namespace {

constexpr int64_t kHuge = (int64_t{1} << 33) + 5;

TEST(LaunchTables, CountGradientsBeyondThirtyTwoBits) {
  using mezzo::detail::GradListMetadata;
  GradListMetadata table(16384);
  float data = 0;
  table.push_back({&data, kHuge, 0});
  table.push_back({&data, kHuge, GradListMetadata::num_blocks_for(kHuge, 16384)});
  const auto last = table.get_chunk(table.num_blocks() - 1);
  EXPECT_EQ(last.begin, int64_t{1} << 33);
  EXPECT_EQ(last.end, kHuge);
  EXPECT_EQ(last.first_partial + last.chunk_in_tensor, table.num_blocks() - 1);
}

TEST(LaunchTables, CountParametersBeyondThirtyTwoBits) {
  mezzo::detail::ParamListMetadata table(8192);
  mezzo::detail::ParamArgs row{};
  row.pointers.numel = kHuge;
  ASSERT_TRUE(table.push_back(row, {}));
  EXPECT_EQ(table.num_blocks(), (int64_t{1} << 20) + 1);
  const auto last = table.get_chunk(table.num_blocks() - 1);
  EXPECT_EQ(last.begin, int64_t{1} << 33);
  EXPECT_EQ(last.end, kHuge);
}

}  // namespace
