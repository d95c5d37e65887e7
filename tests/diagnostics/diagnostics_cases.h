/// \file
/// A hundred faults that people plant by accident, what the tool that a user meets first says of
/// each, and whether doing what it says cures the run. The tables lie in planted_*.cpp, one for
/// each tool; diagnostics_accuracy_test.cpp grades them.
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

/// What is said where nothing is found.
inline constexpr const char* kNothing = "nothing";

/// A run with the fault, or with what `remedy` says done.
using Run = std::function<std::string(bool cured)>;

struct PlantedFault {
  const char* name;
  const char* planted;  ///< in words
  Run said;
  std::vector<std::string> names;  ///< what a right answer says: the cause and the place
  /// What to do, as it is printed: `said(true)` follows it. Empty: the tool prints no remedy.
  const char* remedy = "";
};

std::vector<PlantedFault> anomalies();       // asked of AnomalyTrace
std::vector<PlantedFault> divergences();     // asked of DivergenceMonitor
std::vector<PlantedFault> overflows();       // asked of OverflowReport
std::vector<PlantedFault> lost_precision();  // asked of UnderflowReport
std::vector<PlantedFault> before_the_run();  // asked of the doctor

/// A run that is well; `said` asks a tool.
struct HealthyRun {
  std::string name;
  std::function<std::string()> said;
};

std::vector<HealthyRun> healthy_traces();          // what AnomalyTrace passes over
std::vector<HealthyRun> healthy_runs();            // what DivergenceMonitor passes over
std::vector<HealthyRun> healthy_forward_passes();  // what the doctor passes over
std::vector<HealthyRun> healthy_models();          // asked of all three, in each dtype

using Op = std::function<Tensor(const Tensor&)>;

/// Two layers and a norm, with room for a fault between the last two.
struct PatientImpl : nn::Module {
  explicit PatientImpl(Op fault = {}) : planted(std::move(fault)) {
    torch::manual_seed(0);
    register_module("body", body);
    register_module("norm", norm);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x) {
    Tensor hidden = norm->forward(body->forward(x));
    if (planted) hidden = planted(hidden);
    return head->forward(hidden.to(head->weight.scalar_type()));
  }
  Tensor parameter(const std::string& name) { return named_parameters()[name]; }

  Op planted;
  nn::Linear body{8, 8};
  nn::LayerNorm norm{nn::LayerNormOptions({8})};
  nn::Linear head{8, 8};
};
TORCH_MODULE(Patient);

inline Tensor batch_of_ones() { return torch::ones({8, 8}); }

/// Puts `value` at `index` of a parameter, or of its gradient.
inline void plant(const Tensor& tensor, std::int64_t index, float value) {
  const torch::NoGradGuard no_grad;
  tensor.view({-1})[index] = value;
}

inline void plant_in_gradient(const Tensor& parameter, std::int64_t index, float value) {
  parameter.register_hook([index, value](const Tensor& gradient) {
    Tensor faulty = gradient.clone();
    plant(faulty, index, value);
    return faulty;
  });
}

inline Tensor squares(PatientImpl& model) { return model.forward(batch_of_ones()).square().mean(); }

}  // namespace diagnostics_test
