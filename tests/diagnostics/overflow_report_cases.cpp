// Faults for OverflowReport, which prints no remedy: gradients that skip a step.

#include <mezzo/diagnostics/named_parameters.h>
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

/// Returns the report of one step of `optimizer`.
template <class Optimizer, class Loss>
std::string run_step(nn::Module& model, Optimizer& optimizer, const Loss& loss,
                     mezzo::OverflowReportOptions options = {}) {
  std::ostringstream out;
  options.stream = &out;
  mezzo::GradScaler scaler;
  scaler.on_skip(mezzo::OverflowReport(model, options));
  scaler.scale(loss()).backward();
  const bool applied = scaler.step(optimizer, mezzo::StepOptions{}).applied();
  scaler.update();
  return applied ? kNothing : out.str();
}

std::string report_sgd(bool /*fixed*/) {
  TestModelImpl model;
  set_grad_element(model.parameter("head.weight"), 10, kInf);
  mezzo::optim::SGD optimizer(model.parameters(), 1e-2);
  return run_step(model, optimizer, [&] { return mean_square(model); });
}

std::string report_split_masters(bool /*fixed*/) {
  TestModelImpl model;
  model.to(torch::kBFloat16);
  set_grad_element(model.parameter("head.weight"), 10, kNan);
  mezzo::optim::AdamW optimizer(model.parameters(), mezzo::optim::AdamWOptions(1e-2),
                                {.weight_storage = mezzo::optim::WeightStorage::split_master});
  return run_step(model, optimizer, [&] {
    return model.forward(batch_of_ones().to(torch::kBFloat16)).to(torch::kFloat).sum();
  });
}

std::string report_sparse_rows(bool /*fixed*/) {
  struct EmbeddingModel : nn::Module {
    nn::Embedding table{nn::EmbeddingOptions(9, 2).sparse(true)};
    EmbeddingModel() { register_module("table", table); }
  } model;
  const Tensor weights = torch::tensor({{1.0F}, {kInf}});
  (model.table->forward(torch::tensor({2, 7})) * weights).sum().backward();
  return mezzo::find_overflow(mezzo::named_float_parameters(model)).message();
}

std::string report_small_scale(bool /*fixed*/) {
  TestModelImpl model;
  set_grad_element(model.parameter("head.bias"), 1, 2e38F);
  model.forward(batch_of_ones()).sum().backward();
  return mezzo::find_overflow(mezzo::named_float_parameters(model), 0.125).message();
}

std::string report_unscaled(bool /*fixed*/) {
  TestModelImpl model;
  set_grad_element(model.parameter("norm.weight"), 4, kInf);
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

std::vector<FaultCase> overflow_report_cases() {
  return {
      {"InfGrad",
       "an inf in the gradient of head.weight",
       report_sgd,
       {"reducing loss scale to 32768", "head.weight, in 1 of 3 layers",
        "has 1 inf in 64 elements, the first (inf) at index [1, 2], from the backward pass"}},
      {"InfAfterUnscale",
       "an inf with torch::optim::SGD, unscale_ and clip_grad_norm_",
       report_unscaled,
       {"norm.weight", "at index [4]"}},
      {"NanGradOfBfloat16Weight",
       "a NaN in the gradient of bfloat16 weights with split masters",
       report_split_masters,
       {"head.weight, in 1 of 3 layers", "the first (nan) at index [1, 2]"}},
      {"InfInSparseGrad",
       "an inf in one row of a sparse embedding gradient",
       report_sparse_rows,
       {"table.weight, in 1 of 1 layers", "2 inf in 4 elements, the first (inf) at index [7, 0]"}},
      {"InfFromUnscaling",
       "a gradient of 2e38 under a loss scale of 1/8",
       report_small_scale,
       {"head.bias", "at index [1], from dividing by a loss scale below 1"}},
  };
}

}  // namespace diagnostics_test
