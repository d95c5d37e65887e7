// TorchScript modules in checkpoints: parameters and buffers have the names of the C++ model.
#include <torch/script.h>
#include <torch/torch.h>
//
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/torchscript.h>

#include <gtest/gtest.h>

#include "../support/script_model.h"
#include "../support/temp_dir.h"

namespace {

using mezzo::ScriptModule;
using mezzo::TrainingState;
using test_support::script_model;

TEST(CheckpointTorchScript, LoadsIntoScriptAndCppModel) {
  const test_support::TempDir temp_dir;
  auto saved = script_model(1), loaded = script_model(2);
  saved.forward({torch::randn({2, 3, 6, 6})});
  TrainingState from, to, to_cpp;
  ScriptModule of_saved(saved), of_loaded(loaded);
  from.add("model", of_saved);
  to.add("model", of_loaded);
  const auto file = mezzo::CheckpointManager(temp_dir.path()).save(from, 5).path;

  const auto held = loaded.attr("out").toModule().attr("weight").toTensor();
  mezzo::load_checkpoint(file, to);
  EXPECT_TRUE(held.is_same(loaded.attr("out").toModule().attr("weight").toTensor()))
      << "an optimizer holds it";
  auto expected = saved.named_attributes().begin();
  for (const auto& item : loaded.named_attributes()) {
    if (item.value.isTensor()) {
      EXPECT_TRUE(torch::equal(item.value.toTensor(), (*expected).value.toTensor())) << item.name;
    }
    ++expected;
  }
  auto in_cpp = test_support::twin(3);
  to_cpp.add("model", in_cpp);
  mezzo::load_checkpoint(file, to_cpp);
  EXPECT_TRUE(torch::equal(in_cpp->out->weight, held));
  EXPECT_EQ(in_cpp->norm->num_batches_tracked.item<int64_t>(), 1);
}

}  // namespace
