// Stochastic rounding: exact in the mean, deterministic, and trains a bfloat16 model.

#include <mezzo/kernels/adam_functor.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/weight_formats.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <vector>

#include "../kernels/step_buffers.h"

namespace {

using mezzo::detail::AdamFunctor;
using mezzo::detail::CpuIsa;
using mezzo::detail::RandomKey;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::WeightStorage;
using test_support::BitwiseEqual;

c10::BFloat16 rounded(float value, uint32_t noise) {
  uint32_t bits = 0;
  mezzo::detail::stochastic_round_to_bf16(value, noise, bits);
  return {static_cast<uint16_t>(bits), c10::BFloat16::from_bits()};
}

TEST(StochasticRounding, RoundsWithProbabilityOfDistance) {
  for (const float value : {1.0F + 1.0F / 512, -3.14159F, 1e-30F, 6e4F, 1e-39F}) {
    double sum = 0;
    std::set<float> seen;
    for (uint32_t noise = 0; noise < 65536; ++noise) {
      const float one = rounded(value, noise);
      seen.insert(one);
      sum += static_cast<double>(one);
    }
    EXPECT_EQ(sum / 65536, static_cast<double>(value)) << "the mean over all noise is exact";
    EXPECT_LE(seen.size(), 2U);
  }
  for (uint32_t noise = 0; noise < 65536; ++noise) {
    EXPECT_EQ(static_cast<float>(rounded(1.5F, noise)), 1.5F) << "exact values are not rounded";
    EXPECT_TRUE(std::isinf(static_cast<float>(rounded(HUGE_VALF, noise))));
    EXPECT_TRUE(std::isnan(static_cast<float>(rounded(std::nanf(""), noise))));
  }
}

/// The random bits of an element's parameter and moments, as in the kernel.
std::array<uint32_t, 4> noise_of(uint64_t number, RandomKey key) {
  uint32_t bits = static_cast<uint32_t>(number) ^ key;
  mezzo::detail::hash_bits(bits);
  return {bits & 0xFFFFU, bits >> 16, (bits * 0x9E3779B1U) >> 16, (bits * 0x85EBCA77U) >> 16};
}

TEST(RandomBits, AreUniformPerStepAndParam) {
  constexpr uint32_t kCount = 20000;
  const double tolerance = 5 / std::sqrt(12.0 * kCount);  // five standard deviations
  for (uint64_t step = 1; step <= 20; ++step) {
    for (uint64_t parameter = 0; parameter < 5; ++parameter) {
      const RandomKey key = mezzo::detail::random_key(0, step, parameter, 0);
      std::array<double, 4> means{};
      std::array<double, 4> products{};  // of neighboring streams
      for (uint32_t i = 0; i < kCount; ++i) {
        const std::array<uint32_t, 4> noise = noise_of(i, key);
        for (std::size_t k = 0; k < 4; ++k) {
          const auto fraction = [&](std::size_t of) { return noise[of % 4] / 65536.0 - 0.5; };
          means[k] += fraction(k) / kCount;
          products[k] += 12 * fraction(k) * fraction(k + 1) / kCount;
        }
      }
      EXPECT_THAT(means, testing::Each(testing::DoubleNear(0, tolerance)));
      EXPECT_THAT(products, testing::Each(testing::DoubleNear(0, 5 / std::sqrt(kCount))));
    }
  }
}

TEST(RandomBits, DifferBySeedStepParamBlock) {
  std::set<RandomKey> keys;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    for (uint64_t step = 1; step < 20; ++step) {
      for (uint64_t parameter = 0; parameter < 20; ++parameter) {
        for (uint64_t block = 0; block < 3; ++block) {
          EXPECT_TRUE(keys.insert(mezzo::detail::random_key(seed, step, parameter, block)).second);
        }
      }
    }
  }
}

constexpr std::uint32_t kParamIndex = 3;

/// Adam's plain arithmetic and rounding with the random bits of each element, one at a time.
template <bool kAmsgrad>
StepBuffers expected_after(const StepBuffers& before,
                           const mezzo::detail::AdamCoefficients& coefficients,
                           const mezzo::detail::StepArgs& args, int64_t first) {
  StepBuffers after = before.clone();
  const auto float_of = [](const torch::Tensor& tensor, int64_t i) {
    return static_cast<float>(tensor.const_data_ptr<c10::BFloat16>()[i]);
  };
  for (int64_t i = 0; i < before.parameter.numel(); ++i) {
    const auto number = static_cast<uint64_t>(first + i);
    const RandomKey key =
        mezzo::detail::random_key(args.seed, args.step, kParamIndex, number >> 32);
    using Vec = mezzo::detail::ScalarVec<float>;
    const typename AdamFunctor<kAmsgrad>::template Update<Vec> update(coefficients);
    float parameter = float_of(before.parameter, i);
    float gradient = float_of(before.gradient, i) * static_cast<float>(args.multipliers.first);
    float moments[AdamFunctor<kAmsgrad>::kNumMoments];
    for (unsigned k = 0; k < AdamFunctor<kAmsgrad>::kNumMoments; ++k) {
      moments[k] = float_of(before.moments[k], i);
    }
    update(parameter, gradient, moments);
    const std::array<uint32_t, 4> noise = noise_of(number, key);
    after.parameter.data_ptr<c10::BFloat16>()[i] = rounded(parameter, noise[0]);
    for (unsigned k = 0; k < AdamFunctor<kAmsgrad>::kNumMoments; ++k) {
      after.moments[k].data_ptr<c10::BFloat16>()[i] = rounded(moments[k], noise[k + 1]);
    }
  }
  return after;
}

constexpr int64_t kChunk = mezzo::detail::kMinChunkElements;

class StochasticRoundingKernel : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(GetParam())) GTEST_SKIP() << "this CPU lacks the instruction set";
  }

  template <bool kAmsgrad>
  void expect_reference_results(int64_t first) {
    constexpr DtypePair kDtypes{torch::kBFloat16, torch::kBFloat16};
    const auto loop = mezzo::detail::get_step_kernel<AdamFunctor<kAmsgrad>>(
        mezzo::optim::WeightStorage::stochastic_rounding, torch::kBFloat16, GetParam());
    const auto coefficients =
        mezzo::detail::AdamHyperParams{0.9, 0.999, 1e-8, 0.1, true}.coefficients(1e-2, 7);
    const mezzo::detail::StepArgs args{.multipliers = {.first = 0.25}, .seed = 11, .step = 7};
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{17},
                                int64_t{1000}, kChunk + 100}) {
      torch::manual_seed(count);
      auto buffers = StepBuffers::random(kDtypes, count);
      const auto expected = expected_after<kAmsgrad>(buffers, coefficients, args, first);
      mezzo::detail::ParamArgs row{.pointers = buffers.pointers(),
                                   .param_index = kParamIndex,
                                   .storage = mezzo::optim::WeightStorage::stochastic_rounding,
                                   .parameter_dtype = kDtypes.parameter,
                                   .gradient_dtype = kDtypes.gradient};
      row.pointers.first_index = first;
      mezzo::detail::run_step_cpu(std::vector{row}, {{loop, coefficients, 7}}, args);
      EXPECT_THAT(buffers.tensors(), BitwiseEqual(expected.tensors()))
          << count << " elements from " << first;
    }
  }
};

TEST_P(StochasticRoundingKernel, MatchesReferenceBitwise) {
  for (const int64_t first : {int64_t{0}, (int64_t{1} << 32) - kChunk, int64_t{3} << 32}) {
    expect_reference_results<false>(first);
    expect_reference_results<true>(first);
  }
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, StochasticRoundingKernel,
                         testing::Values(CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2,
                                         CpuIsa::avx512),
                         [](const auto& test) { return isa_name(test.param); });

class ThreadCountGuard {
 public:
  explicit ThreadCountGuard(int number) { torch::set_num_threads(number); }
  ThreadCountGuard(const ThreadCountGuard&) = delete;
  ThreadCountGuard& operator=(const ThreadCountGuard&) = delete;
  ~ThreadCountGuard() { torch::set_num_threads(before_); }

 private:
  int before_ = torch::get_num_threads();
};

torch::Tensor train(int num_threads, uint64_t seed) {
  const ThreadCountGuard threads(num_threads);
  torch::manual_seed(1);
  const auto parameter = torch::randn({100000}).to(torch::kBFloat16).requires_grad_();
  AdamW optimizer({parameter}, AdamWOptions(1e-4),
                  {.weight_storage = WeightStorage::stochastic_rounding, .seed = seed});
  for (int step = 0; step < 3; ++step) {
    parameter.mutable_grad() = torch::randn({100000}).to(torch::kBFloat16);
    optimizer.step();
  }
  return parameter.detach();
}

TEST(StochasticRounding, DeterministicForSeedAcrossThreadCounts) {
  EXPECT_TRUE(torch::equal(train(1, 7), train(2, 7)));
  EXPECT_FALSE(torch::equal(train(1, 7), train(1, 8)));
}

/// Steps of an eighth of the distance 2^-7 from 1.5 to its lower neighbour.
TEST(StochasticRounding, StatelessStepsDrawNewBits) {
  const auto parameter = torch::full({10000}, 1.5F).to(torch::kBFloat16).requires_grad_();
  mezzo::optim::SGD optimizer({parameter}, mezzo::optim::SGDOptions(0x1p-10),
                              {.weight_storage = WeightStorage::stochastic_rounding});
  parameter.mutable_grad() = torch::ones({10000}, torch::kBFloat16);
  for (int step = 0; step < 32; ++step) optimizer.step();
  const auto moved = (1.5F - parameter.detach().to(torch::kFloat)) * 128;  // binomial: 32, 1/8
  EXPECT_NEAR(moved.mean().item<double>(), 4, 0.1);
  EXPECT_NEAR(moved.std().item<double>(), std::sqrt(32 * 0.125 * 0.875), 0.1);
}

/// The first step of SGD with momentum equals a step without.
TEST(StochasticRounding, EnablingMomentumDrawsNewBits) {
  const auto start = torch::full({10000}, 1.5F).to(torch::kBFloat16);
  const auto parameter = start.clone().requires_grad_();
  mezzo::optim::SGD optimizer({parameter}, mezzo::optim::SGDOptions(0x1p-8),
                              {.weight_storage = WeightStorage::stochastic_rounding});
  parameter.mutable_grad() = torch::ones({10000}, torch::kBFloat16);
  optimizer.step();
  const auto first = parameter.detach().clone();
  {
    const torch::NoGradGuard no_grad;
    parameter.copy_(start);
  }
  auto& options = optimizer.param_groups().front().options();
  static_cast<mezzo::optim::SGDOptions&>(options).momentum(0.9);
  optimizer.step();
  const auto differ = parameter.detach().ne(first).to(torch::kFloat).mean().item<double>();
  EXPECT_NEAR(differ, 0.5, 0.05) << "half of the weights go down in each step, independently";
}

/// Returns the loss of a least-squares problem after 1,000 steps of AdamW in `dtype`.
double loss_after_training(torch::ScalarType dtype, WeightStorage storage) {
  const ThreadCountGuard one(1);  // small ops are slower with threads
  torch::manual_seed(2);
  const auto inputs = torch::randn({256, 64});
  const auto targets = inputs.mm(torch::randn({64, 16}));
  const auto weight = (torch::randn({64, 16}) * 0.1).to(dtype).requires_grad_();
  AdamW optimizer({weight}, AdamWOptions(2e-3).weight_decay(0), {.weight_storage = storage});
  for (int step = 0; step < 1000; ++step) {
    const auto error = inputs.mm(weight.to(torch::kFloat)) - targets;
    optimizer.zero_grad();
    error.square().mean().backward();
    optimizer.step();
  }
  const torch::NoGradGuard no_grad;
  return (inputs.mm(weight.to(torch::kFloat)) - targets).square().mean().item<double>();
}

TEST(StochasticRounding, TrainsLikeFloat32WhereNearestStalls) {
  const double with_float = loss_after_training(torch::kFloat, WeightStorage::plain);
  const double nearest = loss_after_training(torch::kBFloat16, WeightStorage::plain);
  const double stochastic =
      loss_after_training(torch::kBFloat16, WeightStorage::stochastic_rounding);
  const double master = loss_after_training(torch::kBFloat16, WeightStorage::fp32_master);
  const double split = loss_after_training(torch::kBFloat16, WeightStorage::split_master);
  EXPECT_GT(nearest, 2 * with_float);
  EXPECT_NEAR(stochastic, with_float, 0.02 * with_float);
  EXPECT_NEAR(master, with_float, 0.02 * with_float);
  EXPECT_NEAR(split, master, 0.001 * master);
}

}  // namespace
