// The state of a Python GradScaler in a safetensors file (data/python_scaler.safetensors, which
// make_scaler_safetensors.py wrote), to and fro.

#include <mezzo/scaling/scaler_tensors.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "safetensors.h"
#include "scratch_folder.h"
#include "tensor_views.h"

namespace {

using bert_ner::test::ScratchFolder;

mezzo::GradScaler scaler_of(const std::filesystem::path& file) {
  const bert_ner::SafetensorsFile content(file);
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& view : content.tensors()) tensors[view.name] = bert_ner::to_tensor(view);
  mezzo::GradScaler scaler;
  scaler.load_state_dict(mezzo::scaler_state(tensors));
  return scaler;
}

void write(const std::filesystem::path& file, const mezzo::GradScaler& scaler) {
  const auto tensors = mezzo::scaler_tensors(scaler.state_dict());
  std::vector<bert_ner::TensorView> views;
  for (const auto& [key, tensor] : tensors) views.push_back(bert_ner::view_of(key, tensor));
  static_cast<void>(bert_ner::write_safetensors(file, views));
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
  const ScratchFolder folder;
  write(folder / "scaler.safetensors", run(scaler_of(kOfPython)));
  const bert_ner::SafetensorsFile written(folder / "scaler.safetensors"), python(kOfPython);
  for (const auto& view : python.tensors()) {
    const auto* own = written.find(view.name);
    ASSERT_NE(own, nullptr) << view.name;
    EXPECT_TRUE(own->shape.empty()) << view.name;
    const bool is_count = view.dtype == bert_ner::Dtype::i64;
    EXPECT_EQ(own->dtype, is_count ? bert_ner::Dtype::i64 : bert_ner::Dtype::f64) << view.name;
  }
  EXPECT_EQ(scaler_of(folder / "scaler.safetensors").state_dict(),
            run(scaler_of(kOfPython)).state_dict());
}

}  // namespace
