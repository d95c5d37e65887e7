// What the tests of ShardedOptimizer train.
#pragma once

#include <mezzo/distributed/sharded_optimizer.h>

#include <torch/nn.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ranks.h"
#include "same_bits.h"

namespace sharded_test {

using distributed_test::expect_same_weights_on_all_ranks;
using distributed_test::Ranks;

inline distributed_test::Ranks world() { return distributed_test::everyone(); }

/// So that the model below takes several.
inline constexpr mezzo::GradAllReduceOptions kSmallBuckets{.bucket_bytes = 1024};

/// Sizes that no number of ranks divides, a weight in another memory format, parameters that only
/// some ranks use or none, a frozen one, one without elements.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    torch::manual_seed(3);
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3)));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    wide = register_module("wide", torch::nn::Linear(45, 31));
    out = register_module("out", torch::nn::Linear(31, 3));
    sometimes = register_parameter("sometimes", torch::randn({3}));
    never = register_parameter("never", torch::randn({7}));
    empty = register_parameter("empty", torch::randn({0, 4}));
    frozen = register_parameter("frozen", torch::randn({3}), /*requires_grad=*/false);
  }

  at::Tensor forward(const at::Tensor& x, bool uses_it) {
    const at::Tensor hidden = torch::tanh(wide->forward(torch::tanh(conv->forward(x)).flatten(1)));
    const at::Tensor y = out->forward(hidden) + frozen + empty.sum();
    return uses_it ? y * sometimes : y;
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear wide{nullptr}, out{nullptr};
  at::Tensor sometimes, never, empty, frozen;
};
TORCH_MODULE(Model);

struct Batch {
  at::Tensor x, y;
  Batch part(int64_t rank, int64_t size) const {
    return {x.chunk(size)[static_cast<std::size_t>(rank)],
            y.chunk(size)[static_cast<std::size_t>(rank)]};
  }
};

inline std::vector<Batch> batches(int count, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(11);
  std::vector<Batch> all;
  for (int i = 0; i < count; ++i) {
    all.push_back({torch::randn({8, 3, 5, 5}).to(dtype), torch::randn({8, 3}).to(dtype)});
  }
  return all;
}

/// Only rank 0 uses one of the parameters.
inline at::Tensor loss_of(Model model, const Batch& batch, int rank) {
  return torch::mse_loss(model->forward(batch.x, rank == 0), batch.y);
}

/// `what` says where, should they differ.
inline void expect_equal(Model model, Model other, const std::string& what) {
  for (const auto& item : model->named_parameters()) {
    const at::Tensor wanted = other->named_parameters()[item.key()];
    EXPECT_TRUE(at::equal(item.value(), wanted))
        << what << ": " << item.key() << (item.value() - wanted).abs().max();
  }
}

inline void expect_close(Model model, Model other, double tolerance) {
  for (const auto& item : model->named_parameters()) {
    const at::Tensor wanted = other->named_parameters()[item.key()];
    EXPECT_TRUE(at::allclose(item.value(), wanted, tolerance, tolerance))
        << item.key() << (item.value() - wanted).abs().max();
  }
}

}  // namespace sharded_test
