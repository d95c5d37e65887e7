/// \file
/// Faults that people plant by accident, each in a model of its own, and what mezzo's tools say of
/// each. A row is a fault, how it is planted and asked about, and what the answer must name. The
/// tables, with the answers: mezzo_tests --gtest_filter='*Planted*' --gtest_output=json.
#pragma once

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace planted_faults {

using torch::Tensor;
namespace nn = torch::nn;

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// A fault and who is to name it.
struct PlantedFault {
  const char* name;     ///< the test's
  const char* planted;  ///< in words
  std::function<std::string()> said;
  std::vector<std::string> names;  ///< all of which are in what was said
};

inline void PrintTo(const PlantedFault& fault, std::ostream* stream) { *stream << fault.planted; }

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

/// Of each row one test, with this name.
inline std::string name_of_fault(const testing::TestParamInfo<PlantedFault>& info) {
  return info.param.name;
}

/// The names that the answer lacks, each with the answer; none, as it should be.
inline std::vector<std::string> names_missing_for(const PlantedFault& fault) {
  const std::string said = fault.said();
  testing::Test::RecordProperty("planted", fault.planted);
  testing::Test::RecordProperty("said", said);
  std::vector<std::string> missing;
  for (const std::string& name : fault.names) {
    if (said.find(name) == std::string::npos) missing.push_back(name + ", in: " + said);
  }
  return missing;
}

}  // namespace planted_faults
