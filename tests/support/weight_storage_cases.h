#pragma once

#include <mezzo/optim/sgd.h>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "owned_optimizer.h"

namespace test_support {

/// A way to keep weights, and who steps them: SGD at a rate of 1.
struct WeightStorageCase {
  const char* name;
  torch::ScalarType dtype;
  bool is_split;  ///< WeightStorage::split_master, which keeps no master as a tensor
  std::function<OwnedOptimizer(const std::vector<torch::Tensor>&)> make;
};

inline std::vector<WeightStorageCase> weight_storage_cases() {
  const auto mezzos = [](mezzo::optim::WeightStorage storage) {
    return [storage](const std::vector<torch::Tensor>& parameters) {
      const mezzo::optim::WeightStorageOptions weights{.weight_storage = storage};
      return OwnedOptimizer(std::make_unique<mezzo::optim::SGD>(parameters, 1.0, weights), false);
    };
  };
  const auto torchs = [](bool with_masters) {
    return [with_masters](const std::vector<torch::Tensor>& parameters) {
      return OwnedOptimizer(std::make_unique<torch::optim::SGD>(parameters, 1.0), with_masters);
    };
  };
  using enum mezzo::optim::WeightStorage;
  return {{"plain float", torch::kFloat, false, mezzos(plain)},
          {"master of bfloat16", torch::kBFloat16, false, mezzos(fp32_master)},
          {"master of half", torch::kHalf, false, mezzos(fp32_master)},
          {"split master", torch::kBFloat16, true, mezzos(split_master)},
          {"torch's SGD", torch::kFloat, false, torchs(false)},
          {"MasterWeights of bfloat16", torch::kBFloat16, false, torchs(true)},
          {"MasterWeights of half", torch::kHalf, false, torchs(true)},
          {"MasterWeights of float", torch::kFloat, false, torchs(true)}};
}

}  // namespace test_support
