// A step is skipped: which gradients were it? Asked of OverflowReport, which prints no remedy.

#include <mezzo/diagnostics/overflow_report.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "diagnostics_cases.h"

namespace diagnostics_test {
namespace {

/// What the report writes of a step of `optimizer`.
template <class Optimizer, class Loss>
std::string report_of(nn::Module& model, Optimizer& optimizer, const Loss& loss,
                      mezzo::OverflowReportOptions options = {}) {
  std::ostringstream out;
  options.stream = &out;
  mezzo::GradScaler scaler;
  scaler.on_skip(mezzo::OverflowReport(model, options));
  scaler.scale(loss()).backward();
  const bool ran = scaler.step(optimizer, mezzo::StepOptions{}).applied();
  scaler.update();
  return ran ? kNothing : out.str();
}

std::string report_of_sgd(bool /*cured*/) {
  PatientImpl model;
  plant_in_gradient(model.parameter("head.weight"), 10, kInf);
  mezzo::optim::SGD optimizer(model.parameters(), 1e-2);
  return report_of(model, optimizer, [&] { return squares(model); });
}

std::string report_of_split_masters(bool /*cured*/) {
  PatientImpl model;
  model.to(torch::kBFloat16);
  plant_in_gradient(model.parameter("head.weight"), 10, kNan);
  mezzo::optim::AdamW optimizer(model.parameters(), mezzo::optim::AdamWOptions(1e-2),
                                {.weight_storage = mezzo::optim::WeightStorage::split_master});
  return report_of(model, optimizer, [&] {
    return model.forward(batch_of_ones().to(torch::kBFloat16)).to(torch::kFloat).sum();
  });
}

std::string report_of_sparse_rows(bool /*cured*/) {
  struct Words : nn::Module {
    nn::Embedding table{nn::EmbeddingOptions(9, 2).sparse(true)};
    Words() { register_module("table", table); }
  } model;
  const Tensor weights = torch::tensor({{1.0F}, {kInf}});
  (model.table->forward(torch::tensor({2, 7})) * weights).sum().backward();
  return mezzo::find_overflow(mezzo::named_float_parameters(model)).message();
}

std::string report_of_small_scale(bool /*cured*/) {
  PatientImpl model;
  plant_in_gradient(model.parameter("head.bias"), 1, 2e38F);
  model.forward(batch_of_ones()).sum().backward();
  return mezzo::find_overflow(mezzo::named_float_parameters(model), 0.125).message();
}

std::string report_of_unscaled(bool /*cured*/) {
  PatientImpl model;
  plant_in_gradient(model.parameter("norm.weight"), 4, kInf);
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  std::ostringstream out;
  mezzo::GradScaler scaler;
  scaler.on_skip(mezzo::OverflowReport(model, {.stream = &out}));
  scaler.scale(model.forward(batch_of_ones()).sum()).backward();
  scaler.unscale_(optimizer);
  nn::utils::clip_grad_norm_(model.parameters(), 1.0);
  scaler.step(optimizer);
  scaler.update();
  return out.str();
}

}  // namespace

std::vector<PlantedFault> overflows() {
  return {
      {"InfInAGradient",
       "an inf in the gradient of head.weight",
       report_of_sgd,
       {"reducing loss scale to 32768", "head.weight, in 1 of 3 layers",
        "has 1 inf in 64 gradients, the first, inf, at index [1, 2], found after the "
        "backward"}},
      {"InfThatUnscaleSaw",
       "an inf under torch::optim::SGD, unscaled and clipped by hand",
       report_of_unscaled,
       {"norm.weight", "at index [4]"}},
      {"NanInBfloat16Weights",
       "a NaN in the gradient of bfloat16 weights with split masters",
       report_of_split_masters,
       {"head.weight, in 1 of 3 layers", "the first, nan, at index [1, 2]"}},
      {"InfInASparseRow",
       "an inf in one row of a sparse embedding's gradient",
       report_of_sparse_rows,
       {"table.weight, in 1 of 1 layers", "2 inf in 4 gradients, the first, inf, at index [7, 0]"}},
      {"InfMadeByUnscaling",
       "a gradient of 2e38 under a loss scale of 1/8",
       report_of_small_scale,
       {"head.bias", "at index [1], made by dividing by a loss scale below 1"}},
  };
}

}  // namespace diagnostics_test
