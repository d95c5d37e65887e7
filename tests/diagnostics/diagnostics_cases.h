/// \file
/// About a hundred common faults, each with the tool that a user runs first and the fix that it
/// prints, and runs without faults. The tables are in *_cases.cpp, one per tool;
/// diagnostics_accuracy_test.cpp grades the output.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace diagnostics_test {

using torch::Tensor;
namespace nn = torch::nn;

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The output of a tool that finds nothing.
inline constexpr const char* kNothing = "nothing";

/// Runs the program with the fault, or with the remedy applied, and returns the tool's output.
using Run = std::function<std::string(bool fixed)>;

struct FaultCase {
  const char* name;
  const char* description;
  Run run;
  std::vector<std::string> expected;  ///< substrings of correct output: cause and location
  /// Substring of the printed remedy, which `run(true)` applies; empty if the tool prints none.
  const char* remedy = "";
};

std::vector<FaultCase> anomaly_trace_cases();       // AnomalyTrace
std::vector<FaultCase> divergence_monitor_cases();  // DivergenceMonitor
std::vector<FaultCase> overflow_report_cases();     // OverflowReport
std::vector<FaultCase> underflow_report_cases();    // UnderflowReport
std::vector<FaultCase> precision_check_cases();     // check_precision

/// A run without faults; `run` returns the output of a tool.
struct HealthyCase {
  std::string name;
  std::function<std::string()> run;
};

std::vector<HealthyCase> healthy_anomaly_trace_cases();
std::vector<HealthyCase> healthy_divergence_monitor_cases();
std::vector<HealthyCase> healthy_precision_check_cases();
std::vector<HealthyCase> healthy_model_cases();  // all three tools, in each dtype

using Op = std::function<Tensor(const Tensor&)>;

/// Linear, LayerNorm, an optional op with a fault, Linear.
struct TestModelImpl : nn::Module {
  explicit TestModelImpl(Op faulty_op = {}) : fault(std::move(faulty_op)) {
    torch::manual_seed(0);
    register_module("body", body);
    register_module("norm", norm);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x) {
    Tensor hidden = norm->forward(body->forward(x));
    if (fault) hidden = fault(hidden);
    return head->forward(hidden.to(head->weight.scalar_type()));
  }
  Tensor parameter(const std::string& name) { return named_parameters()[name]; }

  Op fault;
  nn::Linear body{8, 8};
  nn::LayerNorm norm{nn::LayerNormOptions({8})};
  nn::Linear head{8, 8};
};
TORCH_MODULE(TestModel);

inline Tensor batch_of_ones() { return torch::ones({8, 8}); }

/// Sets one element of a tensor.
inline void set_element(const Tensor& tensor, std::int64_t index, float value) {
  const torch::NoGradGuard no_grad;
  tensor.view({-1})[index] = value;
}

/// Sets one element of the gradient in every backward pass.
inline void set_grad_element(const Tensor& parameter, std::int64_t index, float value) {
  parameter.register_hook([index, value](const Tensor& gradient) {
    Tensor modified = gradient.clone();
    set_element(modified, index, value);
    return modified;
  });
}

inline Tensor mean_square(TestModelImpl& model) {
  return model.forward(batch_of_ones()).square().mean();
}

}  // namespace diagnostics_test
