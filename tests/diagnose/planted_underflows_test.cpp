#include <mezzo/diagnose/underflow.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "planted_faults.h"

// What is lost before anything is inf? Asked of UnderflowReport.
namespace planted_faults {
namespace {

/// The line of `layer` for gradients of `magnitude` in half, and the suggested scale.
std::string underflow_of(const std::string& layer, const Op& fault) {
  PatientImpl model;
  model.forward(batch_of_ones()).square().sum().backward();
  for (const auto& entry : model.named_parameters()) {
    if (entry.key().starts_with(layer)) entry.value().mutable_grad() = fault(entry.value().grad());
  }
  mezzo::UnderflowReport report(torch::kHalf);
  report.add_gradients(model);
  std::string said;
  for (const auto& one : report.layers()) {
    if (one.layer == layer) {
      said = c10::str(one.layer, ": zero ", one.zero, ", lost ", one.lost, ", subnormal ",
                      one.subnormal, ", overflow ", one.overflow);
    }
  }
  return said;
}

std::string suggestion_for(double magnitude) {
  PatientImpl model;
  model.head->weight.mutable_grad() = torch::full({8, 8}, magnitude);
  mezzo::UnderflowReport report(torch::kHalf);
  report.add_gradients(model);
  return "scale " + mezzo::detail::number_text(mezzo::suggest_loss_scale(report));
}

const std::vector<PlantedFault> kUnderflows = {
    {"GradientsOf1e9th",
     "gradients of 1e-9 in body",
     [] { return underflow_of("body", [](const Tensor& g) { return torch::full_like(g, 1e-9); }); },
     {"body: zero 0, lost 1,"}},
    {"DeadLayer",
     "gradients of 0 in head",
     [] { return underflow_of("head", [](const Tensor& g) { return torch::zeros_like(g); }); },
     {"head: zero 1, lost 0,"}},
    {"SubnormalGradients",
     "gradients of 1e-6 in norm",
     [] { return underflow_of("norm", [](const Tensor& g) { return torch::full_like(g, 1e-6); }); },
     {"norm: zero 0, lost 0, subnormal 1,"}},
    {"GradientsBeyondHalf",
     "gradients of 1e5 in head",
     [] { return underflow_of("head", [](const Tensor& g) { return torch::full_like(g, 1e5); }); },
     {"head: zero 0, lost 0, subnormal 0, overflow 1"}},
    {"ScaleThatIsTooLow",
     "gradients of 2^-10 without a loss scale",
     [] { return suggestion_for(std::exp2(-10)); },
     {"scale 4194304"}},
};

class PlantedUnderflows : public testing::TestWithParam<PlantedFault> {};

TEST_P(PlantedUnderflows, AreNamed) {
  EXPECT_THAT(names_missing_for(GetParam()), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, PlantedUnderflows, testing::ValuesIn(kUnderflows), name_of_fault);

}  // namespace
}  // namespace planted_faults
