// Gradients are those of plain at::autocast: of its cache where each weight is used once, and of
// its casts without cache, one a use, everywhere.

#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>

#include <torch/csrc/autograd/forward_grad.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace {

using mezzo::Autocast;
using mezzo::AutocastSetting;
using torch::kBFloat16;
using torch::kCPU;
using torch::kFloat;
using torch::Tensor;

namespace F = torch::nn::functional;
using Tensors = std::vector<Tensor>;

Tensor parameter(std::vector<int64_t> sizes) {
  return torch::randn(sizes).mul_(0.3).requires_grad_();
}

struct Model {
  std::string name;
  std::function<Tensors()> parameters;
  std::function<Tensor(const Tensors&)> forward;  // each parameter is used once
};

std::ostream& operator<<(std::ostream& stream, const Model& model) { return stream << model.name; }

Tensor input(std::vector<int64_t> sizes) {
  torch::manual_seed(7);
  return torch::randn(sizes);
}

std::vector<Model> models() {
  const auto weight_and_bias = [] { return Tensors{parameter({5, 8}), parameter({5})}; };
  const auto cell = [](int64_t gates) {
    return [gates] {
      return Tensors{parameter({gates * 4, 8}), parameter({gates * 4, 4}), parameter({gates * 4}),
                     parameter({gates * 4})};
    };
  };
  return {
      {"Linear", weight_and_bias,
       [](const Tensors& p) {
         return torch::linear(input({3, 8}), p[0], p[1]);
       }},
      {"LinearWithoutBias", weight_and_bias,
       [](const Tensors& p) {
         return torch::linear(input({3, 8}), p[0]).add(p[1]);
       }},
      {"Addmm", weight_and_bias,
       [](const Tensors& p) {
         return torch::addmm(p[1], input({3, 8}), p[0].t());
       }},
      {"LinearModule", weight_and_bias,  // addmm with a view of the weight
       [](const Tensors& p) {
         return F::linear(input({3, 8}), p[0], p[1]);
       }},
      {"LinearModuleOnSequences", weight_and_bias,  // matmul with a view of the weight
       [](const Tensors& p) {
         return F::linear(input({2, 3, 8}), p[0], p[1]);
       }},
      {"ReshapedWeight",
       [] {
         return Tensors{parameter({4, 2, 3})};
       },
       [](const Tensors& p) {
         return torch::mm(input({5, 8}), p[0].view({8, 3}));
       }},
      {"PermutedWeight",
       [] {
         return Tensors{parameter({4, 2, 3})};
       },
       [](const Tensors& p) {
         return torch::bmm(input({3, 5, 2}), p[0].permute({2, 1, 0}));
       }},
      {"PartOfAWeight",
       [] {
         return Tensors{parameter({6, 4})};
       },
       [](const Tensors& p) {
         return torch::linear(input({5, 4}), p[0].chunk(3)[1]);
       }},
      {"RepeatedWeight",
       [] {
         return Tensors{parameter({1, 4})};
       },
       [](const Tensors& p) {
         return torch::linear(input({5, 4}), p[0].expand({3, 4}));
       }},
      {"Mm", weight_and_bias,
       [](const Tensors& p) {
         return torch::mm(p[0], input({8, 3})).t() + p[1];
       }},
      {"Matmul", weight_and_bias,
       [](const Tensors& p) {
         return torch::matmul(p[0], input({8, 3})).t() + p[1];
       }},
      {"Bmm",
       [] {
         return Tensors{parameter({2, 3, 4})};
       },
       [](const Tensors& p) {
         return torch::bmm(input({2, 5, 3}), p[0]);
       }},
      {"Baddbmm",
       [] {
         return Tensors{parameter({2, 5, 4}), parameter({2, 3, 4})};
       },
       [](const Tensors& p) {
         return torch::baddbmm(p[0], input({2, 5, 3}), p[1]);
       }},
      {"Addbmm",
       [] {
         return Tensors{parameter({5, 4}), parameter({2, 3, 4})};
       },
       [](const Tensors& p) {
         return torch::addbmm(p[0], input({2, 5, 3}), p[1]);
       }},
      {"Conv1d",
       [] {
         return Tensors{parameter({4, 3, 3}), parameter({4})};
       },
       [](const Tensors& p) {
         return torch::conv1d(input({2, 3, 9}), p[0], p[1]);
       }},
      {"Conv2d",
       [] {
         return Tensors{parameter({4, 3, 3, 3}), parameter({4})};
       },
       [](const Tensors& p) {
         return torch::conv2d(input({2, 3, 6, 6}), p[0], p[1], 2, 1);
       }},
      {"Conv2dPaddedByName",
       [] {
         return Tensors{parameter({4, 3, 3, 3}), parameter({4})};
       },
       [](const Tensors& p) {
         return torch::conv2d(input({2, 3, 6, 6}), p[0], p[1], {1, 1}, "same");
       }},
      {"Conv3d",
       [] {
         return Tensors{parameter({4, 3, 2, 2, 2}), parameter({4})};
       },
       [](const Tensors& p) {
         return torch::conv3d(input({2, 3, 4, 4, 4}), p[0], p[1]);
       }},
      {"ConvTbc",
       [] {
         return Tensors{parameter({3, 4, 5}), parameter({5})};
       },
       [](const Tensors& p) {
         return torch::conv_tbc(input({7, 2, 4}), p[0], p[1], 1);
       }},
      {"ConvTranspose1d",
       [] {
         return Tensors{parameter({3, 4, 3}), parameter({4})};
       },
       [](const Tensors& p) {
         return torch::conv_transpose1d(input({2, 3, 9}), p[0], p[1]);
       }},
      {"ConvTranspose2d",
       [] {
         return Tensors{parameter({3, 4, 3, 3}), parameter({4})};
       },
       [](const Tensors& p) {
         return torch::conv_transpose2d(input({2, 3, 5, 5}), p[0], p[1], 2);
       }},
      {"ConvTranspose3d",
       [] {
         return Tensors{parameter({3, 4, 2, 2, 2}), parameter({4})};
       },
       [](const Tensors& p) {
         return torch::conv_transpose3d(input({2, 3, 3, 3, 3}), p[0], p[1]);
       }},
      {"LstmCell", cell(4),
       [](const Tensors& p) {
         const auto [h, c] = torch::lstm_cell(input({3, 8}), {input({3, 4}), input({3, 4})}, p[0],
                                              p[1], p[2], p[3]);
         return h + c;
       }},
      {"GruCell", cell(3),
       [](const Tensors& p) {
         return torch::gru_cell(input({3, 8}), input({3, 4}), p[0], p[1], p[2], p[3]);
       }},
      {"RnnTanhCell", cell(1),
       [](const Tensors& p) {
         return torch::rnn_tanh_cell(input({3, 8}), input({3, 4}), p[0], p[1], p[2], p[3]);
       }},
      {"RnnReluCell", cell(1),
       [](const Tensors& p) {
         return torch::rnn_relu_cell(input({3, 8}), input({3, 4}), p[0], p[1], p[2], p[3]);
       }},
      {"Prelu", [] { return Tensors{parameter({3})}; },
       [](const Tensors& p) {
         return torch::prelu(input({2, 3, 4}), p[0]);
       }},
      {"TiedEmbedding",
       [] {
         return Tensors{parameter({11, 8})};
       },
       [](const Tensors& p) {
         const auto tokens = torch::tensor({1, 4, 4, 10}, torch::kLong);
         return torch::linear(torch::tanh(torch::embedding(p[0], tokens)), p[0]);
       }},
  };
}

Tensor run(const Model& model, const Tensors& parameters, const AutocastSetting& options) {
  const Autocast<kCPU> autocast(options);
  return model.forward(parameters);
}

Tensors gradients(const Tensor& output, const Tensors& parameters) {
  return torch::autograd::grad({output.to(kFloat).pow(2).sum()}, parameters);
}

void expect_same_bits(const Tensors& ours, const Tensors& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_EQ(ours[i].scalar_type(), kFloat);
    EXPECT_TRUE(torch::equal(ours[i], theirs[i])) << "parameter " << i;
  }
}

class Gradients : public testing::TestWithParam<Model> {
 protected:
  void SetUp() override {
    torch::manual_seed(3);
    parameters_ = GetParam().parameters();
    cache_.pin(parameters_);
  }
  mezzo::WeightCache cache_ = mezzo::install_op_overrides(mezzo::WeightCache());
  Tensors parameters_;
};

TEST_P(Gradients, AreThoseOfPlainAutocastToTheBit) {
  const Tensor theirs = run(GetParam(), parameters_, {});
  const auto expected = gradients(theirs, parameters_);
  for (int round = 0; round < 3; ++round) {  // a miss, then hits
    const Tensor ours = run(GetParam(), parameters_, {.cache = cache_});
    EXPECT_TRUE(torch::equal(ours, theirs));
    EXPECT_EQ(ours.scalar_type(), theirs.scalar_type());
    expect_same_bits(gradients(ours, parameters_), expected);
  }
}

TEST_P(Gradients, SurviveACopyMadeWithoutGradient) {
  const auto expected = gradients(run(GetParam(), parameters_, {}), parameters_);
  const Autocast<kCPU> autocast({.cache = cache_});
  {
    const torch::NoGradGuard no_grad;
    GetParam().forward(parameters_);
    GetParam().forward(parameters_);
  }
  expect_same_bits(gradients(GetParam().forward(parameters_), parameters_), expected);
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(GetParam().forward(parameters_).requires_grad());
}

TEST_P(Gradients, SurviveACopyMadeInInferenceMode) {
  const Tensor theirs = run(GetParam(), parameters_, {});
  const auto expected = gradients(theirs, parameters_);
  const Autocast<kCPU> autocast({.cache = cache_});
  {
    const c10::InferenceMode inference;
    GetParam().forward(parameters_);
  }
  expect_same_bits(gradients(GetParam().forward(parameters_), parameters_), expected);
  const c10::InferenceMode inference;
  EXPECT_TRUE(torch::equal(GetParam().forward(parameters_), theirs));
}

TEST_P(Gradients, ReachTheInputsOfFrozenWeights) {
  for (auto& each : parameters_) {
    each = each.detach();
  }
  cache_.pin(parameters_);
  const auto x = torch::ones({1}).requires_grad_();
  const auto forward = [&](const AutocastSetting& options) {
    return gradients(run(GetParam(), parameters_, options) * x, {x});
  };
  const auto expected = forward({});
  expect_same_bits(forward({.cache = cache_}), expected);
  expect_same_bits(forward({.cache = cache_}), expected);
}

INSTANTIATE_TEST_SUITE_P(Of, Gradients, testing::ValuesIn(models()),
                         [](const auto& model) { return model.param.name; });

Tensor unrolled(const Tensors& p, int steps) {
  auto h = input({3, 4});
  auto c = h;
  for (int step = 0; step < steps; ++step) {
    std::tie(h, c) = torch::lstm_cell(input({3, 8}), {h, c}, p[0], p[1], p[2], p[3]);
  }
  return h;
}

// Several uses: each gradient is cast to float32 before they are summed up.
TEST(GradientsOfSeveralUses, AreThoseOfOneCastAUse) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const Tensors p{parameter({16, 8}), parameter({16, 4}), parameter({16}), parameter({16})};
  const auto forward = [&](const AutocastSetting& options) {
    const Autocast<kCPU> autocast(options);
    return gradients(unrolled(p, 6), p);
  };
  const auto expected = forward({.cache = false});
  expect_same_bits(forward({.cache = cache}), expected);
  expect_same_bits(forward({.cache = cache}), expected);
  EXPECT_EQ(cache.statistics().casts, 8);  // each weight once a region
  EXPECT_EQ(cache.statistics().hits, 40);
}

TEST(GradientsOfSeveralRegions, AccumulateWithoutSharingAGraph) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto w = parameter({4, 4});
  cache.pin({w});
  const auto x = input({3, 4});
  const auto forward = [&](const AutocastSetting& options) {
    const Autocast<kCPU> autocast(options);
    return torch::linear(x, w).to(kFloat).pow(2).sum();
  };
  for (int round = 0; round < 3; ++round) {
    forward({}).backward();
  }
  const auto expected = w.grad().clone();
  w.mutable_grad().reset();
  const auto first = forward({.cache = cache});
  const auto second = forward({.cache = cache});
  second.backward();
  first.backward();
  forward({.cache = cache}).backward();
  EXPECT_TRUE(torch::equal(w.grad(), expected));
  EXPECT_EQ(cache.statistics().casts, 1);
}

// As libtorch's version owns nodes.
using WeakNode = std::conditional_t<std::is_same_v<mezzo::detail::NodePtr<torch::autograd::Node>,
                                                   std::shared_ptr<torch::autograd::Node>>,
                                    std::weak_ptr<torch::autograd::Node>,
                                    c10::weak_intrusive_ptr<torch::autograd::Node>>;

TEST(GradientsOfOneGraph, LeaveNothingOfItInTheCache) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto w = parameter({4, 4});
  WeakNode node{mezzo::detail::NodePtr<torch::autograd::Node>()};
  const Autocast<kCPU> autocast({.cache = cache});
  {
    const auto y = torch::linear(input({3, 4}), w);
    // behind w.t()
    node = decltype(node)(y.grad_fn()->next_edge(1).function->next_edge(0).function);
    EXPECT_EQ(node.lock()->name(), "mezzo::WeightCast");
  }
  EXPECT_TRUE(node.expired());
  EXPECT_TRUE(cache.holds(w, kBFloat16));
}

TEST(GradientsOfGradients, AreThoseOfPlainAutocast) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto w = parameter({4, 4});
  const auto x = input({3, 4}).requires_grad_();
  const auto penalty = [&](const AutocastSetting& options) {
    const Autocast<kCPU> autocast(options);
    const auto y = torch::linear(x, w).to(kFloat).pow(2).sum();
    const auto first = torch::autograd::grad({y}, {x, w}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].pow(2).sum() + first[1].pow(2).sum()}, {w, x});
  };
  const auto expected = penalty({});
  expect_same_bits(penalty({.cache = cache}), expected);
  expect_same_bits(penalty({.cache = cache}), expected);
}

TEST(GradientsOfACheckpoint, SeeTheSameCacheInTheRecomputation) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto w = parameter({4, 4});
  const auto v = parameter({4, 4});
  cache.pin({w, v});
  const auto x = input({3, 4}).requires_grad_();
  const auto block = [&](const Tensor& h) { return torch::linear(torch::linear(h, w).relu(), v); };
  const auto plain = [&] {
    const Autocast<kCPU> autocast({.cache = cache});
    return block(x).to(kFloat).pow(2).sum();
  };
  const auto expected = torch::autograd::grad({plain()}, {x, w, v});
  cache.reset_statistics();
  Tensor loss;
  {
    const Autocast<kCPU> autocast({.cache = cache});
    loss = mezzo::activation_checkpoint(block, x).to(kFloat).pow(2).sum();
  }
  EXPECT_EQ(cache.statistics().hits, 2);
  expect_same_bits(torch::autograd::grad({loss}, {x, w, v}), expected);
  EXPECT_EQ(cache.statistics().hits, 4);
  EXPECT_EQ(cache.statistics().casts, 2) << "of x, a leaf that requires grad, in each run";
}

TEST(GradientsAfterAStep, ThrowAsInFullPrecision) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  for (const bool cached : {false, true}) {
    const auto w = parameter({4, 4});
    const auto x = input({3, 4}).requires_grad_();
    Tensor loss;
    {
      const Autocast<kCPU> autocast(
          {.enabled = cached, .cache = cached ? cache : mezzo::WeightCacheRef()});
      torch::linear(x, w);  // so that the next use is a hit
      loss = torch::linear(x, w).to(kFloat).pow(2).sum();
    }
    {
      const torch::NoGradGuard no_grad;
      w.add_(1);
    }
    try {
      loss.backward();
      ADD_FAILURE() << "cached: " << cached;
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("has been modified by an inplace operation"),
                std::string::npos);
    }
  }
}

// A view that shows other values than there are in memory.
TEST(GradientsOfNegatedWeights, AreNegated) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto w = parameter({4, 4});
  const auto x = torch::eye(4);
  const Autocast<kCPU> autocast({.cache = cache});
  torch::linear(x, w);
  const auto y = torch::linear(x, at::_neg_view(w));
  EXPECT_TRUE(torch::equal(y.t(), w.neg().to(kBFloat16)));
  EXPECT_EQ(torch::autograd::grad({y.sum()}, {w})[0].max().item<float>(), -1.F);
}

TEST(GradientsOfForwardMode, GoAroundTheCache) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto w = torch::randn({4, 4});
  const auto x = input({3, 4});
  const Autocast<kCPU> autocast({.cache = cache});
  const auto level = static_cast<int64_t>(torch::autograd::ForwardADLevel::get_next_idx());
  const auto dual = torch::_make_dual(w, torch::ones_like(w), level);
  const auto y = torch::linear(x, dual);
  EXPECT_TRUE(torch::equal(y._fw_grad(level), torch::linear(x, torch::ones_like(w))));
  torch::autograd::ForwardADLevel::release_idx(static_cast<uint64_t>(level));
}

}  // namespace
