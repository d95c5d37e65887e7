// An optimizer writes the low-precision copies itself.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "what_an_op_reads.h"

namespace {

using mezzo::Autocast;
using torch::kBFloat16;
using torch::kCPU;
using torch::kFloat;
using torch::kHalf;
using torch::Tensor;

constexpr int64_t kWidth = 6;

Tensor parameter() { return torch::randn({kWidth, kWidth}).requires_grad_(); }

/// What a fused optimizer does in one pass: weight and copy by raw pointers, then the word about
/// it.
void step(const mezzo::WeightCache& cache, const Tensor& weight, at::ScalarType dtype) {
  const auto copy = cache.buffer_for(weight, dtype);
  const auto updated = weight.detach() - 0.1 * weight.grad();
  const auto lowered = updated.to(dtype);
  std::memcpy(weight.mutable_data_ptr(), updated.const_data_ptr(), updated.nbytes());
  std::memcpy(copy.mutable_data_ptr(), lowered.const_data_ptr(), lowered.nbytes());
  weight.unsafeGetTensorImpl()->bump_version();
  cache.publish(weight, copy);
}

Tensor loss_of(const Tensor& weight, const Tensor& x) {
  return torch::linear(x, weight).to(kFloat).pow(2).mean();
}

TEST(WeightCachePublish, TrainsWithoutACast) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  const auto reference = weight.detach().clone().requires_grad_();
  const auto x = torch::randn({3, kWidth});
  const void* address = nullptr;
  for (int i = 0; i < 5; ++i) {
    {
      const Autocast<kCPU> autocast({.cache = cache});
      loss_of(weight, x).backward();
    }
    {
      const Autocast<kCPU> autocast({.cache = false});
      loss_of(reference, x).backward();
    }
    EXPECT_TRUE(torch::equal(weight.grad(), reference.grad()));
    step(cache, weight, kBFloat16);
    const auto buffer = cache.buffer_for(weight, kBFloat16);
    EXPECT_TRUE(address == nullptr || address == buffer.const_data_ptr());
    address = buffer.const_data_ptr();
    if (i == 0) cache.reset_statistics();
    reference.data().sub_(0.1 * reference.grad());
    weight.mutable_grad().reset();
    reference.mutable_grad().reset();
  }
  EXPECT_EQ(cache.statistics().casts, 0);
  EXPECT_EQ(cache.statistics().hits, 4);
  EXPECT_EQ(cache.statistics().published, 4);
}

TEST(WeightCachePublish, IsBelievedOnlyUntilTheWeightChanges) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  const auto sevens = torch::full({kWidth, kWidth}, 7, kBFloat16);
  cache.publish(weight, sevens);
  const Autocast<kCPU> autocast({.cache = cache});
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), sevens));
  {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  }
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
  EXPECT_TRUE(cache.buffer_for(weight, kBFloat16).is_same(sevens));
  EXPECT_TRUE(torch::equal(sevens, weight.to(kBFloat16)));  // in the place that was published
}

// An optimizer that writes the buffer with ops, and throws before it has written the weight.
TEST(WeightCachePublish, IsNeededAfterAWriteToTheBuffer) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  const auto buffer = cache.buffer_for(weight, kBFloat16);
  buffer.zero_();
  const Autocast<kCPU> autocast({.cache = cache});
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
  EXPECT_TRUE(cache.buffer_for(weight, kBFloat16).is_same(buffer));
}

// What is replaced may be freed by code of the caller's, which may ask the cache.
TEST(WeightCachePublish, LetsGoOfAReplacedCopyOutsideOfItsLocks) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  const auto other = parameter();
  std::vector<c10::BFloat16> memory(kWidth * kWidth);
  bool freed = false;
  const auto free = [&](void*) {
    auto asked = std::async(std::launch::async, [&] {
      static_cast<void>(cache.buffer_for(other, kBFloat16));
      cache.clear();
    });
    freed = asked.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
    if (!freed) std::abort();
  };
  cache.publish(weight, torch::from_blob(memory.data(), {kWidth, kWidth}, free, kBFloat16));
  cache.publish(weight, weight.detach().to(kBFloat16));
  EXPECT_TRUE(freed);
}

TEST(WeightCachePublish, KeepsItsPlaceWhenACastThrows) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  auto weight = torch::randn({kWidth, kWidth});
  const auto buffer = cache.buffer_for(weight, kBFloat16);
  weight.add_(1);
  {
    // A key that no op has a kernel for.
    const c10::impl::IncludeDispatchKeyGuard failing(c10::DispatchKey::TESTING_ONLY_GenericMode);
    EXPECT_THROW(static_cast<void>(cache.buffer_for(weight, kBFloat16)), c10::Error);
  }
  EXPECT_EQ(cache.statistics().copies_held, 1);
  EXPECT_TRUE(cache.buffer_for(weight, kBFloat16).is_same(buffer));
  EXPECT_TRUE(torch::equal(buffer, weight.to(kBFloat16)));
}

TEST(WeightCachePublish, ChangesNothingWhenItThrows) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = torch::randn({kWidth, kWidth});
  const auto buffer = cache.buffer_for(weight, kBFloat16);
  EXPECT_THROW(cache.publish(weight, torch::zeros({2 * kWidth, kWidth}, kBFloat16)), c10::Error);
  EXPECT_TRUE(cache.holds(weight, kBFloat16));
  EXPECT_TRUE(cache.buffer_for(weight, kBFloat16).is_same(buffer));
  EXPECT_EQ(cache.statistics().published, 0);
}

TEST(WeightCachePublish, TakesACopyThatIsAViewOfAFlatBuffer) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto flat = torch::empty({2 * kWidth * kWidth}, kBFloat16);
  const std::vector<Tensor> weights = {parameter(), parameter()};
  for (int64_t i = 0; i < 2; ++i) {
    const auto view = flat.narrow(0, i * kWidth * kWidth, kWidth * kWidth).view({kWidth, kWidth});
    const auto& weight = weights[static_cast<std::size_t>(i)];
    view.copy_(weight.detach());
    cache.publish(weight, view);
  }
  const Autocast<kCPU> autocast({.cache = cache});
  for (const auto& weight : weights) {
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
  }
  EXPECT_EQ(cache.statistics().casts, 0);
}

TEST(WeightCachePublish, ServesOnlyItsDtype) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  cache.publish(weight, cache.buffer_for(weight, kHalf));
  const Autocast<kCPU> autocast({.cache = cache});
  EXPECT_EQ(what_linear_reads(weight).scalar_type(), kBFloat16);
  EXPECT_TRUE(cache.holds(weight, kHalf));
  const Autocast<kCPU, kHalf> inner;
  EXPECT_EQ(what_linear_reads(weight).scalar_type(), kHalf);
}

// A step that the device decides to skip writes neither weight nor copy, and publishes all the
// same.
TEST(WeightCachePublish, LosesNothingWhenAStepIsSkipped) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  const auto skip = [&] {
    const auto buffer = cache.buffer_for(weight, kBFloat16);
    weight.unsafeGetTensorImpl()->bump_version();
    cache.publish(weight, buffer);
  };
  const Autocast<kCPU> autocast({.cache = cache});
  skip();
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
  {
    const torch::NoGradGuard no_grad;
    weight.add_(1);  // a state is loaded, say
  }
  skip();
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
}

TEST(WeightCachePublish, MakesTheBackwardOfAnOlderForwardThrow) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  const auto x = torch::randn({3, kWidth}).requires_grad_();
  weight.mutable_grad() = torch::ones_like(weight);
  step(cache, weight, kBFloat16);
  Tensor loss;
  {
    const Autocast<kCPU> autocast({.cache = cache});
    loss = loss_of(weight, x);
  }
  step(cache, weight, kBFloat16);
  // Also where only the input's gradient is asked for, which needs the overwritten copy alone.
  for (const auto& inputs : {std::vector<Tensor>{x}, std::vector<Tensor>{weight}}) {
    try {
      torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true);
      ADD_FAILURE();
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"),
                std::string::npos);
    }
  }
}

TEST(WeightCachePublish, MakesTheBackwardOfAFrozenWeightThrowToo) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = torch::randn({kWidth, kWidth});
  const auto x = torch::randn({3, kWidth}).requires_grad_();
  const auto buffer = cache.buffer_for(weight, kBFloat16);
  Tensor loss;
  {
    const Autocast<kCPU> autocast({.cache = cache});
    loss = loss_of(weight, x);
  }
  std::memset(buffer.mutable_data_ptr(), 0, buffer.nbytes());
  cache.publish(weight, buffer);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(WeightCachePublish, KeepsTheAddressUnlessTheShapeChanges) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  auto weight = parameter();
  const auto buffer = cache.buffer_for(weight, kBFloat16);
  EXPECT_TRUE(cache.buffer_for(weight, kBFloat16).is_same(buffer));
  EXPECT_EQ(cache.statistics().casts, 1);
  weight.set_data(torch::randn({kWidth, kWidth}));
  EXPECT_TRUE(cache.buffer_for(weight, kBFloat16).is_same(buffer));
  EXPECT_TRUE(torch::equal(buffer, weight.to(kBFloat16)));
  weight.set_data(torch::randn({2, 3}));
  EXPECT_EQ(cache.buffer_for(weight, kBFloat16).sizes(), weight.sizes());
}

TEST(WeightCachePublish, HasTheStridesOfTheWeight) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight =
      torch::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  EXPECT_EQ(cache.buffer_for(weight, kBFloat16).strides(), weight.strides());
}

TEST(WeightCachePublish, WorksFromInferenceMode) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  Tensor buffer;
  {
    const c10::InferenceMode inference;
    buffer = cache.buffer_for(weight, kBFloat16);
  }
  EXPECT_FALSE(buffer.is_inference());
  EXPECT_FALSE(buffer.requires_grad());
  cache.publish(weight, buffer);
}

void expect_error(const std::function<void()>& call, const std::string& words) {
  try {
    call();
    ADD_FAILURE() << "no error that says: " << words;
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(WeightCachePublish, NamesWhatIsWrong) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = parameter();
  const auto copy = [&](at::ScalarType dtype) { return weight.detach().to(dtype); };
  expect_error([&] { static_cast<void>(cache.buffer_for({}, kBFloat16)); }, "weight is undefined");
  expect_error([&] { static_cast<void>(cache.buffer_for(weight, kFloat)); },
               "dtype is float32, which is no low precision");
  expect_error([&] { static_cast<void>(cache.buffer_for(weight, torch::kLong)); },
               "dtype is Long, which is no low precision");
  expect_error([&] { static_cast<void>(cache.buffer_for(weight * 2, kHalf)); }, "is no dense leaf");
  expect_error([&] { cache.publish(torch::ones({2}, torch::kLong), copy(kHalf)); }, "weight: Long");
  expect_error([&] { cache.publish(weight, {}); }, "copy is undefined");
  expect_error([&] { cache.publish(weight, copy(kFloat)); },
               "copy is float32, which is no low precision");
  expect_error([&] { cache.publish(weight, copy(kHalf)[0]); },
               "; pass what buffer_for(weight, dtype) returned");
  expect_error([&] { cache.publish(weight, copy(kHalf).requires_grad_()); },
               "copy requires grad, is not dense");
  expect_error([&] { cache.forget({}); }, "weight is undefined");
  const c10::InferenceMode inference;
  const auto made_here = torch::ones({2});
  expect_error([&] { static_cast<void>(cache.buffer_for(made_here, kHalf)); }, "inference mode");
  expect_error(
      [&] {
        cache.publish(weight, torch::ones({kWidth, kWidth}, kHalf));
      },
      "inference mode");
}

}  // namespace
