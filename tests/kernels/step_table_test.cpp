// How the CUDA kernel cuts a step's parameters, walked on the host.

#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/optimizer_step_table.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace {

using mezzo::detail::AdamConstants;
using mezzo::detail::StepRow;
using Table = mezzo::detail::DeviceStepTable<AdamConstants>;

StepRow row_of(std::vector<char>& memory, float* count, int group) {
  StepRow row{};
  row.span.parameter = memory.data();
  row.span.count = static_cast<int64_t>(memory.size());
  row.count = count;
  row.group = group;
  return row;
}

TEST(StepTable, ItsBlocksCoverEveryElementOfEveryParameterOnce) {
  constexpr int kPerBlock = 16;
  Table table(kPerBlock);
  std::vector<std::vector<char>> memory;
  for (int i = 0; i < Table::kCapacity; ++i) {
    memory.emplace_back(static_cast<std::size_t>(i * 7 % 50));  // some are empty
  }
  for (int i = 0; i < Table::kCapacity; ++i) {
    const int group = i / 100;
    ASSERT_TRUE(table.push_back(row_of(memory[static_cast<std::size_t>(i)], nullptr, group),
                                {{}, /*lr=*/static_cast<double>(group), 0}));
  }
  EXPECT_FALSE(table.push_back(row_of(memory[0], nullptr, 4), {})) << "it is full";
  for (int64_t block = 0; block < table.blocks(); ++block) {
    const auto slice = table.slice_of(block);
    ASSERT_LT(slice.begin, slice.end);
    ASSERT_LE(slice.end - slice.begin, kPerBlock);
    auto* const visits = static_cast<char*>(slice.span.parameter);
    for (int64_t i = slice.begin; i < slice.end; ++i) ++visits[i];
    EXPECT_EQ(table.group(slice.group).lr, static_cast<double>(slice.group));
  }
  for (const auto& bytes : memory) EXPECT_EQ(bytes, std::vector<char>(bytes.size(), 1));
  table.clear();
  EXPECT_TRUE(table.empty());
  EXPECT_EQ(table.blocks(), 0);
}

TEST(StepTable, TakesAsManyGroupsAsItHolds) {
  Table table(16);
  std::vector<char> memory(3);
  for (int group = 0; group < Table::kGroups; ++group) {
    EXPECT_TRUE(table.push_back(row_of(memory, nullptr, group), {}));
    EXPECT_TRUE(table.push_back(row_of(memory, nullptr, group), {})) << "the same group again";
  }
  EXPECT_FALSE(table.push_back(row_of(memory, nullptr, Table::kGroups), {}));
}

// More elements than 32 bits count: no memory is touched to cut them.
TEST(StepTable, CountsElementsBeyondThirtyTwoBits) {
  Table table(8192);
  StepRow row{};
  row.span.count = (int64_t{1} << 33) + 5;
  ASSERT_TRUE(table.push_back(row, {}));
  EXPECT_EQ(table.blocks(), (int64_t{1} << 20) + 1);
  const auto last = table.slice_of(table.blocks() - 1);
  EXPECT_EQ(last.begin, int64_t{1} << 33);
  EXPECT_EQ(last.end, (int64_t{1} << 33) + 5);
}

}  // namespace
