// What a thread of the CUDA kernels does, on the host: all threads' shares together are every
// element once, and the table sends each block to its part of a tensor, beyond 2^31 elements too.

#include <mezzo/kernels/cuda/gradient_summary.cuh>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/launch_table.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "../kernels/plain_summary.h"

namespace {

using mezzo::detail::SummaryTable;

/// How often each element was seen, in memory where element i is i.
struct CountVisits {
  std::vector<int> visits;
  uint16_t first;
  template <int kPacks>
  void operator()(const mezzo::detail::GradientPack<uint16_t> (&packs)[kPacks]) {
    for (const auto& pack : packs) {
      for (const uint16_t element : pack.element) (*this)(element);
    }
  }
  void operator()(uint16_t stored) { ++visits.at(static_cast<std::size_t>(stored - first)); }
};

TEST(SummaryShare, SharesVisitEveryElementOnceAtAnyAlignment) {
  std::vector<uint16_t> memory(4000);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint16_t>(i);
  constexpr int kThreads = 8;
  for (const int64_t count : {0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 1000, 3000}) {
    for (std::size_t offset = 0; offset < 9; ++offset) {
      CountVisits count_visits{std::vector<int>(static_cast<std::size_t>(count)),
                               static_cast<uint16_t>(offset)};
      for (int thread = 0; thread < kThreads; ++thread) {
        mezzo::detail::cuda::visit_share(memory.data() + offset, count, thread, kThreads,
                                         count_visits);
      }
      EXPECT_EQ(count_visits.visits, std::vector<int>(static_cast<std::size_t>(count), 1))
          << count << " from " << offset;
    }
  }
}

template <class Element>
mezzo::detail::GradientPartial merged_shares(const torch::Tensor& values) {
  using Stored = typename mezzo::detail::FloatFormat<Element>::Stored;
  constexpr int kThreads = 32;
  mezzo::detail::GradientPartial total;
  for (int thread = 0; thread < kThreads; ++thread) {
    mezzo::detail::cuda::SummaryShare<Element> share;
    mezzo::detail::cuda::visit_share(static_cast<const Stored*>(values.const_data_ptr()),
                                     values.numel(), thread, kThreads, share);
    total.merge(share.partial());
  }
  return total;
}

template <class Element>
void expect_shares_agree() {
  torch::manual_seed(9);
  const auto dtype = c10::CppTypeToScalarType<Element>::value;
  auto values = (torch::randn({2311}, torch::kDouble) * 1e-6).to(dtype);
  values[17] = 0;
  for (const float inv_scale : {1.0F, 0.25F, 1e30F}) {
    for (const int64_t bad : {-1, 0, 1200, 2310}) {
      auto broken = values.clone();
      if (bad >= 0) broken[bad] = std::numeric_limits<float>::quiet_NaN();
      const auto expected = plain_summary({broken}, inv_scale);
      const mezzo::detail::FinishedSummary finished(merged_shares<Element>(broken), inv_scale);
      EXPECT_EQ(finished.found_inf, expected.found_inf);
      if (expected.found_inf) continue;
      EXPECT_EQ(finished.max_abs, expected.max_abs);
      EXPECT_NEAR(finished.sum_of_squares, expected.sum_of_squares,
                  2e-6 * expected.sum_of_squares);  // gamma(32, 2^-24): gradients_test.cpp
    }
  }
}

TEST(SummaryShare, SharesTogetherSayWhatTheReferenceSays) {
  expect_shares_agree<float>();
  expect_shares_agree<double>();
  expect_shares_agree<c10::Half>();
  expect_shares_agree<c10::BFloat16>();
}

TEST(SummaryTable, SendsEachBlockToItsPart) {
  SummaryTable table(16);
  float first = 0;
  float second = 0;
  table.push_back({&first, 33, 100});
  table.push_back({&second, 16, 200});
  EXPECT_EQ(table.blocks(), 4);
  const auto last_of_first = table.slice_of(2);
  EXPECT_EQ(last_of_first.data, &first);
  EXPECT_EQ(last_of_first.begin, 32);
  EXPECT_EQ(last_of_first.end, 33);
  EXPECT_EQ(last_of_first.first_partial, 100);
  EXPECT_EQ(last_of_first.own_block, 2);
  const auto of_second = table.slice_of(3);
  EXPECT_EQ(of_second.data, &second);
  EXPECT_EQ(of_second.begin, 0);
  EXPECT_EQ(of_second.end, 16);
  EXPECT_EQ(of_second.first_partial, 200);
  EXPECT_EQ(of_second.own_block, 0);
}

TEST(SummaryTable, CountsBeyondTwoToTheThirtyOne) {
  constexpr int64_t kHuge = (int64_t{1} << 33) + 5;
  SummaryTable table(16384);
  float data = 0;
  table.push_back({&data, kHuge, 0});
  table.push_back({&data, kHuge, SummaryTable::blocks_of(kHuge, 16384)});
  const auto last = table.slice_of(table.blocks() - 1);
  EXPECT_EQ(last.begin, int64_t{1} << 33);
  EXPECT_EQ(last.end, kHuge);
  EXPECT_EQ(last.first_partial + last.own_block, table.blocks() - 1);
}

TEST(SummaryTable, FullTablesFindEveryTensor) {
  SummaryTable table(8);
  int64_t expected_block = 0;
  std::vector<float> memory(SummaryTable::kCapacity);
  for (int i = 0; i < SummaryTable::kCapacity; ++i) {
    EXPECT_FALSE(table.full());
    table.push_back({&memory[static_cast<std::size_t>(i)], 1 + i % 20, i});
  }
  EXPECT_TRUE(table.full());
  for (int i = 0; i < SummaryTable::kCapacity; ++i) {
    for (int64_t own = 0; own * 8 < 1 + i % 20; ++own, ++expected_block) {
      const auto slice = table.slice_of(expected_block);
      EXPECT_EQ(slice.data, &memory[static_cast<std::size_t>(i)]);
      EXPECT_EQ(slice.begin, own * 8);
      EXPECT_EQ(slice.first_partial, i);
      EXPECT_EQ(slice.own_block, own);
    }
  }
  EXPECT_EQ(expected_block, table.blocks());
  table.clear();
  EXPECT_TRUE(table.empty());
}

}  // namespace
