// Lifetimes of what a checkpoint stores, and its use from several threads.

#include <mezzo/autocast/activation_checkpoint.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <pthread.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "loss_and_gradients.h"

namespace {

using torch::Tensor;
using WeakTensor = c10::weak_intrusive_ptr<c10::StorageImpl>;

WeakTensor watch(const Tensor& tensor) { return WeakTensor(tensor.storage().getWeakStorageImpl()); }

TEST(ActivationCheckpointLifetime, FreesActivationsAfterForwardAndBackward) {
  std::vector<WeakTensor> activations;
  const auto block = [&](const Tensor& x) {
    const auto hidden = x.exp();  // saves its result for backward
    activations.push_back(watch(hidden));
    return hidden.mm(hidden);
  };
  const auto x = torch::randn({8, 8}).requires_grad_();
  const auto y = mezzo::activation_checkpoint(block, x);
  ASSERT_EQ(activations.size(), 1);
  EXPECT_TRUE(activations[0].expired());
  y.sum().backward();
  ASSERT_EQ(activations.size(), 2);
  EXPECT_TRUE(activations[1].expired());
  const auto z = block(x);
  EXPECT_FALSE(activations[2].expired()) << "without a checkpoint they stay";
}

TEST(ActivationCheckpointLifetime, FreesFunctionAndArgumentsAfterBackward) {
  const auto x = torch::randn({8}).requires_grad_();
  auto token = std::make_shared<int>(2);
  const std::weak_ptr<int> function = token;
  Tensor argument = torch::ones({8});
  const auto watched = watch(argument);
  const auto y = mezzo::activation_checkpoint(
      [token = std::move(token)](const Tensor& t, const Tensor& u) { return t * u * *token; }, x,
      std::move(argument));
  EXPECT_FALSE(function.expired());
  EXPECT_FALSE(watched.expired());
  y.sum().backward();
  EXPECT_TRUE(function.expired());
  EXPECT_TRUE(watched.expired());
}

TEST(ActivationCheckpointLifetime, StoresNothingWhenNothingRequiresGrad) {
  auto token = std::make_shared<int>(2);
  const std::weak_ptr<int> function = token;
  const auto y = mezzo::activation_checkpoint(
      [token = std::move(token)](const Tensor& t) { return t * *token; }, torch::ones({8}));
  EXPECT_TRUE(function.expired());
}

void* destroy(void* tensor) {
  static_cast<Tensor*>(tensor)->reset();
  return nullptr;
}

TEST(ActivationCheckpointLifetime, LongChainEndsWithoutRecursion) {
  auto y = torch::ones({1}).requires_grad_();
  for (int i = 0; i < 5'000; ++i) {
    y = mezzo::activation_checkpoint(
        {.preserve_rng_state = false}, [](const Tensor& t) { return t + 1; }, y);
  }
  EXPECT_EQ(y.item<float>(), 5'001);
  // Runs in a thread whose stack would overflow if each node destroyed the next.
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 256 * 1024), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, &attributes, destroy, &y), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  EXPECT_FALSE(y.defined());
}

TEST(ActivationCheckpointThreads, GradientsMatchInOtherThread) {
  const auto x = torch::randn({8, 8}).requires_grad_();
  const auto w = torch::randn({8, 8}).requires_grad_();
  // A captured tensor whose node has a higher number than the nodes of the other thread.
  for (int i = 0; i < 100; ++i) w.exp();
  const auto scale = w.exp();
  const auto block = [w, scale](const Tensor& t) {
    return torch::dropout(t.mm(w) * scale, 0.5, true);
  };
  std::vector<Tensor> gradients;
  const auto y = mezzo::activation_checkpoint(block, x).sum();
  std::thread([&] { gradients = torch::autograd::grad({y}, {x, w}); }).join();
  ASSERT_EQ(gradients.size(), 2);
  EXPECT_TRUE(gradients[1].defined());
}

TEST(ActivationCheckpointThreads, GradientsMatchForOtherThreadsTensors) {
  const auto w = torch::randn({8, 8}).requires_grad_();
  Tensor scale;
  std::thread([&] {
    for (int i = 0; i < 10'000; ++i) w.t();  // so that the node of `scale` has a high number
    scale = w.exp();
  }).join();
  const auto x = torch::randn({8, 8}).requires_grad_();
  const auto block = [scale](const Tensor& t) { return (t * scale).tanh(); };
  const auto ours =
      torch::autograd::grad({mezzo::activation_checkpoint(block, x).sum()}, {x, w}, {}, true);
  const auto plain = torch::autograd::grad({block(x).sum()}, {x, w});
  EXPECT_THAT(ours, activation_checkpoint_test::BitwiseEqual(plain));
}

TEST(ActivationCheckpointThreads, GradientsMatchForConcurrentBackward) {
  const auto w = torch::randn({16, 16}).requires_grad_();
  const auto x = torch::randn({16, 16}).requires_grad_();
  const auto y =
      mezzo::activation_checkpoint([w](const Tensor& t) { return t.mm(w).tanh().mm(w); }, x).sum();
  const auto expected = torch::autograd::grad({y}, {x, w}, {}, /*retain_graph=*/true);
  std::vector<std::vector<Tensor>> gradients(4);
  std::vector<std::thread> threads;
  for (auto& thread_gradients : gradients) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i)
        thread_gradients = torch::autograd::grad({y}, {x, w}, {}, /*retain_graph=*/true);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& thread_gradients : gradients)
    EXPECT_THAT(thread_gradients, activation_checkpoint_test::BitwiseEqual(expected));
}

}  // namespace
