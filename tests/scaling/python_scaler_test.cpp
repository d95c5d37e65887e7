// Exchange of states with torch.amp.GradScaler as JSON (data/python_scaler.json, recorded by
// record_python_scaler.py).

#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

mezzo::GradScaler scaler_of_python() {
  std::ifstream file(MEZZO_SCALING_TEST_DATA "/python_scaler.json");
  mezzo::GradScaler scaler;
  scaler.load_state_dict(nlohmann::json::parse(file).get<mezzo::GradScaler::StateDict>());
  return scaler;
}

/// The line of docs/loss-scaling.md.
nlohmann::json json_for_python(const mezzo::GradScaler& scaler) {
  nlohmann::json json;
  for (const auto& [key, value] : scaler.state_dict()) {
    if (!std::isfinite(value)) continue;
    const bool is_count = key == "growth_interval" || key == "_growth_tracker";
    json[key] = is_count ? nlohmann::json(static_cast<std::int64_t>(value)) : nlohmann::json(value);
  }
  return json;
}

TEST(GradScalerStateDict, LoadsPythonJsonAndContinues) {
  mezzo::GradScaler scaler = scaler_of_python();
  torch::Tensor parameter = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD optimizer({parameter}, 0.1);
  std::vector<double> scales;
  for (int i = 0; i < 4; ++i) {
    scales.push_back(scaler.get_scale());
    (void)scaler.scale(torch::zeros({1}));
    parameter.mutable_grad() = torch::ones({1});
    scaler.step(optimizer);
    scaler.update();
  }
  // The state has a growth_tracker of 2 and a growth_interval of 3.
  EXPECT_EQ(scales, (std::vector<double>{256, 512, 512, 512}));
  EXPECT_EQ(scaler.get_scale(), 1024);
}

/// torch.amp throws for a growth_interval that is not an int. For this text record_python_scaler.py
/// prints {"scale": 512.0, ..., "growth_interval": 3, "_growth_tracker": 1}.
TEST(GradScalerStateDict, JsonCountsAreIntegers) {
  const nlohmann::json json = json_for_python(scaler_of_python());
  const nlohmann::json python =
      nlohmann::json::parse(std::ifstream(MEZZO_SCALING_TEST_DATA "/python_scaler.json"));
  for (const auto& [key, value] : python.items()) EXPECT_EQ(json.at(key).dump(), value.dump());
  mezzo::GradScaler again;
  again.load_state_dict(nlohmann::json::parse(json.dump()).get<mezzo::GradScaler::StateDict>());
  EXPECT_EQ(again.state_dict(), scaler_of_python().state_dict());
}

}  // namespace
