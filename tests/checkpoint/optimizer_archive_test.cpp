// An optimizer loads an archive of torch::save or Python only if it matches class and parameters;
// otherwise it throws and changes nothing.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/archive_conversion.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/muon.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/pickle_bytes.h"
#include "../support/temp_dir.h"

namespace optimizer_archive {
namespace {

using mezzo::TrainingState;
using test_support::message_of;
using test_support::TempDir;
using testing::AllOf;
using testing::HasSubstr;

/// A model of two matrices of 4,096 elements in two groups, and an optimizer of it.
struct Training {
  explicit Training(const std::function<std::unique_ptr<torch::optim::Optimizer>(
                        std::vector<torch::optim::OptimizerParamGroup>)>& make)
      : optimizer(make({{{weights[0]}}, {{weights[1]}}})) {}

  void step(int steps = 2) {
    for (int i = 0; i < steps; ++i) {
      for (torch::Tensor& weight : weights) {
        weight.mutable_grad() = torch::full_like(weight, 0.5 - i);
      }
      optimizer->step();
    }
  }
  std::string archive() const {
    torch::serialize::OutputArchive archive;
    optimizer->save(archive);
    std::ostringstream bytes;
    archive.save_to(bytes);
    return bytes.str();
  }
  std::string load_error(const std::string& bytes) {
    return message_of([&] {
      std::istringstream stream(bytes);
      torch::serialize::InputArchive archive;
      archive.load_from(stream);
      optimizer->load(archive);
    });
  }
  /// Bytes of weights, state and options, which a rejected archive must not change.
  std::string bits() const {
    std::string all;
    for (const torch::Tensor& weight : weights) {
      all.append(static_cast<const char*>(weight.const_data_ptr()), weight.nbytes());
    }
    return all + archive();
  }

  std::vector<torch::Tensor> weights{torch::ones({64, 64}).requires_grad_(),
                                     torch::ones({32, 128}).requires_grad_()};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

template <class Optimizer, class Options>
auto make_factory(Options options) {
  return [options](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::unique_ptr<torch::optim::Optimizer>(
        std::make_unique<Optimizer>(std::move(groups), options));
  };
}

struct OptimizerClass {
  const char* name;  // in files
  std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<torch::optim::OptimizerParamGroup>)>
      make;
  bool is_mezzo_class;
};

std::vector<OptimizerClass> classes() {
  namespace mezzo_optim = mezzo::optim;
  namespace torch_optim = torch::optim;
  return {
      {"AdamW", make_factory<mezzo_optim::AdamW>(torch_optim::AdamWOptions(1e-3)), true},
      {"Adam", make_factory<mezzo_optim::Adam>(torch_optim::AdamOptions(1e-3)), true},
      {"SGD", make_factory<mezzo_optim::SGD>(torch_optim::SGDOptions(1e-3).momentum(0.9)), true},
      {"Lion", make_factory<mezzo_optim::Lion>(mezzo_optim::LionOptions(1e-3)), true},
      {"LAMB", make_factory<mezzo_optim::LAMB>(mezzo_optim::LAMBOptions(1e-3)), true},
      {"Muon", make_factory<mezzo_optim::Muon>(mezzo_optim::MuonOptions(1e-3)), true},
      {"AdamW8bit", make_factory<mezzo_optim::AdamW8bit>(torch_optim::AdamWOptions(1e-3)), true},
      {"AdamW", make_factory<torch_optim::AdamW>(torch_optim::AdamWOptions(1e-3)), false},
      {"Adam", make_factory<torch_optim::Adam>(torch_optim::AdamOptions(1e-3)), false},
      {"SGD", make_factory<torch_optim::SGD>(torch_optim::SGDOptions(1e-3).momentum(0.9)), false},
      {"RMSprop", make_factory<torch_optim::RMSprop>(torch_optim::RMSpropOptions(1e-3)), false},
      {"Adagrad", make_factory<torch_optim::Adagrad>(torch_optim::AdagradOptions(1e-3)), false},
  };
}

/// Returns whether archives of the two classes are indistinguishable: libtorch's archives store no
/// class, and those of Adam and AdamW have the same keys.
bool look_alike(const OptimizerClass& saved, const OptimizerClass& loaded) {
  const std::string a = saved.name, b = loaded.name;
  return !saved.is_mezzo_class && (a == "Adam" || a == "AdamW") && (b == "Adam" || b == "AdamW");
}

TEST(OptimizerArchive, OtherClassArchiveThrowsWithoutChanges) {
  for (const OptimizerClass& saved : classes()) {
    Training source(saved.make);
    source.step();
    for (const OptimizerClass& loaded : classes()) {
      if (!loaded.is_mezzo_class) continue;  // libtorch's load checks nothing
      Training run(loaded.make);
      run.step(1);
      const std::string before = run.bits(), error = run.load_error(source.archive());
      const bool fits = std::string(saved.name) == loaded.name || look_alike(saved, loaded);
      EXPECT_EQ(error == "no error", fits)
          << saved.name << " into " << loaded.name << ": " << error;
      if (fits) continue;
      EXPECT_THAT(error, AllOf(HasSubstr(loaded.name), HasSubstr("load ")));
      EXPECT_EQ(run.bits(), before) << saved.name << " into " << loaded.name;
    }
  }
}

TEST(OptimizerArchive, OtherClassCheckpointThrowsWithoutChanges) {
  const TempDir temp_dir;
  const auto file = temp_dir / "state.pt";
  for (const OptimizerClass& saved : classes()) {
    Training source(saved.make);
    source.step();
    torch::Tensor first = torch::zeros({1});
    mezzo::save_checkpoint(file, TrainingState().add("first", first).add("x", source.optimizer));
    for (const OptimizerClass& loaded : classes()) {
      Training run(loaded.make);
      run.step(1);
      first.fill_(7);
      const std::string before = run.bits(),
                        error = message_of([&] {
                          mezzo::load_checkpoint(
                              file, TrainingState().add("first", first).add("x", run.optimizer));
                        });
      const bool fits = std::string(saved.name) == loaded.name;
      EXPECT_EQ(error == "no error", fits)
          << saved.name << " into " << loaded.name << ": " << error;
      if (!fits) {
        EXPECT_EQ(run.bits(), before);
        EXPECT_EQ(first.item<float>(), 7);
      }
    }
  }
}

TEST(OptimizerArchive, LoadBeforeFirstStepClearsMoments) {
  for (const OptimizerClass& one : classes()) {
    if (!one.is_mezzo_class) continue;
    Training fresh(one.make), run(one.make), twin(one.make);
    run.step();
    ASSERT_EQ(run.load_error(fresh.archive()), "no error") << one.name;
    for (std::size_t i = 0; i < run.weights.size(); ++i) {
      run.weights[i].detach().copy_(twin.weights[i].detach());
    }
    run.step(1), twin.step(1);
    EXPECT_TRUE(run.weights[0].equal(twin.weights[0])) << one.name;
  }
}

TEST(OptimizerArchive, ThrowsForNegativeStepCount) {
  for (const OptimizerClass& one : classes()) {
    if (!one.is_mezzo_class || std::string(one.name) == "Muon") continue;  // counts no steps
    Training source(one.make), run(one.make);
    source.step(), run.step();
    torch::serialize::OutputArchive archive;
    source.optimizer->save(archive);
    // In the last group: a loader without prior checks would have loaded the first one.
    auto& module = mezzo::detail::get_module(archive);
    const std::string id =
        std::to_string(reinterpret_cast<std::uintptr_t>(source.weights[1].unsafeGetTensorImpl()));
    module.attr("state").toModule().attr(id).toModule().setattr("step", std::int64_t{-3});
    std::ostringstream bytes;
    archive.save_to(bytes);
    const std::string before = run.bits();
    EXPECT_THAT(run.load_error(bytes.str()), HasSubstr("has step -3")) << one.name;
    EXPECT_EQ(run.bits(), before) << one.name;
  }
}

// libtorch parses the keys of states as integers: "07" would be read as 7.
TEST(OptimizerArchive, ThrowsForMisspelledStateKey) {
  Training source(classes().front().make), run(classes().front().make);
  source.step(), run.step();
  torch::serialize::OutputArchive archive;
  source.optimizer->save(archive);
  auto states = mezzo::detail::get_module(archive).attr("state").toModule();
  const std::string id =
      std::to_string(reinterpret_cast<std::uintptr_t>(source.weights[1].unsafeGetTensorImpl()));
  states.register_module("0" + id, states.attr(id).toModule());
  std::ostringstream bytes;
  archive.save_to(bytes);
  const std::string before = run.bits();
  EXPECT_THAT(run.load_error(bytes.str()), HasSubstr("has a state under \"0" + id));
  EXPECT_EQ(run.bits(), before);
}

TEST(OptimizerArchive, StepThrowsForOtherClassState) {
  Training lamb(classes()[4].make), muon(classes()[5].make), bits8(classes()[6].make);
  lamb.step(), muon.step(), bits8.step();
  const auto error_after_copy = [](Training& from, Training& to) {
    to.optimizer->state()[to.weights[0].unsafeGetTensorImpl()] =
        from.optimizer->state().at(from.weights[0].unsafeGetTensorImpl())->clone();
    return message_of([&] { to.step(1); });
  };
  EXPECT_THAT(error_after_copy(muon, lamb), HasSubstr("LAMB: the state of parameter 0"));
  EXPECT_THAT(error_after_copy(bits8, muon), HasSubstr("Muon: the state of parameter 0"));
  Training other(classes()[5].make);
  other.step();
  EXPECT_THAT(error_after_copy(other, bits8), HasSubstr("AdamW8bit: the state of parameter 0"));
}

// --- Python's files ------------------------------------------------------------------------------

namespace bytes = test_support::pickle_bytes;

std::string real(double value) {
  std::uint64_t number = 0;
  std::memcpy(&number, &value, sizeof number);
  std::string text = bytes::number(number, 8);
  return "G" + std::string(text.rbegin(), text.rend());
}

/// The state_dict of an optimizer in Python over one parameter of the shape [4].
std::string python_state(const std::string& state,
                         const std::vector<std::pair<std::string, std::string>>& options) {
  auto group = options;
  group.emplace_back("lr", real(0.5));
  group.emplace_back("params", "]K" + bytes::byte(0) + "a");
  return bytes::dict({{"state", "}K" + bytes::byte(0) + state + "s"},
                      {"param_groups", "]" + bytes::dict(group) + "a"}});
}

const std::string kFour = bytes::tensor(bytes::storage("FloatStorage", "0", 4), 0, {4}, {1});
const std::string kOne = bytes::tensor(bytes::storage("FloatStorage", "1", 1), 0, {}, {});

struct PythonFile {
  const char* name;
  std::string state;
  const char* error;
};

std::vector<PythonFile> python_files() {
  using bytes::dict;
  const std::vector<std::pair<std::string, std::string>> adamw{
      {"betas", real(0.9) + real(0.99) + "\x86"},
      {"eps", real(1e-8)},
      {"weight_decay", "K" + bytes::byte(0)},
      {"amsgrad", "\x89"}};
  const std::string moments = dict({{"step", kOne}, {"exp_avg", kFour}, {"exp_avg_sq", kFour}});
  auto ints = adamw, wrong = adamw, of_text = adamw;
  ints[0].second = "K" + bytes::byte(0) + real(0.99) + "\x86";
  wrong[0].second = real(3) + real(0.99) + "\x86";
  of_text[0].second = bytes::text("betas");
  const std::string bytes_of_codes =
      bytes::tensor(bytes::storage("ByteStorage", "0", 4), 0, {4}, {1});
  return {
      {"AdamW", python_state(moments, adamw), "no error"},
      {"IntegerBetas", python_state(moments, ints), "no error"},
      {"SGD",
       python_state(dict({{"momentum_buffer", kFour}}),
                    {{"momentum", real(0.9)}, {"dampening", real(0)}, {"nesterov", "\x89"}}),
       "lacks"},
      {"RMSprop",
       python_state(dict({{"step", kOne}, {"square_avg", kFour}}),
                    {{"alpha", real(0.9)}, {"eps", real(0)}, {"centered", "\x89"}}),
       "lacks"},
      {"OtherMoments", python_state(dict({{"step", kOne}, {"square_avg", kFour}}), adamw),
       "square_avg"},
      {"MissingMoment", python_state(dict({{"step", kOne}, {"exp_avg", kFour}}), adamw),
       "lacks .exp_avg_sq"},
      {"ByteMoment",
       python_state(dict({{"step", kOne}, {"exp_avg", bytes_of_codes}, {"exp_avg_sq", kFour}}),
                    adamw),
       "floating dtype"},
      {"MomentOfOtherShape",
       python_state(dict({{"step", kOne}, {"exp_avg_sq", kFour}, {"exp_avg", kOne}}), adamw),
       "shape"},
      {"StringMoment",
       python_state(dict({{"step", kOne}, {"exp_avg", bytes::text("a")}, {"exp_avg_sq", kFour}}),
                    adamw),
       "not a tensor"},
      {"StringOption", python_state(moments, of_text), "another class|corrupt|uple"},
  };
}

TEST(OptimizerFromPython, InvalidStateThrowsWithoutChanges) {
  const TempDir temp_dir;
  for (const OptimizerClass& loaded : {classes()[0], classes()[7]}) {
    for (const PythonFile& saved : python_files()) {
      torch::Tensor first = torch::zeros({4}), weight = torch::ones({4}).requires_grad_();
      const auto optimizer = loaded.make({{{weight}}});
      const auto step = [&] {
        weight.mutable_grad() = torch::ones({4});
        optimizer->step();
      };
      step();
      const auto bits = [&] {
        torch::serialize::OutputArchive archive;
        optimizer->save(archive);
        std::ostringstream text;
        archive.save_to(text);
        return text.str();
      };
      const std::string before = bits();
      const auto file = temp_dir.write(
          "x.pt",
          bytes::zip(bytes::dict({{"first", kFour}, {"x", saved.state}}),
                     {{"0", std::string(16, '\0')}, {"1", std::string(2, '\0') + "\x80\x3f"}}));
      first.fill_(7);
      const std::string error = message_of([&] {
        mezzo::load_checkpoint(file, TrainingState().add("first", first).add("x", *optimizer));
      });
      EXPECT_THAT(error, testing::ContainsRegex(saved.error)) << saved.name;
      EXPECT_THAT(error, testing::Not(HasSubstr("INTERNAL ASSERT"))) << saved.name;
      if (error != "no error") {
        EXPECT_EQ(bits(), before) << saved.name;
        EXPECT_EQ(first[0].item<float>(), 7) << saved.name;
      }
      step();
    }
  }
}

// --- Masters -------------------------------------------------------------------------------------

TEST(MasterWeightsArchive, LoadsOptionsWithoutLr) {
  struct Options : torch::optim::OptimizerCloneableOptions<Options> {
    Options(double = 0) {}
    void serialize(torch::serialize::InputArchive&) override {}
    void serialize(torch::serialize::OutputArchive&) const override {}
  };
  struct Plain : torch::optim::Optimizer {
    explicit Plain(std::vector<torch::Tensor> all)
        : Optimizer(std::move(all), std::make_unique<Options>()) {}
    torch::Tensor step(LossClosure) override { return {}; }
    void save(torch::serialize::OutputArchive& archive) const override {
      torch::optim::serialize<torch::optim::SGDParamState, Options>(archive, *this);
    }
    void load(torch::serialize::InputArchive& archive) override {
      torch::optim::serialize<torch::optim::SGDParamState, Options>(archive, *this);
    }
  };
  const auto weight = torch::ones({2}, torch::kBFloat16).requires_grad_();
  Plain inner({weight});
  mezzo::MasterWeights masters(inner);
  (void)masters.master_param(weight);
  std::stringstream stream;
  torch::save(masters, stream);
  EXPECT_EQ(message_of([&] { torch::load(masters, stream); }), "no error");
}

TEST(MasterWeightsArchive, OtherInnerClassThrowsWithoutChanges) {
  const auto weight = torch::ones({2}, torch::kBFloat16).requires_grad_();
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::RMSprop rmsprop({weight}, 0.1);
  mezzo::MasterWeights of_sgd(sgd), of_rmsprop(rmsprop);
  weight.mutable_grad() = torch::ones_like(weight);
  of_sgd.step(), of_rmsprop.step();
  std::stringstream stream, before, after;
  torch::save(of_sgd, stream);
  torch::save(of_rmsprop, before);
  EXPECT_THAT(message_of([&] { torch::load(of_rmsprop, stream); }),
              AllOf(HasSubstr("masters of SGD"), HasSubstr("RMSprop")));
  torch::save(of_rmsprop, after);
  EXPECT_EQ(before.str(), after.str());
}

}  // namespace
}  // namespace optimizer_archive
