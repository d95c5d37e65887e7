// AdamW8bit compared with float32 moments, bitsandbytes and AdamW; its state and archives.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "../support/get_param_state.h"

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamW8bit;
using mezzo::optim::AdamW8bitParamState;
using mezzo::optim::AdamW8bitStateOptions;
using test_support::get_param_state;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kElements = 5000;  // not a multiple of a block

/// Values in [-1, 1), as data/adamw8bit.py computes them.
at::Tensor make_values(int64_t count, uint64_t state) {
  const at::Tensor all = at::empty({count});
  for (int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    all.mutable_data_ptr<float>()[i] =
        static_cast<float>(static_cast<double>(state >> 40) / (1 << 23) - 1);
  }
  return all;
}

double get_norm(const at::Tensor& tensor) {
  return tensor.to(at::kDouble).norm().item().toDouble();
}

/// A parameter that descends to a target, with periodic gradients.
struct Descent {
  explicit Descent(at::ScalarType dtype = at::kFloat, at::IntArrayRef sizes = {kElements})
      : parameter(
            make_values(c10::multiply_integers(sizes), 1).view(sizes).to(dtype).requires_grad_()),
        target(make_values(parameter.numel(), 2).view(sizes)),
        noise(make_values(parameter.numel(), 3).view(sizes)) {}

  void set_grad() {
    const at::Tensor gradient =
        (parameter.detach().to(at::kFloat) - target) + noise * std::pow(0.5, taken % 5);
    parameter.mutable_grad() = gradient.to(parameter.scalar_type());
    ++taken;
  }

  void steps(torch::optim::Optimizer& optimizer, int count) {
    for (int i = 0; i < count; ++i) {
      set_grad();
      optimizer.step();
    }
  }

  at::Tensor parameter, target, noise;
  int taken = 0;
};

bool is_equal(const at::Tensor& left, const at::Tensor& right) {
  return left.defined() == right.defined() && (!left.defined() || left.equal(right));
}

void expect_same_state(const AdamW8bitParamState& left, const AdamW8bitParamState& right) {
  EXPECT_EQ(left.step(), right.step());
  EXPECT_TRUE(is_equal(left.exp_avg(), right.exp_avg()));
  EXPECT_TRUE(is_equal(left.exp_avg_sq(), right.exp_avg_sq()));
  EXPECT_TRUE(is_equal(left.exp_avg_absmax(), right.exp_avg_absmax()));
  EXPECT_TRUE(is_equal(left.exp_avg_sq_absmax(), right.exp_avg_sq_absmax()));
}

TEST(AdamW8bit, ConvergesLikeFloat32Moments) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Descent wide(dtype);
    Descent narrow(dtype);
    AdamW8bit in_float({wide.parameter}, {1e-2}, {.params_with_fp32_state = {wide.parameter}});
    AdamW8bit in_blocks({narrow.parameter}, {1e-2});
    const at::Tensor start = wide.parameter.detach().to(at::kFloat).clone();
    wide.steps(in_float, 200);
    narrow.steps(in_blocks, 200);
    const at::Tensor reached = wide.parameter.detach().to(at::kFloat);
    const double apart = get_norm(narrow.parameter.detach().to(at::kFloat) - reached);
    EXPECT_GT(get_norm(reached - start), 1) << "nothing was trained";
    EXPECT_LT(apart / get_norm(reached - start), 0.1) << c10::toString(dtype);
  }
}

/// Relative to the distance from the start, bitsandbytes 0.50.2's AdamW8bit on the CPU ends 0.06346
/// from torch.optim.AdamW 2.11 (data/adamw8bit.py).
TEST(AdamW8bit, MatchesBitsandbytesErrorAfter1000Steps) {
  constexpr int64_t kSize = 8192;
  const at::Tensor start = make_values(kSize, 1);
  const at::Tensor target = make_values(kSize, 2);
  const at::Tensor noise = make_values(8 * kSize, 3).view({8, kSize});
  const auto reached = [&](const auto& make) {
    at::Tensor parameter = start.clone().requires_grad_();
    auto optimizer = make(parameter);
    for (int i = 0; i < 1000; ++i) {
      parameter.mutable_grad() =
          (parameter.detach() - target) + noise[i % 8] * std::pow(4.0, -(i % 5));
      optimizer.step();
    }
    return parameter.detach();
  };
  const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.01);
  const at::Tensor wide = reached(
      [&](const at::Tensor& parameter) { return torch::optim::AdamW({parameter}, options); });
  const at::Tensor narrow =
      reached([&](const at::Tensor& parameter) { return AdamW8bit({parameter}, options); });
  const double apart = get_norm(narrow - wide) / get_norm(wide - start);
  EXPECT_LE(apart, 0.0635);
  EXPECT_GT(apart, 0.01) << "the moments are not 8-bit";
}

/// float32 parameters with float32 moments are bitwise identical to mezzo's AdamW.
TEST(AdamW8bit, Float32MomentsMatchAdamW) {
  Descent left(at::kFloat, {70, 90});
  Descent right(at::kFloat, {70, 90});
  AdamW8bit own({left.parameter}, torch::optim::AdamWOptions(1e-2).weight_decay(0.1),
                {.params_with_fp32_state = {left.parameter}});
  AdamW fused({right.parameter}, mezzo::optim::AdamWOptions(1e-2).weight_decay(0.1));
  left.steps(own, 10);
  right.steps(fused, 10);
  EXPECT_TRUE(left.parameter.equal(right.parameter));
}

TEST(AdamW8bit, StateHoldsQuantizedMomentsAndAbsmax) {
  Descent run;
  AdamW8bit optimizer({run.parameter}, {1e-2});
  run.steps(optimizer, 3);
  const AdamW8bitParamState& state = get_param_state<AdamW8bitParamState>(optimizer, run.parameter);
  EXPECT_EQ(state.exp_avg().scalar_type(), at::kByte);
  EXPECT_EQ(state.exp_avg_sq().scalar_type(), at::kByte);
  EXPECT_EQ(state.exp_avg_absmax().numel(), (kElements + 255) / 256);
  EXPECT_EQ(state.exp_avg_sq_absmax().numel(), (kElements + 255) / 256);
  EXPECT_EQ(state.step(), 3);
}

/// Gradients with other strides than the parameter's, and float32 gradients of bfloat16 parameters.
TEST(AdamW8bit, AcceptsAnyStridesAndFloat32Gradients) {
  const at::Tensor start = make_values(40000, 3).view({8, 50, 10, 10}).to(at::kBFloat16);
  std::vector<at::Tensor> reached;
  for (const auto& [layout, dtype] : std::vector<std::pair<at::MemoryFormat, at::ScalarType>>{
           {at::MemoryFormat::ChannelsLast, at::kBFloat16},
           {at::MemoryFormat::Contiguous, at::kBFloat16},
           {at::MemoryFormat::ChannelsLast, at::kFloat}}) {
    at::Tensor parameter = start.contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
    AdamW8bit optimizer({parameter}, {1e-2});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor gradient =
          make_values(40000, 5).view_as(start).to(at::kBFloat16).to(dtype).contiguous(layout);
      parameter.set_grad_dtype(dtype);
      parameter.mutable_grad() = gradient;
      optimizer.step();
    }
    reached.push_back(parameter.detach());
  }
  EXPECT_TRUE(reached[1].equal(reached[0]));
  EXPECT_TRUE(reached[2].equal(reached[0]));
  EXPECT_FALSE(reached[0].equal(start));
}

TEST(AdamW8bit, SmallAndNamedParamsUseFloat32) {
  for (const bool has_fp32_state : {false, true}) {
    Descent run(at::kBFloat16, {has_fp32_state ? 5000 : 4095});
    AdamW8bitStateOptions options;
    if (has_fp32_state) options.params_with_fp32_state = {run.parameter};
    AdamW8bit optimizer({run.parameter}, {1e-2}, options);
    run.steps(optimizer, 2);
    EXPECT_EQ(
        get_param_state<AdamW8bitParamState>(optimizer, run.parameter).exp_avg().scalar_type(),
        at::kFloat);
    EXPECT_FALSE(
        get_param_state<AdamW8bitParamState>(optimizer, run.parameter).exp_avg_absmax().defined());
  }
}

TEST(AdamW8bit, ThrowsForUnknownFloat32Param) {
  const std::vector<at::Tensor> x{at::ones({1})};
  EXPECT_THAT([&] { AdamW8bit(x, {1e-3}, {.params_with_fp32_state = {at::ones({1})}}); },
              ThrowsMessage<c10::Error>(HasSubstr("params_with_fp32_state[0] is not a parameter")));
}

TEST(AdamW8bit, ThrowsForUnsupportedParamBeforeWriting) {
  Descent good;
  const auto expect_error = [&](const at::Tensor& bad, const at::Tensor& gradient,
                                const char* message) {
    AdamW8bit optimizer({good.parameter, bad}, {1e-2});
    good.set_grad();
    const at::Tensor before = good.parameter.detach().clone();
    bad.mutable_grad() = gradient;
    EXPECT_THAT([&] { optimizer.step(); }, ThrowsMessage<c10::Error>(HasSubstr(message)));
    EXPECT_TRUE(good.parameter.equal(before));
    EXPECT_TRUE(optimizer.state().empty());
  };
  const char* const dtypes = "supports float32 and bfloat16 parameters";
  expect_error(at::ones({3}, at::kDouble), at::ones({3}, at::kDouble), dtypes);
  expect_error(at::ones({3}, at::kHalf), at::ones({3}, at::kHalf), dtypes);
  expect_error(at::ones({3}), at::ones({3}).to_sparse(), "does not support sparse gradients");
  expect_error(at::ones({3, 4}).slice(1, 0, 2), at::ones({3, 2}),
               "has non-contiguous or overlapping storage");
}

TEST(AdamW8bit, ThrowsForMalformedState) {
  using State = AdamW8bitParamState;
  const std::function<void(State&)> forms[] = {
      [](State& state) { state.exp_avg(state.exp_avg().to(at::kFloat)); },
      [](State& state) { state.exp_avg(state.exp_avg().t().contiguous().t()); },
      [](State& state) { state.exp_avg(at::Tensor()); },
      [](State& state) { state.exp_avg_sq(at::zeros({3}, at::kByte)); },
      [](State& state) {
        state.exp_avg(state.exp_avg().to(at::kFloat));
        state.exp_avg_absmax(at::Tensor());
      },
      [](State& state) { state.exp_avg_sq_absmax(at::Tensor()); },
      [](State& state) { state.exp_avg_sq_absmax(at::zeros({3})); },
      [](State& state) { state.exp_avg_sq_absmax(state.exp_avg_sq_absmax().to(at::kDouble)); }};
  for (const auto& corrupt : forms) {
    Descent run(at::kFloat, {70, 90});
    AdamW8bit optimizer({run.parameter}, {1e-2});
    run.steps(optimizer, 1);
    corrupt(get_param_state<State>(optimizer, run.parameter));
    const at::Tensor before = run.parameter.detach().clone();
    EXPECT_THAT([&] { run.steps(optimizer, 1); },
                ThrowsMessage<c10::Error>(HasSubstr("load the optimizer's archive")));
    EXPECT_TRUE(run.parameter.equal(before));
  }
}

TEST(AdamW8bit, BitwiseIdenticalAcrossThreadCounts) {
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> reached;
  for (const int count : {1, 3}) {
    at::set_num_threads(count);
    Descent run(at::kBFloat16, {200, 301});
    AdamW8bit optimizer({run.parameter}, {1e-2}, {.seed = 5});
    run.steps(optimizer, 5);
    reached.push_back(run.parameter.detach());
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(reached[0].equal(reached[1]));
}

TEST(AdamW8bit, ResumesBitwiseFromArchive) {
  Descent run(at::kBFloat16);
  AdamW8bit optimizer({run.parameter}, {1e-2}, {.seed = 7});
  run.steps(optimizer, 5);
  std::stringstream file;
  torch::save(optimizer, file);
  Descent again(at::kBFloat16);
  {
    const at::NoGradGuard no_grad;
    again.parameter.copy_(run.parameter);
  }
  again.taken = run.taken;
  AdamW8bit resumed({again.parameter}, {0.5});
  torch::load(resumed, file);
  EXPECT_EQ(resumed.param_groups()[0].options().get_lr(), 1e-2);
  expect_same_state(get_param_state<AdamW8bitParamState>(resumed, again.parameter),
                    get_param_state<AdamW8bitParamState>(optimizer, run.parameter));
  run.steps(optimizer, 5);
  again.steps(resumed, 5);
  EXPECT_TRUE(again.parameter.equal(run.parameter));
  expect_same_state(get_param_state<AdamW8bitParamState>(resumed, again.parameter),
                    get_param_state<AdamW8bitParamState>(optimizer, run.parameter));
}

TEST(AdamW8bit, BumpsVersionCounters) {
  Descent run;
  AdamW8bit optimizer({run.parameter}, {1e-2});
  const auto before = run.parameter._version();
  run.steps(optimizer, 1);
  EXPECT_GT(run.parameter._version(), before);
}

/// Why the paper uses float32 state for embeddings: in the block of a row with large gradients,
/// second moments of other rows are quantized to 0, and their first moments are divided by eps.
TEST(AdamW8bit, LargeEmbeddingRowNeedsFloat32Moments) {
  const auto furthest = [](bool in_float) {
    at::Tensor embedding = at::zeros({64, 64}).requires_grad_();  // four rows per block
    AdamW8bitStateOptions own;
    if (in_float) own.params_with_fp32_state = {embedding};
    AdamW8bit optimizer({embedding}, torch::optim::AdamWOptions(1e-3).weight_decay(0), own);
    for (int step = 0; step < 20; ++step) {
      at::Tensor gradient = at::zeros({64, 64});
      gradient[0] = 1.0;
      if (step % 4 == 0) gradient[1] = 1e-5;  // a rare word in the same block
      embedding.mutable_grad() = gradient;
      optimizer.step();
    }
    return embedding.detach()[1].abs().max().item().toDouble();
  };
  EXPECT_LT(furthest(true), 0.02);
  EXPECT_GT(furthest(false), 0.2);
}

}  // namespace
