// Compiled with OpenMP and without the precompiled header: at::parallel_for, which parallel_apply
// calls, runs serially in a translation unit compiled without OpenMP.

#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/autocast_state.h>

#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/parallel/data_parallel.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#ifndef _OPENMP
#error "this test needs OpenMP, since there is only one thread without it"
#endif

namespace {

using mezzo::AutocastModule;
using torch::Tensor;

/// Waits in forward until a second thread arrives, so that parallel_apply uses two threads.
struct BarrierLinearImpl : torch::nn::Module {
  explicit BarrierLinearImpl(std::atomic<int>& arrived) : arrived_(&arrived) {
    linear = register_module("linear", torch::nn::Linear(4, 2));
  }
  Tensor forward(const Tensor& x) {
    arrived_->fetch_add(1);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (arrived_->load() < 2) {
      TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "no second thread came");
      std::this_thread::yield();
    }
    return linear(x);
  }

  torch::nn::Linear linear{nullptr};

 private:
  std::atomic<int>* arrived_;
};
TORCH_MODULE(BarrierLinear);

/// Sets two threads, which parallel_apply needs.
class AutocastParallelApply : public testing::Test {
 protected:
  void SetUp() override {
    before_ = at::get_num_threads();
    at::set_num_threads(2);
  }
  void TearDown() override { at::set_num_threads(before_); }

  std::vector<Tensor> inputs_ = {at::rand({3, 4}), at::rand({3, 4})};
  std::atomic<int> arrived_ = 0;

 private:
  int before_ = 0;
};

TEST_F(AutocastParallelApply, PlainModulesIgnoreCallersRegion) {
  std::vector<BarrierLinear> modules = {BarrierLinear(arrived_), BarrierLinear(arrived_)};
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  const auto outputs = torch::nn::parallel::parallel_apply(modules, inputs_);
  EXPECT_NE(outputs[0].scalar_type(), outputs[1].scalar_type())
      << "the caller's thread lowers, the pool's thread does not";
}

TEST_F(AutocastParallelApply, WrappedModulesRunUnderAutocast) {
  const mezzo::AutocastOptions bf16{.device_type = torch::kCPU};
  std::vector<AutocastModule<BarrierLinear>> modules = {{BarrierLinear(arrived_), bf16},
                                                        {BarrierLinear(arrived_), bf16}};
  const auto outputs = torch::nn::parallel::parallel_apply(modules, inputs_);
  EXPECT_EQ(outputs[0].scalar_type(), torch::kBFloat16);
  EXPECT_EQ(outputs[1].scalar_type(), torch::kBFloat16);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
}

/// Returns the dtypes of `product` at each index of a loop over two threads.
template <class Product>
std::vector<at::ScalarType> dtypes_in_parallel_for(const Product& product) {
  std::vector<at::ScalarType> dtypes(2);
  std::atomic<int> arrived = 0;
  at::parallel_for(0, 2, 1, [&](int64_t begin, int64_t end) {
    for (arrived += static_cast<int>(end - begin); arrived < 2;) std::this_thread::yield();
    for (int64_t i = begin; i < end; ++i) dtypes[static_cast<std::size_t>(i)] = product();
  });
  return dtypes;
}

at::ScalarType get_product_dtype() {
  const Tensor x = at::rand({2, 2});
  return at::mm(x, x).scalar_type();
}

TEST_F(AutocastParallelApply, ParallelForNeedsPropagatedState) {
  at::autocast::set_autocast_enabled(torch::kCPU, true);
  at::autocast::set_autocast_dtype(torch::kCPU, torch::kBFloat16);
  const auto libtorch_dtypes = dtypes_in_parallel_for(get_product_dtype);
  at::autocast::set_autocast_enabled(torch::kCPU, false);
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  EXPECT_EQ(dtypes_in_parallel_for(get_product_dtype), libtorch_dtypes);
  EXPECT_EQ(libtorch_dtypes, (std::vector{torch::kBFloat16, torch::kFloat}));
  EXPECT_EQ(dtypes_in_parallel_for(mezzo::propagate_autocast_state(get_product_dtype)),
            (std::vector{torch::kBFloat16, torch::kBFloat16}));
}

}  // namespace
