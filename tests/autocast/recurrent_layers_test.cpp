// The dtypes of recurrent cells and layers, with half and with bfloat16 as the low precision, by
// the CPU's lists and by CUDA's, which a policy gives to the CPU. Cells are on CUDA's lists. Layers
// are cuDNN's there; on the CPU they are not on a list, but made of ops that are.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../support/like_cuda.h"

namespace {

using mezzo::AutocastGuard;
using mezzo::AutocastSetting;
using mezzo::OpPolicy;
using torch::kFloat;
using torch::ScalarType;
using torch::Tensor;

// Apex's sizes: hidden, batch, time.
constexpr int64_t kH = 64;
constexpr int64_t kB = 16;
constexpr int64_t kT = 10;

/// Made once: it edits some two hundred ops.
const OpPolicy& cuda_like() {
  static const OpPolicy policy = mezzo::install_op_overrides(test_support::like_cuda());
  return policy;
}

class Recurrent : public testing::TestWithParam<ScalarType> {
 protected:
  Recurrent() { torch::manual_seed(1); }

  static ScalarType lower() { return GetParam(); }
  static AutocastSetting setting(const mezzo::PolicyRef& policy = {}) {
    return {.device = torch::kCPU, .dtype = lower(), .policy = policy};
  }
  static std::vector<ScalarType> dtypes() { return {kFloat, lower()}; }
};

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

TEST_P(Recurrent, CellsAreCastToLowerPrecision) {
  expect_lower_cell<torch::nn::RNNCell>(setting(cuda_like()));
  expect_lower_cell<torch::nn::GRUCell>(setting(cuda_like()));
  expect_lower_cell<torch::nn::LSTMCell>(setting(cuda_like()));
}

/// By libtorch's own lists for the CPU only the plain cell is: the others' gates are float's, as
/// their state is.
TEST_P(Recurrent, GruAndLstmCellsByTheCpusListsFollowTheirState) {
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

TEST_P(Recurrent, LayersAreCastToLowerPrecision) {
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
TEST_P(Recurrent, GruLayersOnTheCpuFollowTheirState) {
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
TEST_P(Recurrent, LstmLayersAreCastToLowerPrecisionWhereOneDnnHasIt) {
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

TEST_P(Recurrent, PackedSequencesAreCastToLowerPrecision) {
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

INSTANTIATE_TEST_SUITE_P(Dtypes, Recurrent, testing::Values(torch::kHalf, torch::kBFloat16),
                         [](const auto& dtype) { return std::string(toString(dtype.param)); });

}  // namespace
