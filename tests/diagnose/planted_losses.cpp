// What is lost before anything is inf? Asked of UnderflowReport, UpdateWatch, Telemetry and
// compare_precisions.

#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/underflow.h>
#include <mezzo/diagnose/update_watch.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

#include "../support/warnings.h"
#include "planted_faults.h"

namespace planted_faults {
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
      if (one.lost + one.subnormal + one.overflow + one.non_finite == 0)
        return std::string(kNothing);
      return c10::str(one.layer, ": lost ", one.lost, ", subnormal ", one.subnormal, ", overflow ",
                      one.overflow, "; suggest_loss_scale ", mezzo::suggest_loss_scale(report));
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

/// bfloat16 weights whose updates are less than half a unit in the last place.
std::string updates(bool cured) {
  PatientImpl model;
  model.to(torch::kBFloat16);
  mezzo::optim::AdamW optimizer(
      model.parameters(),
      mezzo::optim::AdamWOptions(1e-5).weight_storage(cured ? mezzo::optim::WeightStorage::master
                                                            : mezzo::optim::WeightStorage::plain));
  std::string said = kNothing;
  mezzo::UpdateWatch watch(model, optimizer,
                           {.every = 2, .callback = [&](const mezzo::UpdateSample& sample) {
                              if (sample.share > 0.5) said = sample.message();
                            }});
  for (int step = 1; step <= 4; ++step) {
    optimizer.zero_grad();
    model.forward(torch::ones({8, 8}, torch::kBFloat16))
        .to(torch::kFloat)
        .square()
        .mean()
        .backward();
    optimizer.step();
    watch({.step = step});
  }
  return said;
}

std::string clipped(bool cured) {
  torch::manual_seed(5);
  const test_support::Warnings warnings;
  std::vector<Tensor> weights = {torch::zeros({7}).requires_grad_()};
  mezzo::optim::SGD optimizer(weights, 1e-3);
  mezzo::GradScaler scaler;
  mezzo::Telemetry telemetry;
  static_cast<void>(scaler.scale(torch::ones({})));
  for (int step = 0; step < 20; ++step) {
    weights[0].mutable_grad() = torch::randn({7}) * scaler.get_scale();
    if (cured) scaler.unscale_(optimizer);
    nn::utils::clip_grad_norm_(weights, 1.0);
    const auto result = scaler.step(optimizer);
    scaler.update();
    telemetry.record(result, Tensor());
  }
  return warnings.texts.empty() ? kNothing : warnings.texts.front();
}

/// Two layers with a sum between that swamps what is added to it.
struct SwampedImpl : nn::Module {
  SwampedImpl() {
    register_module("first", first);
    register_module("last", last);
  }
  Tensor forward(const Tensor& x) {
    const Tensor large = first->forward(x).to(torch::kFloat) + 1000;
    const Tensor product = torch::bmm(large.unsqueeze(0), torch::eye(8).unsqueeze(0)).squeeze(0);
    return last->forward(torch::tanh(product.to(torch::kFloat) - 1000));
  }
  nn::Linear first{8, 8}, last{8, 4};
};
TORCH_MODULE(Swamped);

std::string comparison(bool cured) {
  torch::manual_seed(8);
  Swamped model;
  const std::vector<Tensor> batches = {torch::randn({4, 8})};
  const auto loss = [](auto& net, const Tensor& batch) {
    return net->forward(batch).to(torch::kFloat).square().mean();
  };
  const auto compared = mezzo::compare_precisions(model, loss, batches,
                                                  {{.name = "bf16", .autocast = torch::kBFloat16}});
  const auto& row = compared.rows.at(cured ? 2 : 1);  // the setting, and its repair
  if (row.gradient_error < 0.05) return kNothing;
  return c10::str(row.ops.at(0).name, " causes most of an error of ", row.gradient_error,
                  compared.rows.size() > 2 ? "; bf16 + policy" : "");
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
      {"UpdatesLostInBfloat16",
       "plain bfloat16 weights and a rate of 1e-5",
       updates,
       {"16-bit weights round", "% of the updates to nothing"},
       "use WeightStorage::master"},
      {"ClippedScaledGradients",
       "clip_grad_norm_ before unscale_",
       clipped,
       {"gradients were clipped while they still carry the loss scale 65536"},
       "call unscale_(optimizer) before clipping"},
      {"SumThatSwamps",
       "1,000 added before a product in bfloat16",
       comparison,
       {"aten::bmm causes most of"},
       "bf16 + policy"},
  };
}

}  // namespace planted_faults
