// What is lost before anything is inf? Asked of UnderflowReport.

#include <mezzo/diagnostics/overflow_report.h>

#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

#include "diagnostics_cases.h"

namespace diagnostics_test {
namespace {

/// The line of `layer` with gradients of `magnitude`, in all layers or in this one, and the
/// suggested scale, under which the cure makes the gradients.
Run underflow(const std::string& layer, double magnitude, bool in_all = false) {
  return [=](bool cured) {
    const auto report_at = [&](double scale) {
      PatientImpl model;
      squares(model).backward();
      for (const auto& entry : model.named_parameters()) {
        if (!in_all && !entry.key().starts_with(layer)) continue;
        entry.value().mutable_grad() = torch::full_like(entry.value(), magnitude * scale);
      }
      mezzo::UnderflowReport report(torch::kHalf, {.loss_scale = scale});
      report.add_gradients(model);
      return report;
    };
    mezzo::UnderflowReport report = report_at(1);
    if (cured) report = report_at(mezzo::suggest_loss_scale(report));
    for (const auto& one : report.layers()) {
      if (one.layer != layer) continue;
      if (one.underflow + one.subnormal + one.overflow + one.nonfinite == 0)
        return std::string(kNothing);
      return c10::str(one.layer, ": lost ", one.underflow, ", subnormal ", one.subnormal,
                      ", overflow ", one.overflow, "; suggest_loss_scale ",
                      mezzo::suggest_loss_scale(report));
    }
    return std::string(kNothing);
  };
}

/// A LayerNorm over a single element gives its bias, whatever it reads: no gradient passes.
std::string underflow_before_a_norm(bool cured) {
  torch::manual_seed(0);
  nn::Sequential model(nn::Linear(8, cured ? 8 : 1),
                       nn::LayerNorm(nn::LayerNormOptions({cured ? 8 : 1})));
  model->forward(torch::randn({8, 8})).square().mean().backward();
  mezzo::UnderflowReport report(torch::kHalf);
  report.add_gradients(*model);
  const auto first = report.layers().front();
  return first.zero < 1 ? kNothing : c10::str(first.layer, ": zero ", first.zero);
}

}  // namespace

std::vector<PlantedFault> lost_precision() {
  return {
      {"GradientsOf1e9th",
       "gradients of 1e-9 in all layers",
       underflow("body", 1e-9, true),
       {"body: lost 1,"},
       "suggest_loss_scale"},
      {"SubnormalGradients",
       "gradients of 1e-6 in norm",
       underflow("norm", 1e-6),
       {"norm: lost 0, subnormal 1,"},
       "suggest_loss_scale"},
      {"GradientsBeyondHalf",
       "gradients of 1e5 in head",
       underflow("head", 1e5),
       {"head: lost 0, subnormal 0, overflow 1"},
       "suggest_loss_scale"},
      {"NormOverOneElement",
       "a LayerNorm over one element, through which no gradient passes",
       underflow_before_a_norm,
       {"0: zero 1"}},
  };
}

}  // namespace diagnostics_test
