// The tables that send each block to its part of a tensor count beyond 2^32 elements: no memory is
// touched to cut them.

#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/gradient_passes.h>
#include <mezzo/kernels/launch_table.h>

#include <gtest/gtest.h>

#include <cstdint>

namespace {

constexpr int64_t kHuge = (int64_t{1} << 33) + 5;

TEST(LaunchTables, CountGradientsBeyondThirtyTwoBits) {
  using mezzo::detail::GradientTable;
  GradientTable table(16384);
  float data = 0;
  table.push_back({&data, kHuge, 0});
  table.push_back({&data, kHuge, GradientTable::blocks_of(kHuge, 16384)});
  const auto last = table.slice_of(table.blocks() - 1);
  EXPECT_EQ(last.begin, int64_t{1} << 33);
  EXPECT_EQ(last.end, kHuge);
  EXPECT_EQ(last.first_partial + last.own_block, table.blocks() - 1);
}

TEST(LaunchTables, CountParametersBeyondThirtyTwoBits) {
  mezzo::detail::StepTable table(8192);
  mezzo::detail::StepRow row{};
  row.span.count = kHuge;
  ASSERT_TRUE(table.push_back(row, {}));
  EXPECT_EQ(table.blocks(), (int64_t{1} << 20) + 1);
  const auto last = table.slice_of(table.blocks() - 1);
  EXPECT_EQ(last.begin, int64_t{1} << 33);
  EXPECT_EQ(last.end, kHuge);
}

}  // namespace
