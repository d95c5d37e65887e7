#pragma once

#include <mezzo/optim/master_weights.h>

#include <torch/optim/optimizer.h>

#include <memory>
#include <utility>

namespace test_support {

/// An optimizer, optionally wrapped in MasterWeights.
struct OwnedOptimizer {
  std::unique_ptr<torch::optim::Optimizer> inner;
  std::unique_ptr<mezzo::MasterWeights> masters;  // null without masters

  OwnedOptimizer(std::unique_ptr<torch::optim::Optimizer> optimizer, bool with_masters)
      : inner(std::move(optimizer)),
        masters(with_masters ? std::make_unique<mezzo::MasterWeights>(*inner) : nullptr) {}

  mezzo::OptimizerRef ref() const {
    return masters != nullptr ? mezzo::OptimizerRef(*masters) : mezzo::OptimizerRef(*inner);
  }
};

}  // namespace test_support
