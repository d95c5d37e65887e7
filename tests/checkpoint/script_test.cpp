// TorchScript in a checkpoint: parameters and buffers by their names, as of a model in C++.
#include <torch/script.h>
#include <torch/torch.h>
//
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/torchscript.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../support/error_of.h"
#include "../support/scratch.h"
#include "../support/script_model.h"

namespace {

using mezzo::ScriptModule;
using mezzo::TrainingState;
using test_support::script_model;

TEST(CheckpointOfScript, ComesBackInTheScriptAndInTheSameModelInCpp) {
  const test_support::Scratch scratch;
  auto saved = script_model(1), loaded = script_model(2);
  saved.forward({torch::randn({2, 3, 6, 6})});
  TrainingState from, to, to_cpp;
  ScriptModule of_saved(saved), of_loaded(loaded);
  from.add("model", of_saved);
  to.add("model", of_loaded);
  const auto file = mezzo::CheckpointManager(scratch.path()).save(from, 5).file;

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

TEST(CheckpointOfScript, RefusesAnotherModelsFileAndKeepsTheScript) {
  const test_support::Scratch scratch;
  torch::jit::Module other("Other");
  other.register_parameter("weight", torch::ones({2}), false);
  TrainingState from, to;
  ScriptModule of_other(other);
  from.add("model", of_other);
  const auto file = mezzo::CheckpointManager(scratch.path()).save(from, 0).file;
  const auto script = script_model();
  ScriptModule of_script(script);
  to.add("model", of_script);
  EXPECT_THAT(test_support::error_of([&] { mezzo::load_checkpoint(file, to); }),
              testing::HasSubstr("\"model\" does not fit"));
  EXPECT_TRUE(torch::equal(script.attr("out").toModule().attr("weight").toTensor(),
                           test_support::twin()->out->weight));
}

TEST(CheckpointOfScript, TakesAModelThatIsLoadedLater) {
  const test_support::Scratch scratch;
  ScriptModule script(script_model(1));
  TrainingState state;
  state.add("model", script);
  mezzo::CheckpointManager checkpoints(scratch.path());
  checkpoints.save(state, 1);
  script = ScriptModule(script_model(2));
  checkpoints.load_newest(state);
  EXPECT_TRUE(
      torch::equal(script->named_parameters()["out.weight"], test_support::twin(1)->out->weight));
}

}  // namespace
