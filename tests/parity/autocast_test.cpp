// Apex's tests of casts (basic_casts, promotion, cache, rnn) and torch's of its autocast, on the
// CPU, with half and with bfloat16 as the low precision. Apex's lists are CUDA's, which a policy
// gives to the CPU.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../support/like_cuda.h"

namespace {

namespace F = torch::nn::functional;
using mezzo::AutocastGuard;
using mezzo::AutocastSetting;
using mezzo::OpPolicy;
using torch::kFloat;
using torch::ScalarType;
using torch::Tensor;

// Apex's sizes: hidden, batch, channels, kernel, time.
constexpr int64_t kH = 64;
constexpr int64_t kB = 16;
constexpr int64_t kC = 16;
constexpr int64_t kK = 3;
constexpr int64_t kT = 10;

/// Made once: it edits some two hundred ops.
const OpPolicy& cuda_like() {
  static const OpPolicy policy = mezzo::install_op_overrides(test_support::like_cuda());
  return policy;
}

class Casts : public testing::TestWithParam<ScalarType> {
 protected:
  Casts() { torch::manual_seed(1); }

  static ScalarType lower() { return GetParam(); }
  static AutocastSetting setting(const mezzo::PolicyRef& policy = {}) {
    return {.device = torch::kCPU, .dtype = lower(), .policy = policy};
  }
  static std::vector<ScalarType> dtypes() { return {kFloat, lower()}; }

  enum class Expected { lower, full, as_input };
  using Function = std::function<Tensor(const Tensor&)>;

  /// Results have the dtype that is expected of each input's, and gradients the input's.
  static void expect(Expected expected, const std::vector<Function>& functions,
                     torch::IntArrayRef shape, bool backward = true) {
    for (const Function& function : functions) {
      for (const ScalarType dtype : dtypes()) {
        const auto x = torch::rand(shape).to(dtype).requires_grad_();
        Tensor y;
        {
          const AutocastGuard autocast(setting(cuda_like()));
          y = function(x);
        }
        const auto wanted = expected == Expected::lower  ? lower()
                            : expected == Expected::full ? kFloat
                                                         : dtype;
        EXPECT_EQ(y.scalar_type(), wanted) << dtype;
        if (!backward) continue;
        y.to(kFloat).sum().backward();
        EXPECT_EQ(x.grad().scalar_type(), dtype);
      }
    }
  }
};

TEST_P(Casts, OfLinearAndConvolutionAreToLowerPrecision) {
  torch::nn::Linear linear(kH, kH);
  expect(Expected::lower,
         {[&](const Tensor& x) { return linear(x); },
          [&](const Tensor& x) { return F::linear(x, linear->weight, linear->bias); }},
         {kB, kH});
  torch::nn::Conv2d convolution(torch::nn::Conv2dOptions(kC, kC, kK));
  expect(Expected::lower,
         {[&](const Tensor& x) { return convolution(x); },
          [&](const Tensor& x) {
            return F::conv2d(x, convolution->weight,
                             F::Conv2dFuncOptions().bias(convolution->bias));
          }},
         {kB, kC, kH, kH});
}

TEST_P(Casts, OfMatmulAreToLowerPrecisionOnEitherSide) {
  const auto other = torch::randn({kH, kH});
  expect(Expected::lower,
         {[&](const Tensor& x) { return x.matmul(other); },
          [&](const Tensor& x) { return torch::matmul(other, x); }},
         {kH, kH});
}

TEST_P(Casts, OfSoftmaxNormalizationLossPowerAndSumAreToFloat) {
  const auto target = torch::randn({kB, kH});
  torch::nn::Softmax softmax(1);
  expect(Expected::full,
         {[&](const Tensor& x) { return softmax(x); },
          [](const Tensor& x) { return F::softmax(x, F::SoftmaxFuncOptions(1)); },
          [&](const Tensor& x) { return torch::nn::MSELoss()(x, target); },
          [&](const Tensor& x) { return F::mse_loss(x, target); },
          [](const Tensor& x) { return x.pow(2.0); }, [](const Tensor& x) { return x.sum(); }},
         {kB, kH});
  torch::nn::GroupNorm group_norm(torch::nn::GroupNormOptions(4, kC));
  expect(Expected::full, {[&](const Tensor& x) { return group_norm(x); }}, {kB, kC, kH, kH});
}

TEST_P(Casts, OfReluAndBatchNormAreNone) {
  expect(Expected::as_input,
         {[](const Tensor& x) { return torch::nn::ReLU()(x); },
          [](const Tensor& x) { return F::relu(x); }},
         {kB, kH});
  torch::nn::BatchNorm2d batch_norm(kC);
  expect(Expected::as_input, {[&](const Tensor& x) { return batch_norm(x); }}, {kB, kC, kH, kH});
  batch_norm->eval();
  expect(Expected::as_input,
         {[&](const Tensor& x) { return batch_norm(x); },
          [&](const Tensor& x) {
            return F::batch_norm(
                x, batch_norm->running_mean, batch_norm->running_var,
                F::BatchNormFuncOptions().weight(batch_norm->weight).bias(batch_norm->bias));
          }},
         {kB, kC, kH, kH}, /*backward=*/false);
}

/// Apex's `.cpu()` gives float; a move to a device casts nothing in libtorch.
TEST_P(Casts, AreNoneInAMoveToADevice) {
  expect(Expected::as_input, {[](const Tensor& x) { return x.cpu(); }}, {kB, kH});
}

TEST_P(Casts, OfBinaryCrossEntropyAreToFloatWhereItIsDenied) {
  const auto target = torch::rand({kB, kH});
  const auto x = torch::rand({kB, kH}).to(lower());
  const AutocastGuard autocast(setting(cuda_like()));
  EXPECT_EQ(torch::nn::BCELoss()(x, target).scalar_type(), kFloat);
  EXPECT_EQ(F::binary_cross_entropy(x, target).scalar_type(), kFloat);
}

using Binary = std::function<Tensor(Tensor, const Tensor&)>;

TEST_P(Casts, PromoteBinaryOpsToTheWidest) {
  const std::vector<std::pair<Binary, bool>> functions{
      {[](Tensor x, const Tensor& y) { return torch::atan2(x, y); }, false},
      {[](Tensor x, const Tensor& y) { return x.atan2(y); }, false},
      {[](Tensor x, const Tensor& y) { return torch::mul(x, y); }, false},
      {[](Tensor x, const Tensor& y) { return x.mul(y); }, false},
      {[](Tensor x, const Tensor& y) { return x.add_(y); }, true}};
  for (const auto& policy : {OpPolicy(), cuda_like()}) {
    const AutocastGuard autocast(setting(policy));
    for (const auto& [function, in_place] : functions) {
      for (const ScalarType of_x : dtypes()) {
        for (const ScalarType of_y : dtypes()) {
          const auto leaf = torch::randn({kB}).to(of_x).requires_grad_();
          const auto out = function(in_place ? leaf.clone() : leaf, torch::randn({kB}).to(of_y));
          const bool is_float = in_place ? of_x == kFloat : of_x == kFloat || of_y == kFloat;
          EXPECT_EQ(out.scalar_type(), is_float ? kFloat : lower());
          out.to(kFloat).sum().backward();
          EXPECT_EQ(leaf.grad().scalar_type(), of_x);
        }
      }
    }
  }
}

TEST_P(Casts, PromoteCatToTheWidest) {
  const AutocastGuard autocast(setting());
  std::vector<Tensor> all(5, torch::randn({kB}).to(lower()));
  all.push_back(torch::randn({kB}));
  EXPECT_EQ(torch::cat(all).scalar_type(), kFloat);
  all.back() = all.back().to(lower());
  EXPECT_EQ(torch::cat(all).scalar_type(), lower());
}

/// Apex makes an error of exp_ on half. libtorch's autocast leaves in-place ops alone.
TEST_P(Casts, AreNoneInPlace) {
  const AutocastGuard autocast(setting(cuda_like()));
  for (const ScalarType dtype : dtypes()) {
    EXPECT_EQ(torch::randn({kB}).to(dtype).exp_().scalar_type(), dtype);
  }
}

// test_cache: training, evaluation without gradients, training again; the weight moves between.

struct CachedOps {
  std::string name;
  std::vector<int64_t> shape;
  std::function<Tensor(const Tensor& input, const Tensor& weight)> run;
};

void expect_right_gradients(const CachedOps& ops, ScalarType of_weight,
                            const AutocastSetting& setting) {
  const auto x = torch::ones({2, 8});
  const auto weight =
      torch::arange(ops.shape[0] * ops.shape[1]).view(ops.shape).to(of_weight).requires_grad_();
  torch::optim::SGD optimizer({weight}, 1.0);
  mezzo::GradScaler scaler({.init_scale = 4, .allow_fp16_gradients = true});
  const auto loss_of = [&] {
    const AutocastGuard autocast(setting);
    return ops.run(x, weight);
  };
  const auto train = [&](const char* when) {
    weight.mutable_grad() = Tensor();
    scaler.scale(loss_of().to(kFloat)).backward();
    scaler.unscale_(optimizer);
    EXPECT_EQ(weight.grad().scalar_type(), of_weight);
    const auto reference = weight.detach().to(kFloat).requires_grad_();
    ops.run(x, reference).backward();
    const double tolerance =
        setting.dtype == torch::kBFloat16 || of_weight == torch::kBFloat16 ? 1.6e-2 : 1e-3;
    EXPECT_TRUE(torch::allclose(weight.grad().to(kFloat), reference.grad(), tolerance, 1e-5))
        << ops.name << ' ' << of_weight << ' ' << when;
    scaler.update();
    weight.data().sub_(1.0);
  };
  train("in the first epoch");
  {
    const torch::NoGradGuard no_grad;
    loss_of();
  }
  train("after the evaluation");
}

TEST_P(Casts, InLibtorchsCacheGiveRightGradientsAfterAnEvaluation) {
  const std::vector<CachedOps> all{
      {"whitelist", {8, 8}, [](const Tensor& x, const Tensor& w) { return x.mm(w).mm(w).sum(); }},
      {"blacklist",
       {2, 8},
       [](const Tensor& x, const Tensor& w) { return (x + w.pow(2) + w.pow(2)).sum(); }},
      {"promote", {2, 8}, [](const Tensor& x, const Tensor& w) { return (x * w * w).sum(); }}};
  for (const CachedOps& ops : all) {
    for (const ScalarType of_weight : dtypes()) {
      expect_right_gradients(ops, of_weight, setting(cuda_like()));
    }
  }
}

// test_rnn. Cells are on CUDA's lists. Layers are cuDNN's there; on the CPU they are not on a list,
// but made of ops that are.

template <class Cell>
Tensor run_cell(Cell& cell, const std::vector<Tensor>& inputs, const Tensor& zeros,
                ScalarType expected) {
  Tensor output;
  if constexpr (std::is_same_v<Cell, torch::nn::LSTMCell>) {
    auto state = std::make_tuple(zeros, zeros);
    for (const auto& x : inputs) {
      state = cell(x, state);
      output = std::get<0>(state);
      EXPECT_EQ(output.scalar_type(), expected);
    }
  } else {
    output = zeros;
    for (const auto& x : inputs) {
      output = cell(x, output);
      EXPECT_EQ(output.scalar_type(), expected);
    }
  }
  return output;
}

template <class Cell>
void expect_lower_cell(const AutocastSetting& setting) {
  Cell cell(kH, kH);
  for (const ScalarType dtype : {kFloat, *setting.dtype}) {
    std::vector<Tensor> inputs;
    for (int64_t i = 0; i < kT; ++i) {
      inputs.push_back(torch::randn({kB, kH}).to(dtype).requires_grad_());
    }
    Tensor output;
    {
      const AutocastGuard autocast(setting);
      output = run_cell(cell, inputs, torch::zeros({kB, kH}, dtype), *setting.dtype);
    }
    output.to(kFloat).sum().backward();
    for (const auto& x : inputs) EXPECT_EQ(x.grad().scalar_type(), dtype);
  }
}

TEST_P(Casts, OfRecurrentCellsAreToLowerPrecision) {
  expect_lower_cell<torch::nn::RNNCell>(setting(cuda_like()));
  expect_lower_cell<torch::nn::GRUCell>(setting(cuda_like()));
  expect_lower_cell<torch::nn::LSTMCell>(setting(cuda_like()));
}

/// By libtorch's own lists for the CPU only the plain cell is: the others' gates are float's, as
/// their state is.
TEST_P(Casts, OfGruAndLstmCellsByTheCpusListsFollowTheirState) {
  const AutocastGuard autocast(setting());
  const auto x = torch::randn({kB, kH});
  const auto h = torch::zeros({kB, kH});
  EXPECT_EQ(torch::nn::RNNCell(kH, kH)(x, h).scalar_type(), lower());
  EXPECT_EQ(torch::nn::GRUCell(kH, kH)(x, h).scalar_type(), kFloat);
  EXPECT_EQ(std::get<0>(torch::nn::LSTMCell(kH, kH)(x, std::make_tuple(h, h))).scalar_type(),
            kFloat);
}

struct LayerShape {
  int64_t layers;
  bool bidirectional;
};

constexpr LayerShape kLayerShapes[] = {{1, false}, {2, false}, {2, true}};

/// One layer stack on an input of `dtype`: the dtype of what comes out, and that gradients come
/// back in the input's.
template <class Layers, class Options, class State>
ScalarType dtype_of_layers(const Options& options, const LayerShape& shape, ScalarType dtype,
                           const State& state_of, const AutocastSetting& setting) {
  auto each = options;
  Layers layers(each.num_layers(shape.layers).bidirectional(shape.bidirectional));
  const auto x = torch::randn({kT, kB, kH}).to(dtype).requires_grad_();
  const auto zeros = torch::zeros({shape.layers * (shape.bidirectional ? 2 : 1), kB, kH}, dtype);
  Tensor output;
  {
    const AutocastGuard autocast(setting);
    output = std::get<0>(layers(x, state_of(zeros)));
  }
  output[-1].to(kFloat).sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), dtype);
  return output.scalar_type();
}

TEST_P(Casts, OfRecurrentLayersAreToLowerPrecision) {
  const auto as_is = [](const Tensor& zeros) { return zeros; };
  const auto options = torch::nn::RNNOptions(kH, kH).nonlinearity(torch::kReLU);
  for (const LayerShape& shape : kLayerShapes) {
    for (const ScalarType dtype : dtypes()) {
      EXPECT_EQ(
          (dtype_of_layers<torch::nn::RNN>(options, shape, dtype, as_is, setting(cuda_like()))),
          lower());
    }
  }
}

/// Unlike on CUDA: on the CPU a GRU's gates promote to its state's dtype.
TEST_P(Casts, OfGruLayersOnTheCpuFollowTheirState) {
  const auto as_is = [](const Tensor& zeros) { return zeros; };
  for (const LayerShape& shape : kLayerShapes) {
    for (const ScalarType dtype : dtypes()) {
      EXPECT_EQ((dtype_of_layers<torch::nn::GRU>(torch::nn::GRUOptions(kH, kH), shape, dtype, as_is,
                                                 setting(cuda_like()))),
                dtype);
    }
  }
}

/// By the CPU's own lists, which have oneDNN's layer. oneDNN has an LSTM of bfloat16 on every
/// machine, and one of half only on some: elsewhere it says so.
TEST_P(Casts, OfLstmLayersAreToLowerPrecisionWhereOneDnnHasIt) {
  const auto twice = [](const Tensor& zeros) { return std::make_tuple(zeros, zeros); };
  for (const LayerShape& shape : kLayerShapes) {
    for (const ScalarType dtype : dtypes()) {
      try {
        EXPECT_EQ((dtype_of_layers<torch::nn::LSTM>(torch::nn::LSTMOptions(kH, kH), shape, dtype,
                                                    twice, setting())),
                  lower());
      } catch (const std::exception& error) {
        EXPECT_EQ(lower(), torch::kHalf) << error.what();
        EXPECT_NE(std::string(error.what()).find("primitive"), std::string::npos) << error.what();
      }
    }
  }
}

TEST_P(Casts, OfAPackedSequenceAreToLowerPrecision) {
  torch::nn::RNN layers(torch::nn::RNNOptions(kH, kH).num_layers(2));
  for (const ScalarType dtype : dtypes()) {
    const auto x = torch::randn({kT, kB, kH}).to(dtype).requires_grad_();
    const auto lengths =
        std::get<0>(torch::randint(kT / 2, kT + 1, {kB}).to(torch::kLong).sort(0, true));
    Tensor output;
    {
      const AutocastGuard autocast(setting(cuda_like()));
      const auto packed = torch::nn::utils::rnn::pack_padded_sequence(x, lengths);
      output =
          std::get<0>(layers->forward_with_packed_input(packed, torch::zeros({2, kB, kH}, dtype)))
              .data();
    }
    EXPECT_EQ(output.scalar_type(), lower());
    output.to(kFloat).sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Apexs, Casts, testing::Values(torch::kHalf, torch::kBFloat16),
                         [](const auto& dtype) { return std::string(toString(dtype.param)); });

// torch's TestAutocastDeviceType.

/// A 2 by 2 linear layer.
class GradModes : public testing::Test {
 protected:
  AutocastGuard region() const { return AutocastGuard(torch::kCPU, torch::kBFloat16); }
  void expect_gradients() const {
    EXPECT_TRUE(model_->weight.grad().defined());
    EXPECT_TRUE(model_->bias.grad().defined());
  }

  mutable torch::nn::Linear model_{2, 2};
  Tensor input_ = torch::randn({8, 2});
};

TEST_F(GradModes, GradientsComeBackAfterNoGradInsideARegion) {
  Tensor loss;
  {
    const auto autocast = region();
    {
      const torch::NoGradGuard no_grad;
      EXPECT_FALSE(model_(input_).requires_grad());
    }
    loss = model_(input_).mean();
    {
      const torch::NoGradGuard no_grad;
      EXPECT_FALSE(model_(input_).requires_grad());
    }
    loss = loss + model_(input_).mean();
    EXPECT_TRUE(loss.requires_grad());
  }
  loss.backward();
  expect_gradients();
}

TEST_F(GradModes, InferenceModeMayBeInsideARegionAndAroundIt) {
  Tensor loss;
  {
    const auto autocast = region();
    {
      const c10::InferenceMode inference;
      const auto out = model_(input_);
      EXPECT_FALSE(out.requires_grad());
      EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
    }
    loss = model_(input_).mean();
    EXPECT_TRUE(loss.requires_grad());
  }
  loss.backward();
  expect_gradients();
  const c10::InferenceMode inference;
  const auto autocast = region();
  const auto out = model_(input_);
  EXPECT_FALSE(out.requires_grad());
  EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
}

TEST_F(GradModes, AWeightThatIsCachedGoesThroughSeveralBackwardPasses) {
  std::vector<Tensor> outs;
  {
    const auto autocast = region();
    for (int i = 0; i < 3; ++i) outs.push_back(model_(input_));
  }
  for (const auto& out : outs) {
    EXPECT_TRUE(out.requires_grad());
    out.mean().backward({}, /*retain_graph=*/true);
  }
  expect_gradients();
}

TEST(TorchAutocast, IndexPutTakesItsInputsDtypes) {
  const auto t = torch::randn({3, 4, 5}, torch::kBFloat16).requires_grad_();
  Tensor loss;
  {
    const mezzo::Autocast<torch::kCPU> autocast;
    const auto value = torch::randn({1}, torch::kBFloat16);
    loss = torch::index_put(t, {torch::randint(0, 3, {3, 4, 5}, torch::kLong)}, value).mean();
  }
  loss.backward();
  EXPECT_EQ(t.grad().scalar_type(), torch::kBFloat16);
}

TEST(TorchAutocast, LeavesDoubleAndIntegersAlone) {
  const mezzo::Autocast<torch::kCPU, torch::kHalf> autocast({.policy = cuda_like()});
  const auto half = torch::ones({8, 8}, torch::kHalf);
  for (const ScalarType ignored : {torch::kDouble, torch::kInt}) {
    const auto a = torch::ones({8, 8}, ignored);
    if (ignored == torch::kDouble) {
      EXPECT_THROW(torch::mm(a, half), c10::Error);
      EXPECT_EQ(torch::mm(a, a).scalar_type(), torch::kDouble);
      EXPECT_EQ(torch::norm(a).scalar_type(), torch::kDouble);
    }
    EXPECT_EQ(torch::pow(a, 2.0).scalar_type(), ignored == torch::kInt ? kFloat : ignored);
    EXPECT_EQ(torch::sum(a).scalar_type(), ignored == torch::kInt ? torch::kLong : ignored);
  }
}

TEST(TorchAutocast, TakesADisabledRegionOfAnyDtypeThatAutocastHas) {
  const AutocastGuard autocast({.device = torch::kCPU, .dtype = torch::kHalf, .enabled = false});
  EXPECT_EQ(torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type(), kFloat);
  EXPECT_THROW(AutocastGuard({.device = torch::kCPU, .dtype = torch::kInt, .enabled = false}),
               c10::Error);
}

}  // namespace
