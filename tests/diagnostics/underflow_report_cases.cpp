// Faults for UnderflowReport: gradients outside float16's range.

#include <mezzo/diagnostics/underflow_report.h>

#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

#include "diagnostics_cases.h"

namespace diagnostics_test {
namespace {

/// Gradients of `magnitude` in `layer`, or in all layers; fixed by the suggested loss scale.
/// Returns the statistics of `layer`.
Run underflow(const std::string& layer, double magnitude, bool in_all = false) {
  return [=](bool fixed) {
    const auto report_at = [&](double scale) {
      TestModelImpl model;
      mean_square(model).backward();
      for (const auto& entry : model.named_parameters()) {
        if (!in_all && !entry.key().starts_with(layer)) continue;
        entry.value().mutable_grad() = torch::full_like(entry.value(), magnitude * scale);
      }
      mezzo::UnderflowReport report(torch::kHalf, {.loss_scale = scale});
      report.add_gradients(model);
      return report;
    };
    mezzo::UnderflowReport report = report_at(1);
    if (fixed) report = report_at(mezzo::suggest_loss_scale(report));
    for (const auto& stats : report.layers()) {
      if (stats.layer != layer) continue;
      if (stats.underflow + stats.subnormal + stats.overflow + stats.nonfinite == 0)
        return std::string(kNothing);
      return c10::str(stats.layer, ": underflow ", stats.underflow, ", subnormal ", stats.subnormal,
                      ", overflow ", stats.overflow, "; suggest_loss_scale ",
                      mezzo::suggest_loss_scale(report));
    }
    return std::string(kNothing);
  };
}

/// A LayerNorm over one element returns its bias for any input, so that its input has no gradient.
std::string norm_over_one_element(bool fixed) {
  torch::manual_seed(0);
  nn::Sequential model(nn::Linear(8, fixed ? 8 : 1),
                       nn::LayerNorm(nn::LayerNormOptions({fixed ? 8 : 1})));
  model->forward(torch::randn({8, 8})).square().mean().backward();
  mezzo::UnderflowReport report(torch::kHalf);
  report.add_gradients(*model);
  const auto first = report.layers().front();
  return first.zero < 1 ? kNothing : c10::str(first.layer, ": zero ", first.zero);
}

}  // namespace

std::vector<FaultCase> underflow_report_cases() {
  return {
      {"GradsOf1eMinus9",
       "gradients of 1e-9 in all layers",
       underflow("body", 1e-9, true),
       {"body: underflow 1,"},
       "suggest_loss_scale"},
      {"SubnormalGrads",
       "gradients of 1e-6 in norm",
       underflow("norm", 1e-6),
       {"norm: underflow 0, subnormal 1,"},
       "suggest_loss_scale"},
      {"GradsBeyondFloat16",
       "gradients of 1e5 in head",
       underflow("head", 1e5),
       {"head: underflow 0, subnormal 0, overflow 1"},
       "suggest_loss_scale"},
      {"NormOverOneElement",
       "a LayerNorm over one element, which passes no gradient on",
       norm_over_one_element,
       {"0: zero 1"}},
  };
}

}  // namespace diagnostics_test
