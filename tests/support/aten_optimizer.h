#pragma once

#include <mezzo/optim/optimizer_ref.h>

namespace test_support {

/// A mezzo optimizer that steps with ATen's kernels, as on a device without mezzo's kernels.
template <class Optimizer>
struct AtenOptimizer : Optimizer {
  using Optimizer::Optimizer;
  void apply(mezzo::StepPlan plan, const mezzo::GradStats& stats = {},
             const mezzo::StepOptions& options = {}) override {
    this->apply_impl(plan, stats, options, /*with_aten=*/true);
  }
};

}  // namespace test_support
