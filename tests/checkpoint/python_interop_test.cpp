// Checkpoints that Python reads and writes.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/pickle_bytes.h"
#include "../support/temp_dir.h"
#include "../support/warning_recorder.h"

#ifndef MEZZO_CHECKPOINT_TEST_DATA
#error "define MEZZO_CHECKPOINT_TEST_DATA as the directory tests/checkpoint/data"
#endif

namespace {

using mezzo::TrainingState;
using test_support::message_of;
using testing::AllOf;
using testing::HasSubstr;

// --- From Python -------------------------------------------------------------------------------

/// Written by data/python.py with PyTorch.
const std::filesystem::path& python_file() {
  static const std::filesystem::path path(MEZZO_CHECKPOINT_TEST_DATA "/python.pt");
  return path;
}

/// Python's results of the following steps.
c10::IValue python_next(const std::string& key) {
  std::ifstream file(MEZZO_CHECKPOINT_TEST_DATA "/python_next.pt", std::ios::binary);
  const c10::IValue next = torch::pickle_load({std::istreambuf_iterator<char>(file), {}});
  return next.toGenericDict().at(key);
}

std::vector<torch::Tensor> tensors(const c10::IValue& list) {
  std::vector<torch::Tensor> tensors;
  for (const c10::IValue& one : list.toListRef()) tensors.push_back(one.toTensor());
  return tensors;
}

torch::nn::Sequential python_model() {
  return torch::nn::Sequential(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2),
                               torch::nn::Linear(2, 1));
}

/// The two param groups of data/python.py.
std::vector<torch::optim::OptimizerParamGroup> groups_of(const torch::nn::Sequential& model) {
  const auto all = model->parameters();
  return {{{all[0], all[1], all[2], all[3]}}, {{all[4], all[5]}}};
}

/// Loads the model and, in a dtype, the optimizer, and steps with Python's gradients.
template <class Optimizer, class... Options>
void expect_resume_from_python(const std::string& name, torch::ScalarType dtype,
                               const Options&... options) {
  auto model = python_model();
  mezzo::load_checkpoint(python_file(), TrainingState().add(name + "_model", model),
                         {.ignore_unexpected = true});
  for (const torch::Tensor& one : model->parameters()) one.set_data(one.to(dtype));
  Optimizer optimizer(groups_of(model), options...);
  mezzo::load_checkpoint(python_file(), TrainingState().add(name + "_optimizer", optimizer),
                         {.ignore_unexpected = true});
  const c10::IValue gradients = python_next(name + "_gradients");
  const auto parameters = model->parameters();
  for (const c10::IValue& step : gradients.toListRef()) {
    const auto of_step = tensors(step);
    for (std::size_t i = 0; i < of_step.size(); ++i) {
      parameters[i].mutable_grad() = of_step[i].to(dtype, /*non_blocking=*/false, /*copy=*/true);
    }
    optimizer.step();
  }
  const auto after = tensors(python_next(name + "_after"));
  const double tolerance = dtype == torch::kFloat ? 1e-6 : 1e-2;
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_TRUE(parameters[i]
                    .to(torch::kFloat)
                    .allclose(after[i], dtype == torch::kFloat ? 1e-5 : 1e-2, tolerance))
        << name << ' ' << i << '\n'
        << parameters[i] << '\n'
        << after[i];
  }
}

TEST(CheckpointFromPython, OptimizersResume) {
  using torch::kFloat;
  expect_resume_from_python<mezzo::optim::AdamW>("adamw", kFloat, mezzo::optim::AdamWOptions());
  expect_resume_from_python<torch::optim::AdamW>("adamw", kFloat, torch::optim::AdamWOptions());
  expect_resume_from_python<mezzo::optim::Adam>("adam", kFloat, mezzo::optim::AdamOptions());
  expect_resume_from_python<torch::optim::Adam>("adam", kFloat, torch::optim::AdamOptions());
  for (const char* const name : {"sgd", "plain_sgd"}) {
    expect_resume_from_python<mezzo::optim::SGD>(name, kFloat, mezzo::optim::SGDOptions(0.1));
    expect_resume_from_python<torch::optim::SGD>(name, kFloat, torch::optim::SGDOptions(0.1));
  }
}

TEST(CheckpointFromPython, AdamWResumesWithSplitMaster) {
  const mezzo::optim::WeightStorageOptions split{.weight_storage =
                                                     mezzo::optim::WeightStorage::split_master};
  expect_resume_from_python<mezzo::optim::AdamW>("adamw", torch::kBFloat16,
                                                 torch::optim::AdamWOptions(), split);
}

TEST(CheckpointFromPython, LoadsNumbersAndStrings) {
  std::int64_t epoch = 0, large = 0;
  double best = 0;
  std::string name;
  TrainingState state;
  state.add("epoch", epoch).add("large", large).add("best", best).add("name", name);
  EXPECT_EQ(mezzo::load_checkpoint(python_file(), state, {.ignore_unexpected = true}).step, 0);
  EXPECT_EQ(epoch, 7);
  EXPECT_EQ(large, std::int64_t{1} << 40);
  EXPECT_EQ(best, 1);
  EXPECT_EQ(name, "B\xC3\xA4r");
}

TEST(CheckpointFromPython, MismatchThrowsWithoutChanges) {
  auto model = python_model();
  const auto error = [&](auto optimizer, const std::string& name) {
    std::string message = message_of([&] {
      mezzo::load_checkpoint(python_file(), TrainingState().add(name, optimizer),
                             {.ignore_unexpected = true});
    });
    EXPECT_TRUE(optimizer.state().empty());
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
    return message;
  };
  using torch::optim::AdamW;
  EXPECT_THAT(error(AdamW(model->parameters(), 0.5), "adamw_optimizer"),
              HasSubstr("a different number of parameter groups: 2 in the checkpoint, 1 in the "
                        "current optimizer"));
  auto turned = groups_of(model);
  std::swap(turned[0].params()[0], turned[0].params()[1]);
  EXPECT_THAT(
      error(AdamW(turned, 0.5), "adamw_optimizer"),
      HasSubstr("size mismatch for parameter 0 of group 0: [2, 3] in the checkpoint, [2] in the "
                "current optimizer"));
  auto fewer = groups_of(model);
  fewer[0].params().pop_back();
  EXPECT_THAT(error(AdamW(fewer, 0.5), "adamw_optimizer"),
              HasSubstr("group 0 has 4 parameters in the checkpoint, 3 in the current optimizer"));
  EXPECT_THAT(error(AdamW(groups_of(model), 0.5), "adam_optimizer"),
              HasSubstr("class mismatch: Adam in the checkpoint, AdamW in the current state"));
  EXPECT_THAT(error(AdamW(groups_of(model), 0.5), "adamw_model"),
              HasSubstr("an optimizer's state in the current state"));
  torch::nn::Linear other(3, 2);
  EXPECT_THAT(message_of([&] {
                mezzo::load_checkpoint(python_file(), TrainingState().add("adamw_model", other),
                                       {.ignore_unexpected = true});
              }),
              HasSubstr("Missing key(s) in state_dict: \"weight\""));
}

/// Writes an optimizer state as Python does, with `maximize`; returns the error of loading it.
template <class Optimizer>
std::string error_of_loading_maximize(Optimizer optimizer, bool maximizes) {
  const auto dict = [] {
    return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
  };
  auto group = dict(), state = dict(), whole = dict();
  group.insert("lr", 0.25);
  group.insert("betas", c10::ivalue::Tuple::create({0.9, 0.99}));
  group.insert("eps", 1e-8);
  group.insert("weight_decay", 0.0);
  group.insert("amsgrad", false);
  group.insert("maximize", maximizes);
  group.insert("params", c10::List<int64_t>{0});
  auto groups = c10::impl::GenericList(c10::AnyType::get());
  groups.push_back(group);
  state.insert("state", c10::impl::GenericDict(c10::IntType::get(), c10::AnyType::get()));
  state.insert("param_groups", groups);
  whole.insert("optimizer", state);
  const std::vector<char> bytes = torch::jit::pickle_save(whole);
  const test_support::TempDir temp_dir;
  test_support::write_file(temp_dir / "file", {bytes.begin(), bytes.end()});
  return message_of([&] {
    mezzo::load_checkpoint(temp_dir / "file", TrainingState().add("optimizer", optimizer));
  });
}

TEST(CheckpointFromPython, ThrowsForMaximizingOptimizer) {
  const std::vector<torch::Tensor> weight{torch::ones({2})};
  for (const bool maximizes : {true, false}) {
    for (const std::string& error :
         {error_of_loading_maximize(mezzo::optim::AdamW(weight), maximizes),
          error_of_loading_maximize(torch::optim::AdamW(weight), maximizes)}) {
      EXPECT_EQ(error.find("in C++ does not support maximize") != std::string::npos, maximizes)
          << error;
    }
  }
}

// --- To Python ---------------------------------------------------------------------------------

#ifdef MEZZO_PYTHON_WITH_TORCH

/// Runs a Python program, and returns its output and errors.
std::string output_of_python(const std::string& program, const std::filesystem::path& file) {
  const test_support::TempDir temp_dir;
  const auto script = temp_dir.path() / "script.py";
  test_support::write_file(script, program);
  const std::string command =
      "'" MEZZO_PYTHON_WITH_TORCH "' '" + script.string() + "' '" + file.string() + "' 2>&1";
  FILE* const pipe = ::popen(command.c_str(), "r");
  std::string output;
  std::array<char, 4096> block{};
  while (const std::size_t count = std::fread(block.data(), 1, block.size(), pipe)) {
    output.append(block.data(), count);
  }
  return output + "status " + std::to_string(::pclose(pipe));
}

TEST(CheckpointInPython, TorchLoadReadsEveryObject) {
  const test_support::TempDir temp_dir;
  torch::nn::Linear layer(3, 2);
  torch::nn::Sequential model(layer, torch::nn::BatchNorm1d(2));
  {
    const torch::NoGradGuard no_grad;
    layer->weight.copy_(torch::arange(6).view({2, 3}));
    layer->bias.copy_(torch::tensor({0.5, -1.0}));
  }
  model->to(torch::kBFloat16);
  mezzo::Ema ema(layer->parameters());
  mezzo::GradScaler scaler({.init_scale = 8});
  std::int64_t epoch = 7, large = std::int64_t{1} << 40;
  bool done = true;
  std::string name = "B\xC3\xA4r \"1\"";
  std::vector<std::size_t> order{5, 0, 3};
  at::Generator own = at::detail::createCPUGenerator(11);
  TrainingState state;
  state.add("model", model).add("ema", ema).add("scaler", scaler).add("epoch", epoch);
  state.add("large", large).add("done", done).add("name", name).add("order", order);
  state.add("own", own).add_rng_state();
  const auto file = mezzo::CheckpointManager(temp_dir.path()).save(state, 3400).path;
  EXPECT_EQ(output_of_python(R"(
import sys, torch, zipfile
saved = torch.load(sys.argv[1], weights_only=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()
print(model.load_state_dict(saved["model"]))
print(model[0].weight.tolist(), model[0].bias.tolist(), model[1].running_var.tolist())
generator = torch.Generator()
generator.set_state(saved["own"])
print(generator.initial_seed(), saved["order"].tolist(), len(saved["ema"]["averages"]))
print(saved["epoch"], saved["large"], saved["done"], saved["name"], saved["scaler"]["scale"].item())
print(saved["mezzo"])
with zipfile.ZipFile(sys.argv[1]) as archive:
    print(archive.testzip(), archive.comment[:-8].decode())
)",
                             file),
            "<All keys matched successfully>\n"
            "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] [0.5, -1.0] [1.0, 1.0]\n"
            "11 [5, 0, 3] 2\n"
            "7 1099511627776 True B\xC3\xA4r \"1\" 8.0\n"
            "{'format': 2, 'step': 3400}\n"
            "None mezzo checkpoint, format 2, CRC-32C of all preceding bytes: \n"
            "status 0");
}

/// Steps twice, saves, and compares one more step in C++ and in Python.
template <class Optimizer, class Options>
void expect_resume_in_python(const std::string& python_class, const Options& options) {
  const test_support::TempDir temp_dir;
  torch::Tensor weight = torch::tensor({1.0F, 2.0F}).requires_grad_();
  const torch::Tensor later = torch::tensor({3.0F}).requires_grad_();
  Optimizer optimizer({weight, later}, options);
  TrainingState state;
  state.add("weight", weight).add("optimizer", optimizer);
  const auto step = [&] {
    (weight * weight).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  step();
  const auto file = mezzo::CheckpointManager(temp_dir.path()).save(state, 2).path;
  step();
  std::array<char, 100> expected{};
  std::snprintf(expected.data(), expected.size(), "%.6f %.6f\nstatus 0",
                weight[0].template item<double>(), weight[1].template item<double>());
  const std::string program = R"(
import sys, torch
saved = torch.load(sys.argv[1], weights_only=True)
weight = torch.nn.Parameter(saved["weight"])
later = torch.nn.Parameter(torch.tensor([3.0]))
optimizer = torch.optim.)" + python_class +
                              R"(([weight, later], lr=7.0)
optimizer.load_state_dict(saved["optimizer"])
(weight * weight).sum().backward()
optimizer.step()
assert len(optimizer.state) == 1
print(*(f"{x:.6f}" for x in weight.tolist()))
)";
  EXPECT_EQ(output_of_python(program, file), expected.data()) << python_class;
}

TEST(CheckpointInPython, OptimizersResume) {
  const auto adamw = torch::optim::AdamWOptions(0.1).betas({0.8, 0.99}).amsgrad(true);
  const auto adam = torch::optim::AdamOptions(0.1).weight_decay(0.125);
  const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.5);
  expect_resume_in_python<torch::optim::AdamW>("AdamW", adamw);
  expect_resume_in_python<torch::optim::Adam>("Adam", adam);
  expect_resume_in_python<torch::optim::SGD>("SGD", sgd);
  expect_resume_in_python<mezzo::optim::AdamW>(
      "AdamW", mezzo::optim::AdamWOptions(0.1).betas({0.8, 0.99}).amsgrad(true));
  expect_resume_in_python<mezzo::optim::Adam>("Adam",
                                              mezzo::optim::AdamOptions(0.1).weight_decay(0.125));
  expect_resume_in_python<mezzo::optim::SGD>("SGD", mezzo::optim::SGDOptions(0.1).momentum(0.5));
}

#endif

// --- Bare state_dict -----------------------------------------------------------------------------

namespace bytes = test_support::pickle_bytes;

/// A file as `torch.save(model.state_dict(), path)` writes it: an OrderedDict with attributes.
std::string bare_state_dict() {
  const auto tensor = [](const char* key, std::int64_t count,
                         const std::vector<std::int64_t>& sizes,
                         const std::vector<std::int64_t>& strides) {
    return bytes::tensor(bytes::storage("FloatStorage", key, count), 0, sizes, strides);
  };
  const std::string ordered = bytes::empty_ordered_dict();
  return bytes::zip(
      ordered + "(" + bytes::text("weight") + tensor("0", 6, {2, 3}, {3, 1}) + bytes::text("bias") +
          tensor("1", 2, {2}, {1}) + "u}" + bytes::text("_metadata") + ordered + bytes::text("") +
          "}" + bytes::text("version") + "K" + bytes::byte(1) + "sssb",
      {{"0", std::string(24, '\0')}, {"1", std::string("\0\0\x80\x3f\1\0\x80\x3f", 8)}});
}

TEST(StateDict, LoadsPythonFile) {
  const test_support::TempDir temp_dir;
  const auto file = temp_dir.write("model.pt", bare_state_dict());
  torch::nn::Linear model(3, 2), other(3, 2);
  torch::nn::Linear wide(4, 2);
  mezzo::load_checkpoint(file, TrainingState().add("anything", model));
  mezzo::load_state_dict(file, other);
  for (const auto& loaded : {model, other}) {
    EXPECT_EQ(loaded->weight.abs().max().item<float>(), 0);
    EXPECT_EQ(loaded->bias[0].item<float>(), 1);
  }
  EXPECT_THAT(
      message_of([&] { mezzo::load_state_dict(file, wide); }),
      HasSubstr("size mismatch for weight: float32 [2, 3] in the checkpoint, float32 [2, 4] in the "
                "current model"));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  EXPECT_THAT(message_of([&] {
                mezzo::load_checkpoint(
                    file, TrainingState().add("model", model).add("optimizer", optimizer));
              }),
              HasSubstr("missing name(s): \"model\", \"optimizer\""));
}

TEST(StateDict, CastsFloat32WithWarning) {
  const test_support::TempDir temp_dir;
  const auto file = temp_dir.write("model.pt", bare_state_dict());
  torch::nn::Linear model(3, 2);
  model->to(torch::kBFloat16);
  test_support::WarningRecorder warnings;
  mezzo::load_state_dict(file, model);
  EXPECT_EQ(model->bias.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(model->bias.equal(torch::ones({2}, torch::kBFloat16)));
  EXPECT_THAT(warnings.texts,
              testing::ElementsAre(
                  AllOf(HasSubstr("2 tensors"), HasSubstr("\"weight\" from float32 to bfloat16"))));
}

TEST(StateDict, RoundTrips) {
  const test_support::TempDir temp_dir;
  const auto file = temp_dir / "model.pt";
  torch::nn::Sequential saved(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  torch::nn::Sequential loaded(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  EXPECT_EQ(mezzo::save_state_dict(file, saved).path, file);
  mezzo::load_state_dict(file, loaded);
  EXPECT_TRUE(loaded->parameters()[0].equal(saved->parameters()[0]));
  mezzo::save_checkpoint(file, TrainingState().add("model", saved));
  mezzo::load_state_dict(file, loaded);
#ifdef MEZZO_PYTHON_WITH_TORCH
  mezzo::save_state_dict(file, saved);
  EXPECT_EQ(output_of_python(R"(
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
print(model.load_state_dict(torch.load(sys.argv[1])))
)",
                             file),
            "<All keys matched successfully>\nstatus 0");
#endif
}

}  // namespace
