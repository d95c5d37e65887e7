#pragma once

#include <mezzo/optim/sgd.h>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "owned_optimizer.h"

namespace test_support {

/// A weight storage with an SGD with a learning rate of 1.
struct WeightStorageCase {
  const char* name;
  torch::ScalarType dtype;
  bool is_split;  ///< WeightStorage::split_master, which has no master tensor
  std::function<OwnedOptimizer(const std::vector<torch::Tensor>&)> make;
};

inline std::vector<WeightStorageCase> weight_storage_cases() {
  const auto make_mezzo = [](mezzo::optim::WeightStorage storage) {
    return [storage](const std::vector<torch::Tensor>& parameters) {
      const mezzo::optim::WeightStorageOptions weights{.weight_storage = storage};
      return OwnedOptimizer(std::make_unique<mezzo::optim::SGD>(parameters, 1.0, weights), false);
    };
  };
  const auto make_torch = [](bool with_masters) {
    return [with_masters](const std::vector<torch::Tensor>& parameters) {
      return OwnedOptimizer(std::make_unique<torch::optim::SGD>(parameters, 1.0), with_masters);
    };
  };
  using enum mezzo::optim::WeightStorage;
  return {{"plain float32", torch::kFloat, false, make_mezzo(plain)},
          {"fp32_master of bfloat16", torch::kBFloat16, false, make_mezzo(fp32_master)},
          {"fp32_master of float16", torch::kHalf, false, make_mezzo(fp32_master)},
          {"split_master", torch::kBFloat16, true, make_mezzo(split_master)},
          {"torch::optim::SGD", torch::kFloat, false, make_torch(false)},
          {"MasterWeights of bfloat16", torch::kBFloat16, false, make_torch(true)},
          {"MasterWeights of float16", torch::kHalf, false, make_torch(true)},
          {"MasterWeights of float32", torch::kFloat, false, make_torch(true)}};
}

}  // namespace test_support
