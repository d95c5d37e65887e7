// A shared library, built with mezzo's headers as they are and with another version number.
// two_versions.cpp loads both.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/macros/Export.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include "../support/message_of.h"

namespace {

/// A training run with every object that has state.
class Training {
 public:
  double step(bool overflows) {
    at::Tensor loss;
    {
      const mezzo::AutocastGuard<at::kCPU> autocast;
      loss = at::mm(input_, weight_).to(at::kFloat).square().sum();
    }
    buckets_.zero_grad();
    scaler_.scale(overflows ? loss * std::numeric_limits<float>::infinity() : loss).backward();
    scaler_.step(optimizer_, {.max_norm = 1.0});
    scaler_.update();
    ema_.update();
    return scaler_.get_scale() + weight_.detach().sum().item<double>();
  }

  torch::optim::Optimizer& optimizer() { return optimizer_; }
  const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor input_ = at::full({8, 8}, 0.5);
  at::Tensor weight_ = at::full({8, 8}, 0.25).requires_grad_();
  mezzo::GradBuckets buckets_{std::vector<at::Tensor>{weight_}};
  mezzo::optim::AdamW optimizer_{{weight_}, mezzo::optim::AdamWOptions(0.01)};
  mezzo::Ema ema_{std::vector<at::Tensor>{weight_}, mezzo::EmaOptions{}};
  mezzo::GradScaler scaler_{{.init_scale = 1024}};
};

std::optional<mezzo::AutocastGuard<at::kCPU>> region;
mezzo::OpOverrides denied;

}  // namespace

extern "C" {

C10_EXPORT int version() { return MEZZO_VERSION; }

C10_EXPORT const char* type_name() { return typeid(mezzo::optim::AdamW).name(); }

C10_EXPORT void* start() { return new Training; }
C10_EXPORT double step(void* training, bool overflows) {
  return static_cast<Training*>(training)->step(overflows);
}
C10_EXPORT void end(void* training) { delete static_cast<Training*>(training); }

C10_EXPORT torch::optim::Optimizer* optimizer_of(void* training) {
  return &static_cast<Training*>(training)->optimizer();
}
C10_EXPORT const at::Tensor* weight_of(void* training) {
  return &static_cast<Training*>(training)->weight();
}

/// Returns whether this library's OptimizerRef recognizes the optimizer.
C10_EXPORT bool is_own(torch::optim::Optimizer& optimizer) {
  return mezzo::OptimizerRef(optimizer).mixed_precision() != nullptr;
}

/// Steps an optimizer of any library with this library's scaler. The unscaled gradient is 1.
C10_EXPORT void step_by_scaler(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  mezzo::GradScaler scaler({.init_scale = 1024});
  (void)scaler.scale(at::ones({}));
  parameter.mutable_grad() = at::full_like(parameter, 1024);
  scaler.step(optimizer);
  scaler.update();
}

/// Returns the error message of install_op_overrides for a denied op.
C10_EXPORT std::string deny(const std::string& op) {
  return test_support::message_of(
      [&] { denied = denied.with(mezzo::install_op_overrides(mezzo::OpOverrides().deny(op))); });
}

/// Begins an autocast region with all denied ops, until leave().
C10_EXPORT void enter() { region.emplace(mezzo::AutocastOptions{.op_overrides = denied}); }
C10_EXPORT void leave() { region.reset(); }
}
