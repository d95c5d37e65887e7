// Emulated streams: calls that CUDA forbids throw a CudaUsageError, and all orders that CUDA
// permits occur.

#include <mezzo/kernels/graph_capture.h>
#include <mezzo/kernels/kernel_dispatch.h>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "emulated_gpu.h"

namespace {

using emulated_gpu::CudaUsageError;
using emulated_gpu::Graph;

class EmulatedStream : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { emulated_gpu::begin(GetParam()); }
  void TearDown() override { emulated_gpu::run_all(); }
};

INSTANTIATE_TEST_SUITE_P(Orders, EmulatedStream, testing::Range(uint64_t{0}, uint64_t{8}));

at::Tensor on_gpu(double value, int index = 0) {
  return at::full({}, value, at::device(emulated_gpu::device(index)).dtype(at::kFloat));
}

at::Tensor pinned(double value) { return at::full({}, value, at::kFloat).pin_memory(); }

TEST_P(EmulatedStream, RunsOpsInOrder) {
  const at::Tensor x = on_gpu(1);
  for (int i = 0; i < 20; ++i) x.mul_(2).add_(1);
  at::Tensor expected = at::ones({});
  for (int i = 0; i < 20; ++i) expected.mul_(2).add_(1);
  EXPECT_EQ(x.item<float>(), expected.item<float>());
  const at::Tensor chosen =
      at::where(x.gt(5), x, x.neg())
          .index_select(0, at::zeros({1}, at::device(emulated_gpu::device()).dtype(at::kLong)));
  EXPECT_EQ(chosen.item<float>(), expected.item<float>());
}

// Races must show in some of a hundred orders; otherwise the other tests prove nothing.
TEST(EmulatedStreamOrder, OnlyEventsOrderStreams) {
  std::set<float> seen;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    emulated_gpu::begin(seed);
    const at::Tensor x = on_gpu(1);
    emulated_gpu::run_all();
    const c10::Stream other = emulated_gpu::new_stream();
    x.mul_(10);
    {
      const c10::StreamGuard guard(other);
      x.add_(1);
    }
    emulated_gpu::run_all();
    seen.insert(x.item<float>());
  }
  EXPECT_EQ(seen, (std::set<float>{11, 20}));
}

TEST(EmulatedStreamOrder, PinnedCopiesAreAsynchronous) {
  std::set<float> seen;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    emulated_gpu::begin(seed);
    at::Tensor source = pinned(1);
    const at::Tensor x = source.to(emulated_gpu::device(), /*non_blocking=*/true);
    source.fill_(2);
    seen.insert(x.item<float>());
  }
  EXPECT_EQ(seen, (std::set<float>{1, 2}));
}

void write_kernel(float* memory) { *memory = 2.0F; }

void launch_write(at::Tensor& memory) {
  const mezzo::detail::cuda::DeviceGuard guard(emulated_gpu::device());
  mezzo::detail::cuda::launch<write_kernel>(1, 1, mezzo::detail::cuda::current_stream(),
                                            memory.mutable_data_ptr<float>());
}

/// The ways in which a device writes 2 to pinned memory.
const std::vector<std::function<void(at::Tensor&)>> kWrites{
    launch_write, [](at::Tensor& memory) { memory.copy_(on_gpu(2), /*non_blocking=*/true); }};

c10::Stream current_stream() {
  return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(emulated_gpu::device());
}

// Even if the device has completed it: CUDA guarantees no more.
TEST_P(EmulatedStream, PinnedWriteVisibleAfterEvent) {
  for (const auto& write : kWrites) {
    at::Tensor memory = pinned(1);
    c10::Event before(c10::kPrivateUse1);
    c10::Event behind(c10::kPrivateUse1);
    before.record(current_stream());
    write(memory);
    behind.record(current_stream());
    {
      const c10::StreamGuard other(emulated_gpu::new_stream());
      for (int i = 0; i < 10; ++i) EXPECT_EQ(on_gpu(3).item<float>(), 3);
    }
    before.synchronize();
    EXPECT_EQ(memory.item<float>(), 1);
    behind.synchronize();
    EXPECT_EQ(memory.item<float>(), 2);
  }
}

TEST_P(EmulatedStream, PinnedWriteVisibleAfterSync) {
  for (const auto& write : kWrites) {
    at::Tensor memory = pinned(1);
    write(memory);
    current_stream().synchronize();
    EXPECT_EQ(memory.item<float>(), 2);
    at::Tensor again = pinned(1);
    write(again);
    const c10::Stream other = emulated_gpu::new_stream();
    c10::Event written(c10::kPrivateUse1);
    written.record(current_stream());
    written.block(other);
    c10::Event behind(c10::kPrivateUse1);
    behind.record(other);
    while (!behind.query()) EXPECT_EQ(again.item<float>(), 1);
    EXPECT_EQ(again.item<float>(), 2);
  }
}

TEST_P(EmulatedStream, ThrowsForWriteToFreedMemory) {
  emulated_gpu::StreamBlocker held(current_stream());
  {
    at::Tensor memory = pinned(1);
    launch_write(memory);
  }
  held.end();
  EXPECT_THROW(emulated_gpu::run_all(), CudaUsageError);
}

TEST_P(EmulatedStream, PinnedMemoryMayBeFreedEarly) {
  const at::Tensor scalar = on_gpu(1);
  {
    const at::Tensor values =
        mezzo::detail::empty_host_tensor({4}, at::kDouble, emulated_gpu::device());
    void* address = nullptr;
    mezzo::detail::cuda_kernels()->write_step_values_(scalar, scalar, {}, {}, values, address);
  }
  EXPECT_NO_THROW(emulated_gpu::run_all());
}

TEST_P(EmulatedStream, PinningInCaptureNeedsRelaxedMode) {
  const c10::StreamGuard guard(emulated_gpu::new_stream());
  Graph graph;
  emulated_gpu::capture(graph, [] {
    EXPECT_THROW((void)pinned(1), CudaUsageError);
    EXPECT_TRUE(
        mezzo::detail::empty_host_tensor({4}, at::kDouble, emulated_gpu::device()).is_pinned());
  });
}

TEST_P(EmulatedStream, WaitsForEvent) {
  const at::Tensor x = on_gpu(1);
  const c10::Stream other = emulated_gpu::new_stream();
  c10::Event event(c10::kPrivateUse1);
  x.mul_(10);
  event.record(c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(emulated_gpu::device()));
  event.block(other);
  const c10::StreamGuard guard(other);
  EXPECT_EQ(x.add(1).item<float>(), 11);
}

TEST_P(EmulatedStream, CaptureRecordsAllowedCallsOnly) {
  const at::Tensor x = on_gpu(1);
  c10::Event outside(c10::kPrivateUse1);
  Graph graph;
  EXPECT_THROW(graph.capture_begin(), CudaUsageError) << "the default stream";
  const c10::StreamGuard guard(emulated_gpu::new_stream());
  outside.record(guard.original_stream());
  emulated_gpu::run_all();
  c10::Event inside(c10::kPrivateUse1);
  emulated_gpu::capture(graph, [&] {
    x.add_(1);
    inside.record(guard.current_stream());
    EXPECT_THROW(outside.block(guard.current_stream()), CudaUsageError);
    EXPECT_THROW((void)outside.query(), CudaUsageError);
    EXPECT_THROW(outside.synchronize(), CudaUsageError);
    EXPECT_THROW((void)x.item<float>(), CudaUsageError);
    EXPECT_THROW((void)x.cpu(), CudaUsageError);
    EXPECT_THROW((void)at::ones({}).to(emulated_gpu::device(), /*non_blocking=*/true),
                 CudaUsageError);
  });
  EXPECT_THROW(inside.block(guard.original_stream()), CudaUsageError);
  EXPECT_THROW((void)inside.query(), CudaUsageError);
  EXPECT_EQ(x.item<float>(), 1);
  graph.replay();
  graph.replay();
  EXPECT_EQ(x.item<float>(), 3);
}

TEST_P(EmulatedStream, CaptureIncludesForkedStreams) {
  const at::Tensor x = on_gpu(1);
  const at::Tensor y = on_gpu(0);
  emulated_gpu::run_all();
  const c10::Stream other = emulated_gpu::new_stream();
  const c10::StreamGuard guard(emulated_gpu::new_stream());
  const auto fork = [&](bool joins) {
    c10::Event forked(c10::kPrivateUse1);
    forked.record(guard.current_stream());
    forked.block(other);
    {
      const c10::StreamGuard inner(other);
      y.copy_(x);
    }
    c10::Event joined(c10::kPrivateUse1);
    joined.record(other);
    if (joins) joined.block(guard.current_stream());
    x.add_(1);
  };
  Graph graph;
  emulated_gpu::capture(graph, [&] { fork(true); });
  for (int i = 0; i < 5; ++i) graph.replay();
  EXPECT_EQ(x.item<float>(), 6);
  EXPECT_EQ(y.item<float>(), 5);
  Graph torn;
  torn.capture_begin();
  fork(false);
  EXPECT_THROW(torn.capture_end(), CudaUsageError);
}

TEST_P(EmulatedStream, NewMemoryIsNan) {
  const auto options = at::device(emulated_gpu::device()).dtype(at::kFloat);
  const void* address = nullptr;
  {
    const at::Tensor freed = at::ones({7}, options);
    address = freed.const_data_ptr();
  }
  const at::Tensor again = at::empty({7}, options);
  EXPECT_EQ(again.const_data_ptr(), address);
  EXPECT_TRUE(at::isnan(again.cpu()).all().item<bool>());
}

}  // namespace
