#pragma once

#include <mezzo/optim/optimizer_ref.h>

namespace test_support {

/// An optimizer of mezzo's whose parameters ATen's kernels step, as on a device without kernels of
/// mezzo's.
template <class Optimizer>
struct AtenOptimizer : Optimizer {
  using Optimizer::Optimizer;
  void apply(mezzo::StepPlan plan, const mezzo::GradStats& stats = {},
             const mezzo::StepOptions& options = {}) override {
    this->apply_impl(plan, stats, options, /*with_aten=*/true);
  }
};

}  // namespace test_support
