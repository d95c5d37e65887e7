// Moments in 8 bits and in float: what they give beside float, between steps, and in files.

#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "../support/warnings.h"

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::AdamWParamState;
using mezzo::optim::MomentStorage;
using mezzo::optim::WeightStorage;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kElements = 5000;  // not a multiple of a block

/// Numbers in [-1, 1) that Python makes too.
at::Tensor numbers(int64_t count, uint64_t state) {
  const at::Tensor all = at::empty({count});
  for (int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    all.mutable_data_ptr<float>()[i] =
        static_cast<float>(static_cast<double>(state >> 40) / (1 << 23) - 1);
  }
  return all;
}

double norm_of(const at::Tensor& tensor) { return tensor.to(at::kDouble).norm().item().toDouble(); }

/// A parameter on its way to a target, with gradients that repeat.
struct Descent {
  explicit Descent(at::ScalarType dtype = at::kFloat, at::IntArrayRef sizes = {kElements})
      : parameter(numbers(c10::multiply_integers(sizes), 1).view(sizes).to(dtype).requires_grad_()),
        target(numbers(parameter.numel(), 2).view(sizes)),
        noise(numbers(parameter.numel(), 3).view(sizes)) {}

  template <class Optimizer>
  void steps(Optimizer& optimizer, int count) {
    for (int i = 0; i < count; ++i, ++taken) {
      const at::Tensor gradient =
          (parameter.detach().to(at::kFloat) - target) + noise * std::pow(0.5, taken % 5);
      parameter.mutable_grad() = gradient.to(parameter.scalar_type());
      optimizer.step();
    }
  }

  at::Tensor parameter, target, noise;
  int taken = 0;
};

AdamWParamState& state_of(AdamW& optimizer, const at::Tensor& parameter) {
  return static_cast<AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

AdamWOptions block8(double lr = 1e-2) {
  return AdamWOptions(lr).moment_storage(MomentStorage::block8);
}

template <class Optimizer, class Options>
void expect_near_float(const Options& options, at::ScalarType dtype, double most) {
  Descent wide(dtype);
  Descent narrow(dtype);
  Optimizer plain({wide.parameter}, Options(options).moment_storage(MomentStorage::float32));
  Optimizer in_blocks({narrow.parameter}, Options(options).moment_storage(MomentStorage::block8));
  const at::Tensor start = wide.parameter.detach().to(at::kFloat).clone();
  wide.steps(plain, 200);
  narrow.steps(in_blocks, 200);
  const at::Tensor reached = wide.parameter.detach().to(at::kFloat);
  const double apart = norm_of(narrow.parameter.detach().to(at::kFloat) - reached);
  EXPECT_GT(norm_of(reached - start), 1) << "nothing was trained";
  EXPECT_LT(apart / norm_of(reached - start), most) << c10::toString(dtype);
}

TEST(MomentStorage, EveryOptimizerAndDtypeStaysNearFloat) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    expect_near_float<AdamW>(AdamWOptions(1e-2), dtype, 0.1);
    expect_near_float<AdamW>(AdamWOptions(1e-2).amsgrad(true), dtype, 0.1);
    expect_near_float<mezzo::optim::Adam>(mezzo::optim::AdamOptions(1e-2), dtype, 0.1);
    expect_near_float<mezzo::optim::SGD>(mezzo::optim::SGDOptions(0.01).momentum(0.9), dtype, 0.05);
    expect_near_float<mezzo::optim::LAMB>(mezzo::optim::LAMBOptions(1e-2), dtype, 0.1);
    expect_near_float<mezzo::optim::Lion>(mezzo::optim::LionOptions(1e-3), dtype, 0.2);
  }
}

TEST(MomentStorage, CombinesWithEveryWeightStorage) {
  for (const WeightStorage weights :
       {WeightStorage::master, WeightStorage::split_master, WeightStorage::stochastic}) {
    expect_near_float<AdamW>(AdamWOptions(1e-2).weight_storage(weights), at::kBFloat16, 0.1);
    expect_near_float<mezzo::optim::LAMB>(mezzo::optim::LAMBOptions(1e-2).weight_storage(weights),
                                          at::kBFloat16, 0.1);
  }
}

/// bitsandbytes 0.50.2's AdamW8bit on the CPU, beside torch.optim.AdamW 2.11, ends 0.06346 of the
/// way from float's result in these steps (recorded/adamw8bit.py).
TEST(MomentStorage, AThousandStepsEndAsNearToFloatAsBitsandbytes) {
  constexpr int64_t kSize = 8192;
  const at::Tensor start = numbers(kSize, 1);
  const at::Tensor target = numbers(kSize, 2);
  const at::Tensor noise = numbers(8 * kSize, 3).view({8, kSize});
  const auto reached = [&](MomentStorage moments) {
    at::Tensor parameter = start.clone().requires_grad_();
    AdamW optimizer({parameter}, AdamWOptions(1e-3).weight_decay(0.01).moment_storage(moments));
    for (int i = 0; i < 1000; ++i) {
      parameter.mutable_grad() =
          (parameter.detach() - target) + noise[i % 8] * std::pow(4.0, -(i % 5));
      optimizer.step();
    }
    return parameter.detach();
  };
  const at::Tensor wide = reached(MomentStorage::as_weights);
  const double apart = norm_of(reached(MomentStorage::block8) - wide) / norm_of(wide - start);
  EXPECT_LE(apart, 0.0635);
  EXPECT_GT(apart, 0.01) << "these are no moments of 8 bits";
}

bool same_bits(const at::Tensor& left, const at::Tensor& right) {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.detach().contiguous().view(-1).view(at::kByte);
  };
  return left.defined() == right.defined() && left.sizes() == right.sizes() &&
         (!left.defined() || bytes(left).equal(bytes(right)));
}

/// Steps with moments in blocks, and with float moments that are given the values of the codes
/// before each step and are rounded to codes after it.
template <class Optimizer, class Options>
void expect_float_steps_between_roundings(Options options, at::ScalarType dtype,
                                          WeightStorage weights, int moments) {
  options.weight_storage(weights).seed(3);
  for (const at::Tensor& start : {numbers(5003, 1), numbers(6300, 2).view({70, 90}).t(),
                                  numbers(40000, 3).view({8, 50, 10, 10})}) {
    const at::Tensor left = start.to(dtype).clone().requires_grad_();
    const at::Tensor right = start.to(dtype).clone().requires_grad_();
    Optimizer narrow({left}, Options(options).moment_storage(MomentStorage::block8));
    Optimizer wide({right}, Options(options).moment_storage(MomentStorage::float32));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor gradient = numbers(start.numel(), 10 + static_cast<uint64_t>(step));
      gradient.narrow(0, 0, 300).zero_();  // more than a block
      for (const at::Tensor& parameter : {left, right}) {
        parameter.mutable_grad() = gradient.view_as(start).mul(std::pow(10, -step)).to(dtype);
      }
      narrow.step();
      wide.step();
      auto& codes =
          dynamic_cast<mezzo::detail::ParamSlot&>(*narrow.state().at(left.unsafeGetTensorImpl()));
      auto& floats =
          dynamic_cast<mezzo::detail::ParamSlot&>(*wide.state().at(right.unsafeGetTensorImpl()));
      ASSERT_TRUE(same_bits(left, right));
      ASSERT_TRUE(same_bits(codes.master, floats.master));
      ASSERT_TRUE(same_bits(codes.lower_half, floats.lower_half));
      for (int k = 0; k < moments; ++k) {
        const auto own = static_cast<std::size_t>(k);
        const auto rounded = mezzo::detail::in_blocks(floats.moment(k), /*is_signed=*/k == 0);
        ASSERT_TRUE(same_bits(codes.moment(k), rounded.codes)) << k;
        ASSERT_TRUE(same_bits(codes.scales[own], rounded.scales)) << k;
        floats.moment(k).copy_(mezzo::detail::moment_values(codes, k));
      }
    }
  }
}

template <class Optimizer, class Options>
void expect_float_steps_between_roundings(const Options& options, int moments) {
  const auto expect = [&](at::ScalarType dtype, WeightStorage weights) {
    expect_float_steps_between_roundings<Optimizer>(options, dtype, weights, moments);
  };
  expect(at::kFloat, WeightStorage::plain);
  expect(at::kHalf, WeightStorage::plain);
  expect(at::kHalf, WeightStorage::master);
  for (const WeightStorage weights : {WeightStorage::plain, WeightStorage::master,
                                      WeightStorage::split_master, WeightStorage::stochastic}) {
    expect(at::kBFloat16, weights);
  }
}

TEST(MomentStorage, AStepIsThatOfFloatsBetweenRoundings) {
  expect_float_steps_between_roundings<AdamW>(AdamWOptions(1e-2), 2);
  expect_float_steps_between_roundings<AdamW>(AdamWOptions(1e-2).amsgrad(true), 3);
  expect_float_steps_between_roundings<mezzo::optim::SGD>(
      mezzo::optim::SGDOptions(1e-2).momentum(0.9).dampening(0.3), 1);
  expect_float_steps_between_roundings<mezzo::optim::Lion>(mezzo::optim::LionOptions(1e-3), 1);
}

TEST(MomentStorage, HasCodesAndScalesAndShowsValues) {
  Descent run;
  AdamW optimizer({run.parameter}, block8());
  run.steps(optimizer, 3);
  const AdamWParamState& state = state_of(optimizer, run.parameter);
  EXPECT_EQ(state.exp_avg().scalar_type(), at::kByte);
  EXPECT_EQ(state.exp_avg_sq().scalar_type(), at::kByte);
  EXPECT_EQ(state.scales[0].numel(), (kElements + 255) / 256);
  Descent wide;
  AdamW plain({wide.parameter}, AdamWOptions(1e-2));
  wide.steps(plain, 3);
  const AdamWParamState& expected = state_of(plain, wide.parameter);
  for (int k = 0; k < 2; ++k) {
    const at::Tensor values = state.moment_values(k);
    EXPECT_EQ(values.scalar_type(), at::kFloat);
    EXPECT_LT(norm_of(values - expected.moment_values(k)) / norm_of(values), 0.03) << k;
  }
  EXPECT_FALSE(state.moment_values(2).defined());
}

TEST(MomentStorage, SmallParametersKeepFloats) {
  Descent small(at::kBFloat16, {4095});
  AdamW optimizer({small.parameter}, block8().weight_storage(WeightStorage::stochastic));
  small.steps(optimizer, 2);
  EXPECT_EQ(state_of(optimizer, small.parameter).exp_avg().scalar_type(), at::kFloat);
  EXPECT_FALSE(state_of(optimizer, small.parameter).scales[0].defined());
}

TEST(MomentStorage, IsNothingToSgdWithoutMomentum) {
  std::vector<at::Tensor> reached;
  for (const MomentStorage moments :
       {MomentStorage::as_weights, MomentStorage::float32, MomentStorage::block8}) {
    Descent run(at::kBFloat16);
    mezzo::optim::SGD optimizer({run.parameter},
                                mezzo::optim::SGDOptions(0.1).moment_storage(moments));
    run.steps(optimizer, 3);
    reached.push_back(run.parameter.detach());
  }
  EXPECT_TRUE(reached[1].equal(reached[0]));
  EXPECT_TRUE(reached[2].equal(reached[0]));
}

/// Where ATen's kernels take the step, as on CUDA without mezzo's.
TEST(MomentStorage, IsRefusedByAtenOnlyWhereItMakesADifference) {
  for (const int64_t size : {4095, 4096}) {
    for (const MomentStorage moments : {MomentStorage::float32, MomentStorage::block8}) {
      Descent run(at::kFloat, {size});
      run.parameter.mutable_grad() = at::ones({size});
      AdamW optimizer({run.parameter}, AdamWOptions(1e-2).moment_storage(moments));
      const auto step = [&] { optimizer.apply_with_aten(optimizer.plan()); };
      if (size == 4096 && moments == MomentStorage::block8) {
        EXPECT_THAT(step, ThrowsMessage<c10::Error>(HasSubstr("use MomentStorage::as_weights")));
        EXPECT_TRUE(optimizer.state().empty());
      } else {
        step();
        EXPECT_EQ(state_of(optimizer, run.parameter).exp_avg().scalar_type(), at::kFloat);
      }
    }
  }
}

TEST(MomentStorage, RefusesDoubles) {
  Descent run(at::kDouble);
  AdamW optimizer({run.parameter}, block8());
  EXPECT_THAT([&] { run.steps(optimizer, 1); },
              ThrowsMessage<c10::Error>(HasSubstr("MomentStorage::block8 takes parameters of")));
}

TEST(MomentStorage, ASkippedStepLeavesEveryByte) {
  Descent run;
  AdamW optimizer({run.parameter}, block8());
  mezzo::GradScaler scaler;
  run.steps(optimizer, 2);
  const AdamWParamState& state = state_of(optimizer, run.parameter);
  const std::vector<at::Tensor> kept{run.parameter.detach(), state.exp_avg(), state.exp_avg_sq(),
                                     state.scales[0], state.scales[1]};
  std::vector<at::Tensor> before;
  for (const at::Tensor& tensor : kept) before.push_back(tensor.clone());
  (void)scaler.scale(at::zeros({}));
  run.parameter.mutable_grad() = at::full({kElements}, std::numeric_limits<float>::infinity());
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(state.step(), 2);
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(kept[i].equal(before[i])) << i;
}

TEST(MomentStorage, IsTheSameForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> reached;
  for (const int count : {1, 3}) {
    at::set_num_threads(count);
    Descent run(at::kBFloat16, {200, 301});
    AdamW optimizer({run.parameter}, block8().weight_storage(WeightStorage::stochastic).seed(5));
    run.steps(optimizer, 5);
    reached.push_back(run.parameter.detach());
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(reached[0].equal(reached[1]));
}

std::string saved(const AdamW& optimizer) {
  std::ostringstream file;
  torch::save(optimizer, file);
  return file.str();
}

TEST(MomentStorage, AFileGoesOnToTheBit) {
  Descent run(at::kBFloat16);
  const AdamWOptions options = block8().weight_storage(WeightStorage::stochastic).seed(7);
  AdamW optimizer({run.parameter}, options);
  run.steps(optimizer, 5);
  const std::string file = saved(optimizer);
  Descent again(at::kBFloat16);
  {
    const at::NoGradGuard no_grad;
    again.parameter.copy_(run.parameter);
  }
  again.taken = run.taken;
  AdamW resumed({again.parameter}, AdamWOptions(0.5));
  std::istringstream from(file);
  torch::load(resumed, from);
  EXPECT_EQ(static_cast<AdamWOptions&>(resumed.param_groups()[0].options()).moment_storage(),
            MomentStorage::block8);
  EXPECT_EQ(state_of(resumed, again.parameter), state_of(optimizer, run.parameter));
  run.steps(optimizer, 5);
  again.steps(resumed, 5);
  EXPECT_TRUE(again.parameter.equal(run.parameter));
  EXPECT_EQ(state_of(resumed, again.parameter), state_of(optimizer, run.parameter));
}

void set_storage(AdamW& optimizer, MomentStorage moments) {
  static_cast<AdamWOptions&>(optimizer.param_groups()[0].options()).moment_storage(moments);
}

/// Between steps, and so of any file: its options say what it has, and these may be changed.
TEST(MomentStorage, ChangesBetweenSteps) {
  Descent run;
  Descent wide;
  AdamW optimizer({run.parameter}, AdamWOptions(1e-2));
  AdamW plain({wide.parameter}, AdamWOptions(1e-2));
  for (const MomentStorage moments :
       {MomentStorage::as_weights, MomentStorage::block8, MomentStorage::float32,
        MomentStorage::block8, MomentStorage::as_weights}) {
    set_storage(optimizer, moments);
    run.steps(optimizer, 10);
    wide.steps(plain, 10);
    const at::Tensor& moment = state_of(optimizer, run.parameter).exp_avg();
    EXPECT_EQ(moment.scalar_type(), moments == MomentStorage::block8 ? at::kByte : at::kFloat);
    EXPECT_EQ(state_of(optimizer, run.parameter).scales[0].defined(),
              moments == MomentStorage::block8);
  }
  EXPECT_LT(norm_of(run.parameter.detach() - wide.parameter.detach()),
            0.02 * norm_of(run.parameter));
}

TEST(MomentStorage, ConversionsKeepTheValuesOfCodes) {
  Descent run;
  AdamW optimizer({run.parameter}, block8());
  run.steps(optimizer, 3);
  const at::Tensor before = state_of(optimizer, run.parameter).moment_values(1);
  set_storage(optimizer, MomentStorage::as_weights);
  run.parameter.mutable_grad() = at::zeros({kElements});
  optimizer.step();
  const at::Tensor& after = state_of(optimizer, run.parameter).exp_avg_sq();
  EXPECT_TRUE(at::allclose(after, before * 0.999, 1e-6, 0));
}

TEST(MomentStorage, FollowsWeightStorageAndLayout) {
  Descent run(at::kBFloat16, {8, 16, 7, 9});
  AdamW optimizer({run.parameter}, block8().weight_storage(WeightStorage::stochastic));
  run.steps(optimizer, 3);
  const at::Tensor before = state_of(optimizer, run.parameter).moment_values(0);
  run.parameter.set_data(run.parameter.detach().contiguous(at::MemoryFormat::ChannelsLast));
  static_cast<AdamWOptions&>(optimizer.param_groups()[0].options())
      .weight_storage(WeightStorage::master);
  run.parameter.mutable_grad() = at::zeros_like(run.parameter);
  optimizer.step();
  const AdamWParamState& state = state_of(optimizer, run.parameter);
  EXPECT_TRUE(state.exp_avg().is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(state.master().defined());
  // Blocks hold other elements now, and were rounded twice.
  EXPECT_LT(norm_of(state.moment_values(0) - before * 0.9), 0.03 * norm_of(before));
}

TEST(MomentStorage, RefusesCodesWithoutTheirScales) {
  Descent run;
  AdamW optimizer({run.parameter}, block8());
  run.steps(optimizer, 1);
  for (const at::Tensor& wrong : {at::Tensor(), at::zeros({3}), at::zeros({20}, at::kDouble)}) {
    state_of(optimizer, run.parameter).scales[1] = wrong;
    const at::Tensor before = run.parameter.detach().clone();
    EXPECT_THAT([&] { run.steps(optimizer, 1); },
                ThrowsMessage<c10::Error>(HasSubstr("codes and scales do not belong together")));
    EXPECT_TRUE(run.parameter.equal(before));
  }
}

/// libtorch's own optimizer reads the file, and refuses to compute with bytes.
TEST(MomentStorage, LibtorchsOptimizerRefusesTheCodes) {
  Descent run;
  AdamW optimizer({run.parameter}, block8());
  run.steps(optimizer, 1);
  torch::optim::AdamW theirs({run.parameter}, torch::optim::AdamWOptions(1e-2));
  std::istringstream from(saved(optimizer));
  torch::load(theirs, from);
  EXPECT_THROW(theirs.step(), c10::Error);
}

/// The paper's case for embeddings in float: beside a row with large gradients, the second moments
/// of the other rows in its block are rounded to 0, and what is left of their first moments is
/// divided by eps. In a group of its own with float moments the embedding is as in float.
TEST(MomentStorage, AHotRowOfAnEmbeddingNeedsFloatMoments) {
  const auto furthest = [](MomentStorage moments) {
    at::Tensor embedding = at::zeros({64, 64}).requires_grad_();  // four rows a block
    AdamW optimizer({embedding}, AdamWOptions(1e-3).weight_decay(0).moment_storage(moments));
    for (int step = 0; step < 20; ++step) {
      at::Tensor gradient = at::zeros({64, 64});
      gradient[0] = 1.0;
      if (step % 4 == 0) gradient[1] = 1e-5;  // a rare word beside it
      embedding.mutable_grad() = gradient;
      optimizer.step();
    }
    return embedding.detach()[1].abs().max().item().toDouble();
  };
  EXPECT_LT(furthest(MomentStorage::float32), 0.02);
  EXPECT_GT(furthest(MomentStorage::block8), 0.2);
}

}  // namespace
