// Python reads checkpoints with PyTorch alone: examples/python_adamw.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>

#include "../support/scratch.h"

#ifdef MEZZO_PYTHON_WITH_TORCH

namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;

/// What a Python program prints, and its errors.
std::string output_of_python(const std::string& arguments) {
  FILE* const pipe = ::popen(("'" MEZZO_PYTHON_WITH_TORCH "' " + arguments + " 2>&1").c_str(), "r");
  std::string output;
  std::array<char, 4096> block{};
  while (const std::size_t count = std::fread(block.data(), 1, block.size(), pipe)) {
    output.append(block.data(), count);
  }
  return output + "status " + std::to_string(::pclose(pipe));
}

/// Something of every kind.
struct RunToRead {
  RunToRead() {
    torch::NoGradGuard no_grad;
    model->to(torch::kBFloat16);
    layer->weight.copy_(torch::arange(6).view({2, 3}));
    layer->bias.copy_(torch::tensor({0.5, -1.0}));
    state.add("model", model).add("optimizer", optimizer).add("masters", masters);
    state.add("ema", ema).add("scaler", scaler).add("schedule", schedule).add("epoch", epoch);
    state.add("large", large).add("best", best).add("done", done).add("name", name);
    state.add("order", order).add("own", own).with_random_state();
  }
  void step() {
    layer->forward(torch::ones({1, 3}, torch::kBFloat16)).sum().backward();
    optimizer.step();
    masters.step();
  }

  torch::nn::Linear layer{3, 2};
  torch::nn::Sequential model{layer, torch::nn::BatchNorm1d(2)};
  mezzo::optim::AdamW optimizer{layer->parameters(), mezzo::optim::AdamWOptions(0)};
  torch::optim::SGD sgd{model->parameters(), torch::optim::SGDOptions(0)};
  mezzo::MasterWeights masters{sgd};
  mezzo::Ema ema{layer->parameters()};
  mezzo::GradScaler scaler;
  mezzo::LinearSchedule schedule{optimizer, {.total_steps = 10}};
  int64_t epoch = 7, large = int64_t{1} << 40;
  double best = 0.25;
  bool done = true;
  std::string name = "B\xC3\xA4r \"1\"";
  torch::Tensor order = torch::arange(10).select(0, 3);
  at::Generator own = at::detail::createCPUGenerator(11);
  mezzo::TrainingState state;
};

std::filesystem::path saved_run(const std::filesystem::path& folder) {
  RunToRead run;
  run.step();
  return mezzo::CheckpointManager(folder).save(run.state, 3400).file;
}

TEST(CheckpointPython, ListsWhatWasSaved) {
  const test_support::Scratch scratch;
  const std::string output =
      output_of_python("'" MEZZO_EXAMPLES "/python_adamw/read_checkpoint.py' '" +
                       saved_run(scratch.path()).string() + "'");
  EXPECT_THAT(output,
              AllOf(HasSubstr("step 3400\n"), HasSubstr("\nmodel.0.weight torch.bfloat16 [2, 3]\n"),
                    HasSubstr("\nmodel.1.running_mean torch.bfloat16 [2]\n"),
                    HasSubstr(".exp_avg torch."), HasSubstr("\noptimizer.applied_steps 1\n"),
                    HasSubstr("\nscaler."), HasSubstr("\nschedule.base_lrs [0.0]\n")));
  EXPECT_THAT(output, AllOf(HasSubstr("\nepoch 7\n"), HasSubstr("\nlarge 1099511627776\n"),
                            HasSubstr("\nbest 0.25\n"), HasSubstr("\ndone True\n"),
                            HasSubstr("\nname 'B\xC3\xA4r \"1\"'\n"),
                            HasSubstr("\norder torch.int64 []\n"), EndsWith("\nstatus 0")))
      << output;
}

TEST(CheckpointPython, LoadsTheWeightsIntoAPythonModelAndTheZipIsWhole) {
  const test_support::Scratch scratch;
  const std::string file = saved_run(scratch.path()).string();
  const auto script = scratch.path() / "script.py";
  test_support::put_bytes(script, R"(
import sys, torch, zipfile
sys.path.insert(0, sys.argv[1] + "/python_adamw")
from read_checkpoint import flatten, read
state = read(sys.argv[2])["state"]
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()
model.load_state_dict(flatten(state["model"]))
print(model[0].weight.tolist(), model[0].bias.tolist(), model[1].running_var.tolist())
generator = torch.Generator()
generator.set_state(state["own"])
print(generator.initial_seed(), state["order"].item(), len(state["ema"]["averages"]))
with zipfile.ZipFile(sys.argv[2]) as archive:
    print(archive.testzip(), archive.comment[:-8].decode())
)");
  EXPECT_EQ(output_of_python("'" + script.string() + "' '" MEZZO_EXAMPLES "' '" + file + "'"),
            "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] [0.5, -1.0] [1.0, 1.0]\n"
            "11 3 2\n"
            "None mezzo checkpoint, format 1, CRC-32C of all before: \n"
            "status 0");
}

TEST(CheckpointPython, AdamWGoesOnInPython) {
  const test_support::Scratch scratch;
  const torch::Tensor weight = torch::tensor({1.0F, 2.0F}).requires_grad_();
  const torch::Tensor later = torch::tensor({3.0F}).requires_grad_();
  mezzo::optim::AdamW optimizer({weight, later},
                                mezzo::optim::AdamWOptions(0.1).betas({0.8, 0.99}).amsgrad(true));
  mezzo::TrainingState state;
  state.add("optimizer", optimizer);
  const auto step = [&] {
    (weight * weight).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  step();
  const auto before = weight.detach().clone();
  const auto file = mezzo::CheckpointManager(scratch.path()).save(state, 2).file;
  step();

  const auto script = scratch.path() / "script.py";
  test_support::put_bytes(script, R"(
import sys, torch
sys.path.insert(0, sys.argv[1] + "/python_adamw")
from read_checkpoint import adamw_state_dict, read
weight = torch.nn.Parameter(torch.tensor([float(sys.argv[3]), float(sys.argv[4])]))
later = torch.nn.Parameter(torch.tensor([3.0]))
optimizer = torch.optim.AdamW([weight, later])
optimizer.load_state_dict(adamw_state_dict(read(sys.argv[2])["state"]["optimizer"], optimizer))
(weight * weight).sum().backward()
optimizer.step()
group = optimizer.param_groups[0]
print(group["lr"], group["betas"], group["amsgrad"], len(optimizer.state), optimizer.state[weight]["step"].item())
print(*(f"{x:.6f}" for x in weight.tolist()))
)");
  std::array<char, 200> expected{}, numbers{};
  std::snprintf(expected.data(), expected.size(), "0.1 (0.8, 0.99) True 1 3.0\n%.6f %.6f\nstatus 0",
                weight[0].item<double>(), weight[1].item<double>());
  std::snprintf(numbers.data(), numbers.size(), " %.9g %.9g", before[0].item<double>(),
                before[1].item<double>());
  EXPECT_EQ(output_of_python("'" + script.string() + "' '" MEZZO_EXAMPLES "' '" + file.string() +
                             "'" + numbers.data()),
            expected.data());
}

}  // namespace

#endif
