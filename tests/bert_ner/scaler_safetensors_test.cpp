// The state of a Python GradScaler in a safetensors file (data/python_scaler.safetensors, which
// make_scaler_safetensors.py wrote), to and fro.

#include <mezzo/scaling/scaler_tensors.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "../support/scratch.h"
#include "safetensors.h"

namespace {

using test_support::Scratch;

mezzo::GradScaler scaler_of(const std::filesystem::path& file) {
  const auto content = bert_ner::read_safetensors(file).tensors;
  const std::map<std::string, torch::Tensor> tensors(content.begin(), content.end());
  mezzo::GradScaler scaler;
  scaler.load_state_dict(mezzo::scaler_state(tensors));
  return scaler;
}

void write(const std::filesystem::path& file, const mezzo::GradScaler& scaler) {
  const auto tensors = mezzo::scaler_tensors(scaler.state_dict());
  bert_ner::write_safetensors(file, {tensors.begin(), tensors.end()});
}

/// Two clean iterations.
mezzo::GradScaler run(mezzo::GradScaler scaler) {
  torch::Tensor parameter = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD optimizer({parameter}, 0.1);
  for (int i = 0; i < 2; ++i) {
    static_cast<void>(scaler.scale(torch::zeros({1})));
    parameter.mutable_grad() = torch::ones({1});
    scaler.step(optimizer);
    scaler.update();
  }
  return scaler;
}

const std::filesystem::path kOfPython =
    std::filesystem::path(BERT_NER_TEST_DATA) / "python_scaler.safetensors";

/// Python had seen inf, then two clean steps of three.
TEST(ScalerSafetensors, OfPythonGoOnWhereItStopped) {
  EXPECT_EQ(scaler_of(kOfPython).get_scale(), 256);
  const auto state = run(scaler_of(kOfPython)).state_dict();
  EXPECT_EQ(state.at("scale"), 512);
  EXPECT_EQ(state.at("_growth_tracker"), 1);
  EXPECT_EQ(state.at("growth_interval"), 3);
}

/// make_scaler_safetensors.py, given the file that is written here, loads it and prints
/// {'scale': 512.0, ..., 'growth_interval': 3, '_growth_tracker': 2}.
TEST(ScalerSafetensors, ForPythonHaveItsKeysAndItsKindsOfNumbers) {
  const Scratch folder;
  write(folder / "scaler.safetensors", run(scaler_of(kOfPython)));
  const auto written = bert_ner::read_safetensors(folder / "scaler.safetensors");
  for (const auto& [name, tensor] : bert_ner::read_safetensors(kOfPython).tensors) {
    const auto own = written.find(name);
    ASSERT_TRUE(own.defined()) << name;
    EXPECT_EQ(own.dim(), 0) << name;
    EXPECT_EQ(own.scalar_type(), tensor.is_floating_point() ? torch::kDouble : torch::kLong);
  }
  EXPECT_EQ(scaler_of(folder / "scaler.safetensors").state_dict(),
            run(scaler_of(kOfPython)).state_dict());
}

}  // namespace
