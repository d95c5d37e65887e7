// How the CUDA kernel cuts a step's parameters, walked on the host, and where it finds them when
// they are more than its arguments hold.

#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/optimizer_step_table.h>
#include <mezzo/kernels/table_memory.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using mezzo::detail::AdamConstants;
using mezzo::detail::StepRow;
using Table = mezzo::detail::DeviceStepTable<AdamConstants>;
using Paged = mezzo::detail::PagedTable<Table>;
using mezzo::detail::TableMemory;

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

/// Rows of sizes 0 to 49 on as many pages as they take, each row with a group of its own every 70.
std::vector<Table> pages_of(std::vector<std::vector<char>>& memory, int per_block) {
  std::vector<Table> pages;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const int group = static_cast<int>(i / 70);
    const StepRow row = row_of(memory[i], nullptr, group);
    if (!pages.empty() && pages.back().push_back(row, {{}, static_cast<double>(group), 0}))
      continue;
    EXPECT_TRUE(pages.emplace_back(per_block).push_back(row, {{}, static_cast<double>(group), 0}));
  }
  return pages;
}

TEST(PagedTable, ItsBlocksCoverTheParametersOfAllPagesOnce) {
  std::vector<std::vector<char>> memory;
  for (std::size_t i = 0; i < 2000; ++i) memory.emplace_back(i * 7 % 50);
  std::vector<Table> pages = pages_of(memory, 16);
  ASSERT_EQ(pages.size(), 7U);
  const std::vector<std::byte> bytes = Paged::bytes_of(pages);
  const Paged table(pages, bytes.data());
  std::vector<int64_t> blocks_of_row(static_cast<std::size_t>(table.rows()));
  for (int64_t block = 0; block < table.blocks(); ++block) {
    const auto slice = table.slice_of(block);
    ASSERT_LT(slice.begin, slice.end);
    auto* const visits = static_cast<char*>(slice.span.parameter);
    for (int64_t i = slice.begin; i < slice.end; ++i) ++visits[i];
    const auto row = static_cast<std::size_t>(slice.row);
    ASSERT_EQ(slice.span.parameter, memory[row].data()) << "the pages are full, so rows count on";
    EXPECT_EQ(table.group_of(slice).lr, static_cast<double>(slice.row / 70));
    EXPECT_GE(block, table.first_block(slice.row));
    EXPECT_LT(block, table.end_block(slice.row));
    ++blocks_of_row[row];
  }
  for (const auto& visited : memory) EXPECT_EQ(visited, std::vector<char>(visited.size(), 1));
  for (int row = 0; row < table.rows(); ++row) {
    EXPECT_EQ(table.end_block(row) - table.first_block(row),
              blocks_of_row[static_cast<std::size_t>(row)])
        << "row " << row << ", of which there are 2000";
  }
}

TEST(PagedTable, OnePageIsTheTableItself) {
  std::vector<char> memory(40);
  Table only(16);
  ASSERT_TRUE(only.push_back(row_of(memory, nullptr, 3), {{}, 0.5, 0}));
  const Paged table(only);
  EXPECT_EQ(table.blocks(), 3);
  EXPECT_EQ(table.rows(), 1);
  EXPECT_EQ(table.slice_of(2).begin, 32);
  EXPECT_EQ(table.group_of(table.slice_of(2)).lr, 0.5);
  EXPECT_EQ(table.end_block(0), 3);
}

TEST(CounterTable, FindsCountersInItselfOrWhereItIsTold) {
  using mezzo::detail::CounterTable;
  for (const std::size_t size : {std::size_t{3}, CounterTable::kCapacity + 5}) {
    std::vector<float> counts(size, 1.0F);
    std::vector<float*> counters;
    for (float& count : counts) counters.push_back(&count);
    const bool holds = CounterTable::holds(counters);
    EXPECT_EQ(holds, size == 3);
    const std::vector<std::byte> bytes = CounterTable::bytes_of(counters);
    const CounterTable table(counters, holds ? nullptr : bytes.data());
    ASSERT_EQ(table.size(), static_cast<int64_t>(size));
    for (int64_t i = 0; i < table.size(); ++i) table[i] += static_cast<float>(i);
    EXPECT_EQ(counts.back(), static_cast<float>(size));
  }
}

std::vector<std::byte> bytes_with(int value) {
  return std::vector<std::byte>(64, static_cast<std::byte>(value));
}

constexpr uint64_t kEager = 0;  // not in a capture

TEST(TableMemory, KeepsWhatIsTheSameAndForgetsWhatAStepDidNotUse) {
  TableMemory memory;
  memory.begin_step(at::kCPU, kEager);
  const void* const first = memory.on(at::kCPU, bytes_with(1), kEager);
  EXPECT_EQ(*static_cast<const std::byte*>(first), std::byte{1});
  memory.begin_step(at::kCPU, kEager);
  EXPECT_EQ(memory.on(at::kCPU, bytes_with(1), kEager), first) << "nothing is copied";
  EXPECT_NE(memory.on(at::kCPU, bytes_with(2), kEager), first);
  EXPECT_EQ(memory.size(), 2U);
  memory.begin_step(at::kCPU, kEager);
  memory.on(at::kCPU, bytes_with(2), kEager);
  memory.begin_step(at::kCPU, kEager);
  EXPECT_EQ(memory.size(), 1U);
}

// A graph reads that memory, and copies to it, when it is replayed: until then nothing is there,
// and another graph may be replayed first.
TEST(TableMemory, KeepsWhatACaptureRecordedForThatCaptureAlone) {
  TableMemory memory;
  memory.begin_step(at::kCPU, /*capture=*/7);
  const void* const captured = memory.on(at::kCPU, bytes_with(1), 7);
  EXPECT_EQ(memory.on(at::kCPU, bytes_with(1), 7), captured);
  EXPECT_NE(memory.on(at::kCPU, bytes_with(1), 8), captured);
  for (int i = 2; i < 6; ++i) {
    memory.begin_step(at::kCPU, kEager);
    memory.on(at::kCPU, bytes_with(i), kEager);
  }
  EXPECT_EQ(memory.size(), 4U) << "two captured, the last step's and this one's";
  EXPECT_NE(memory.on(at::kCPU, bytes_with(1), kEager), captured);
}

TEST(TableMemory, KeepsWhatACaptureFoundThere) {
  TableMemory memory;
  const void* const first = memory.on(at::kCPU, bytes_with(1), kEager);
  memory.begin_step(at::kCPU, 7);
  memory.begin_step(at::kCPU, 7);
  EXPECT_EQ(memory.on(at::kCPU, bytes_with(1), 7), first) << "it was copied before";
  for (int i = 2; i < 6; ++i) {
    memory.begin_step(at::kCPU, kEager);
    memory.on(at::kCPU, bytes_with(i), kEager);
  }
  EXPECT_EQ(memory.on(at::kCPU, bytes_with(1), kEager), first);
}

}  // namespace
