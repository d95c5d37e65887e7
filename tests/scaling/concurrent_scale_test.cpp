#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <barrier>
#include <thread>
#include <vector>

namespace {

// Learners of a thread pool share one scaler, and the first iteration's losses come at once.
TEST(GradScalerConcurrentScale, ThreadsMayScaleTheFirstLossesAtOnce) {
  constexpr int kThreads = 3;
  for (int round = 0; round < 300; ++round) {
    mezzo::GradScaler scaler({.init_scale = 1024});
    std::vector<torch::Tensor> scaled(kThreads);
    std::barrier start(kThreads);
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
          const torch::Tensor loss = torch::full({}, i + 1.0);
          start.arrive_and_wait();
          scaled[static_cast<std::size_t>(i)] = scaler.scale(loss);
        });
      }
    }
    for (int i = 0; i < kThreads; ++i) {
      ASSERT_EQ(scaled[static_cast<std::size_t>(i)].item<double>(), 1024.0 * (i + 1.0));
    }
    ASSERT_EQ(scaler.get_scale(), 1024.0);
  }
}

}  // namespace
