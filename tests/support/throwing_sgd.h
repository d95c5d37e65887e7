#pragma once

#include <torch/optim/sgd.h>

#include <stdexcept>

namespace test_support {

/// An SGD whose step throws if `throws` is set.
class ThrowingSgd : public torch::optim::SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    if (throws) throw std::runtime_error("cannot step");
    return SGD::step(closure);
  }
  bool throws = false;
};

/// Returns whether `call` throws std::runtime_error, as ThrowingSgd does.
template <class Call>
bool throws(const Call& call) {
  try {
    call();
    return false;
  } catch (const std::runtime_error&) {
    return true;
  }
}

}  // namespace test_support
