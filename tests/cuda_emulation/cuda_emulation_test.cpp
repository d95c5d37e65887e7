// The CUDA emulation runs correct kernels in any order and detects incorrect ones.

#include "cuda_emulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace {

using cuda_emulation::CudaUsageError;
using mezzo::detail::cuda::launch;
using mezzo::detail::cuda::Stream;

constexpr int kThreads = 128;
constexpr int kSeeds = 100;
using ThreadInts = int[kThreads];

class CudaEmulation : public testing::Test {
 protected:
  void TearDown() override { cuda_emulation::set_seed(1); }
};

/// Returns the message of the CudaUsageError that `work` throws, or an empty string.
template <class Work>
std::string message_of_usage_error(const Work& work) {
  try {
    work();
    return "";
  } catch (const CudaUsageError& fault) {
    return fault.what();
  }
}

template <bool kHasBarrier>
void reverse_kernel(const int* from, int* to) {
  MEZZO_SHARED(ThreadInts, all);
  const unsigned block = blockIdx.x * blockDim.x;
  all[threadIdx.x] = from[block + threadIdx.x];
  if constexpr (kHasBarrier) __syncthreads();
  to[block + threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}

template <bool kHasBarrier>
bool reverses(int blocks) {
  std::vector<int> from(static_cast<std::size_t>(blocks * kThreads));
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<int>(i);
  std::vector<int> to(from.size(), -2);
  launch<reverse_kernel<kHasBarrier>>(blocks, kThreads, Stream{}, from.data(), to.data());
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::size_t first = i / kThreads * kThreads;
    if (to[i] != from[first + kThreads - 1 - (i - first)]) return false;
  }
  return true;
}

TEST_F(CudaEmulation, RunsCorrectKernelInAnyOrder) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    cuda_emulation::set_seed(seed);
    EXPECT_TRUE(reverses<true>(5)) << seed;
  }
}

TEST_F(CudaEmulation, DetectsMissingBarrier) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    cuda_emulation::set_seed(seed);
    EXPECT_FALSE(reverses<false>(1)) << seed;
  }
}

/// Without the barrier, thread 0 reads values that other threads may overwrite in the second round.
template <bool kHasBarrier>
void reuse_kernel(int* sums) {
  MEZZO_SHARED(ThreadInts, all);
  for (int round = 1; round <= 2; ++round) {
    all[threadIdx.x] = round;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kThreads; ++i) sums[round - 1] += all[i];
    }
    if constexpr (kHasBarrier) __syncthreads();
  }
}

template <bool kHasBarrier>
std::vector<int> run_reuse_kernel() {
  std::vector<int> sums(2);
  launch<reuse_kernel<kHasBarrier>>(1, kThreads, Stream{}, sums.data());
  return sums;
}

TEST_F(CudaEmulation, DetectsSharedMemoryReuseRace) {
  int wrong = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    cuda_emulation::set_seed(seed);
    const std::vector<int> right{kThreads, 2 * kThreads};
    EXPECT_EQ(run_reuse_kernel<true>(), right);
    wrong += run_reuse_kernel<false>() != right;
  }
  EXPECT_GT(wrong, kSeeds * 9 / 10);
}

void order_kernel(std::vector<unsigned>* order) { order->push_back(blockIdx.x * 8 + threadIdx.x); }

TEST_F(CudaEmulation, SeedDeterminesOrder) {
  std::set<std::vector<unsigned>> orders;
  for (int round = 0; round < 2; ++round) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      cuda_emulation::set_seed(seed);
      std::vector<unsigned> order;
      launch<order_kernel>(3, 8, Stream{}, &order);
      orders.insert(order);
      EXPECT_THAT(std::set<unsigned>(order.begin(), order.end()), testing::SizeIs(24));
    }
    EXPECT_THAT(orders, testing::SizeIs(kSeeds)) << "a seed determines the order";
  }
}

void poison_kernel(float* initial) {
  MEZZO_SHARED(float, shared);
  if (threadIdx.x == 0) initial[blockIdx.x] = shared;
  __syncthreads();
  shared = 1.0F;
}

TEST_F(CudaEmulation, SharedMemoryStartsAsNan) {
  std::vector<float> initial(6);
  launch<poison_kernel>(6, 32, Stream{}, initial.data());
  for (const float value : initial) EXPECT_NE(value, value);
}

void barrier_without_thread_3() {
  if (threadIdx.x != 3) __syncthreads();
}
void divergent_barriers() {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
void shuffle_without_lane(int* to) {
  if (threadIdx.x == 40) return;
  to[threadIdx.x] = __shfl_down_sync(0xFFFFFFFFU, 1, 1);
}
void partial_mask(int* to) { to[threadIdx.x] = __shfl_down_sync(0xFFFFU, 1, 1); }

TEST_F(CudaEmulation, ThrowsForUndefinedBehavior) {
  using testing::HasSubstr;
  int to[kThreads];
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    cuda_emulation::set_seed(seed);
    const auto fault = [&]<auto kKernel>(auto... args) {
      return message_of_usage_error([&] { launch<kKernel>(3, kThreads, Stream{}, args...); });
    };
    EXPECT_THAT(fault.template operator()<barrier_without_thread_3>(),
                HasSubstr("thread 3 has ended"));
    EXPECT_THAT(fault.template operator()<divergent_barriers>(),
                HasSubstr("thread 3 waits at the barrier"));
    EXPECT_THAT(fault.template operator()<shuffle_without_lane>(to), HasSubstr("shuffles at"));
    EXPECT_THAT(fault.template operator()<partial_mask>(to), HasSubstr("another mask"));
  }
  const auto launch_size = [&](int64_t blocks, int threads) {
    return message_of_usage_error(
        [&] { launch<barrier_without_thread_3>(blocks, threads, Stream{}); });
  };
  EXPECT_THAT(launch_size(0, 32), HasSubstr("0 blocks"));
  EXPECT_THAT(launch_size(int64_t{1} << 31, 32), HasSubstr("2147483648 blocks"));
  EXPECT_THAT(launch_size(1, 1025), HasSubstr("1025 threads"));
}

}  // namespace
