// What goes into a checkpoint comes back: bit for bit, all of it or nothing.

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mezzo/checkpoint.h>
#include <mezzo/ema.h>
#include <mezzo/grad_scaler.h>
#include <mezzo/lr_schedule.h>
#include <mezzo/master_weights.h>
#include <torch/csrc/jit/frontend/lexer.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../grad_scaler/error_of.h"
#include "../optim/optimizers.h"
#include "scratch.h"

namespace {

using checkpoint_test::Scratch;
using grad_scaler_test::error_of;
using mezzo::Checkpoints;
using mezzo::TrainingState;
using mezzo::optim::WeightStorage;
using testing::AllOf;
using testing::HasSubstr;

mezzo::optim::AdamW make(std::vector<torch::Tensor> parameters, WeightStorage storage) {
  return mezzo::optim::AdamW(
      std::move(parameters),
      mezzo::optim::AdamWOptions(1e-2).weight_storage(storage).ema_decay(0.9).seed(7));
}

/// A run with dropout, a scaler that grows and skips, a schedule and averages.
template <class Optimizer>
class InterruptedTraining {
 public:
  template <class MakeOptimizer>
  InterruptedTraining(at::ScalarType dtype, MakeOptimizer make_optimizer)
      : model(torch::nn::Linear(8, 16), torch::nn::BatchNorm1d(16), torch::nn::Dropout(0.5),
              torch::nn::Linear(16, 4)),
        optimizer((model->to(dtype), make_optimizer(model->parameters()))),
        ema(model->parameters(), {.decay = 0.8}),
        schedule(optimizer, {.warmup_steps = 3, .total_steps = 40}),
        dtype_(dtype) {
    scaler.on_skip(nullptr);
    state.add("model", model).add("optimizer", optimizer).add("ema", ema);
    state.add("scaler", scaler).add("schedule", schedule).add("position", position);
    state.add("order", order).add("own generator", own_random).with_random_state();
  }

  void step() {
    optimizer.zero_grad();
    const torch::Tensor input = torch::randn({6, 8}).to(dtype_);
    torch::Tensor loss = model->forward(input).to(torch::kFloat).square().mean();
    const bool overflows = position % 5 == 3;
    if (overflows) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);
    ema.update(result);
    order = torch::randperm(10, own_random);
    ++position;
  }

  /// All that training has come to.
  std::vector<torch::Tensor> outcome() {
    std::vector<torch::Tensor> all;
    for (const auto& tensor : model->parameters()) all.push_back(tensor.detach().clone());
    for (const auto& tensor : model->buffers()) all.push_back(tensor.clone());
    for (const auto& tensor : ema.averages()) all.push_back(tensor.clone());
    if constexpr (std::derived_from<Optimizer, mezzo::optim::FusedOptimizer>) {
      for (const auto& tensor : model->parameters()) {
        all.push_back(optimizer.average_of(tensor).clone());
      }
    }
    for (const auto& [key, value] : scaler.state_dict()) all.push_back(torch::tensor(value));
    for (const double lr : schedule.lrs()) all.push_back(torch::tensor(lr, torch::kDouble));
    all.push_back(torch::tensor(position));
    all.push_back(order.clone());
    all.push_back(torch::rand({3}));
    all.push_back(torch::rand({3}, own_random));
    return all;
  }

  torch::nn::Sequential model;
  Optimizer optimizer;
  mezzo::Ema ema;
  mezzo::LinearSchedule schedule;
  mezzo::GradScaler scaler{mezzo::GradScalerOptions().init_scale(8).growth_interval(3)};
  int64_t position = 0;
  torch::Tensor order;
  at::Generator own_random = at::detail::createCPUGenerator(11);
  TrainingState state;

 private:
  at::ScalarType dtype_;
};

/// Trains through, and again from another beginning with a checkpoint of the middle.
template <class Optimizer, class MakeOptimizer>
void expect_same_bits_after_resuming(at::ScalarType dtype, MakeOptimizer make_optimizer) {
  const Scratch scratch;
  torch::manual_seed(1);
  InterruptedTraining<Optimizer> whole(dtype, make_optimizer);
  for (int i = 0; i < 9; ++i) whole.step();
  Checkpoints(scratch.path()).save(whole.state, whole.position);
  for (int i = 0; i < 9; ++i) whole.step();
  const auto expected = whole.outcome();

  torch::manual_seed(2);
  InterruptedTraining<Optimizer> resumed(dtype, make_optimizer);
  resumed.step();  // has state of its own, which must leave no trace
  const auto loaded = Checkpoints(scratch.path()).load_newest(resumed.state);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->step, 9);
  for (int i = 0; i < 9; ++i) resumed.step();

  const auto actual = resumed.outcome();
  ASSERT_EQ(expected.size(), actual.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(expected[i], actual[i])) << i << '\n' << expected[i] << actual[i];
  }
}

TEST(CheckpointResume, IsBitExactWithMezzosAdamW) {
  expect_same_bits_after_resuming<mezzo::optim::AdamW>(
      torch::kFloat, [](auto parameters) { return make(parameters, WeightStorage::plain); });
}

TEST(CheckpointResume, IsBitExactWithMastersInFloat) {
  expect_same_bits_after_resuming<mezzo::optim::AdamW>(
      torch::kBFloat16, [](auto parameters) { return make(parameters, WeightStorage::master); });
}

TEST(CheckpointResume, IsBitExactWithSplitMasters) {
  expect_same_bits_after_resuming<mezzo::optim::AdamW>(torch::kBFloat16, [](auto parameters) {
    return make(parameters, WeightStorage::split_master);
  });
}

TEST(CheckpointResume, IsBitExactWithStochasticRounding) {
  expect_same_bits_after_resuming<mezzo::optim::AdamW>(torch::kBFloat16, [](auto parameters) {
    return make(parameters, WeightStorage::stochastic);
  });
}

TEST(CheckpointResume, IsBitExactWithLibtorchsAdamW) {
  expect_same_bits_after_resuming<torch::optim::AdamW>(torch::kFloat, [](auto parameters) {
    return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(1e-2));
  });
}

/// One layer in two places, whose averages are of masters that another optimizer than mezzo's has.
struct Mastered {
  Mastered() {
    scaler.on_skip(nullptr);
    state.add("model", model).add("optimizer", optimizer).add("ema", ema).add("scaler", scaler);
    state.add("schedule", schedule);
  }
  void step(float scale_of_loss) {
    optimizer.zero_grad();
    const torch::Tensor loss = model->forward(torch::ones({1, 4}, torch::kHalf)).sum();
    scaler.scale(loss * scale_of_loss).backward();
    const auto result = scaler.step(optimizer);
    scaler.update();
    schedule.step(result);
    ema.update(result);
  }

  torch::nn::Linear tied = [] {
    torch::nn::Linear layer(4, 4);
    layer->to(torch::kHalf);
    return layer;
  }();
  torch::nn::Sequential model{tied, torch::nn::ReLU(), tied};
  torch::optim::AdamW adamw{tied->parameters(), torch::optim::AdamWOptions(1e-3)};
  mezzo::MasterWeights optimizer{adamw};
  mezzo::Ema ema{tied->parameters(),
                 {.decay = 0.9, .masters = [this] { return mezzo::master_params(optimizer); }}};
  mezzo::GradScaler scaler{mezzo::GradScalerOptions().init_scale(8).growth_interval(2)};
  mezzo::CosineSchedule schedule{optimizer, {.warmup_steps = 2, .total_steps = 20}};
  TrainingState state;
};

TEST(CheckpointResume, IsBitExactWithMasterWeightsTheirAveragesAndTiedLayers) {
  const Scratch scratch;
  torch::manual_seed(3);
  Mastered whole, resumed;
  for (const float scale : {1.0F, 1e30F, 2.0F, 1.0F}) whole.step(scale);
  const auto file = Checkpoints(scratch.path()).save(whole.state, 4).file;
  resumed.step(1.0F);
  mezzo::load_checkpoint(file, resumed.state);
  for (const float scale : {0.5F, 1e30F, 1.0F}) whole.step(scale), resumed.step(scale);
  EXPECT_EQ(whole.scaler.state_dict(), resumed.scaler.state_dict());
  EXPECT_EQ(whole.optimizer.applied_steps(), 5);
  const auto expect_same = [](const auto& expected, const auto& actual) {
    ASSERT_EQ(expected.size(), actual.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::equal(expected[i], actual[i])) << i << expected[i] << actual[i];
    }
  };
  expect_same(whole.model->parameters(), resumed.model->parameters());
  expect_same(mezzo::master_params(whole.optimizer), mezzo::master_params(resumed.optimizer));
  expect_same(whole.ema.averages(), resumed.ema.averages());
}

TEST(CheckpointResume, LeavesNothingOfWhatOptimizerAndScheduleHadBefore) {
  const Scratch scratch;
  torch::Tensor weight = torch::ones({2}).requires_grad_();
  torch::optim::AdamW fresh({weight}, 0.1), used({weight}, 0.5);
  mezzo::LinearSchedule saved(fresh, {.total_steps = 10}), loaded(used, {.total_steps = 10});
  weight.mutable_grad() = torch::ones({2});
  used.step();
  loaded.step();
  const auto state = [](auto& optimizer, auto& schedule) {
    return TrainingState().add("optimizer", optimizer).add("schedule", schedule);
  };
  const auto file = Checkpoints(scratch.path()).save(state(fresh, saved), 0).file;
  mezzo::load_checkpoint(file, state(used, loaded));
  EXPECT_TRUE(used.state().empty());
  EXPECT_EQ(loaded.applied_steps(), 0);
  EXPECT_EQ(loaded.base_lrs(), std::vector<double>{0.1});
  EXPECT_EQ(loaded.lrs(), std::vector<double>{0.1});
}

/// Values of every kind.
struct Values {
  Values() {
    state.add("model", model).add("shared", shared).add("integer", integer).add("small", small);
    state.add("flag", flag).add("real", real).add("text", text).add("tensor", tensor);
  }

  torch::nn::Linear model{2, 3};
  std::shared_ptr<torch::nn::LinearImpl> shared = std::make_shared<torch::nn::LinearImpl>(3, 1);
  int64_t integer = std::numeric_limits<int64_t>::min();
  std::uint8_t small = 200;
  bool flag = true;
  double real = 0.1;
  std::string text = std::string("a\0b\n", 4);
  torch::Tensor tensor = torch::arange(1000).select(0, 3);
  TrainingState state;
};

TEST(Checkpoint, ValuesOfEveryKindComeBack) {
  const Scratch scratch;
  Values saved, loaded;
  const auto file = Checkpoints(scratch.path()).save(saved.state, 0);
  EXPECT_LT(file.bytes, 20000U) << "a view takes its own bytes, not its storage's";
  loaded.integer = 0, loaded.small = 0, loaded.flag = false, loaded.real = 0, loaded.text = "";
  loaded.tensor = torch::Tensor();
  mezzo::load_checkpoint(file.file, loaded.state);
  EXPECT_EQ(loaded.integer, saved.integer);
  EXPECT_EQ(loaded.small, 200);
  EXPECT_TRUE(loaded.flag);
  EXPECT_EQ(loaded.real, 0.1);
  EXPECT_EQ(loaded.text, saved.text);
  EXPECT_TRUE(torch::equal(loaded.tensor, saved.tensor));
  EXPECT_TRUE(torch::equal(loaded.model->weight, saved.model->weight));
  EXPECT_TRUE(torch::equal(loaded.shared->bias, saved.shared->bias));
}

torch::Tensor dense(torch::Tensor tensor) {
  if (tensor.layout() != torch::kStrided) tensor = tensor.to_dense();
  if (tensor.is_quantized()) tensor = tensor.dequantize();
  return tensor.resolve_conj().resolve_neg();
}

TEST(Checkpoint, TensorsOfAnyKindComeBackOverOthersAndWhereThereWasNone) {
  const torch::Tensor complex = torch::randn({3}, torch::kComplexFloat);
  for (const torch::Tensor& saved :
       {torch::rand({3, 4}).t(), torch::ones({1}).expand({5}), torch::zeros({0, 3}),
        torch::rand({9}).slice(0, 2, 2), torch::rand({3, 3}).to_sparse(), complex.conj(),
        torch::imag(complex.conj()), torch::ones({2}, torch::kBool),
        torch::quantize_per_tensor(torch::rand({4}), 0.1, 0, torch::kQInt8),
        torch::rand({3}).to(torch::kFloat8_e4m3fn)}) {
    const Scratch scratch;
    torch::Tensor given = saved, over = saved.clone(), none;
    const auto file = Checkpoints(scratch.path()).save(TrainingState().add("x", given), 0).file;
    if (!over.is_sparse() && !over.is_quantized()) over.zero_();
    mezzo::load_checkpoint(file, TrainingState().add("x", over));
    mezzo::load_checkpoint(file, TrainingState().add("x", none));
    for (const torch::Tensor& loaded : {over, none}) {
      EXPECT_EQ(loaded.scalar_type(), saved.scalar_type());
      EXPECT_TRUE(dense(loaded).equal(dense(saved))) << loaded << saved;
    }
  }
}

TEST(Checkpoint, AModuleGivenToItsHolderLaterIsTheOneThatIsSavedAndLoaded) {
  const Scratch scratch;
  torch::nn::Linear model(1, 1);
  std::shared_ptr<torch::nn::LinearImpl> none;
  TrainingState state;
  state.add("model", model);
  model = torch::nn::Linear(1, 1);
  const torch::Tensor weight = model->weight.detach().clone();
  const auto file = Checkpoints(scratch.path()).save(state, 0).file;
  model = torch::nn::Linear(1, 1);
  mezzo::load_checkpoint(file, state);
  EXPECT_TRUE(torch::equal(model->weight, weight));
  EXPECT_THAT(error_of([&] { state.add("none", none); }), HasSubstr("a holder has no module"));
}

/// Saves under the names of `saver`, and says what loading into `loader` throws.
std::string error_between(const TrainingState& saver, const TrainingState& loader,
                          const mezzo::LoadOptions& options = {}) {
  const Scratch scratch;
  const auto file = Checkpoints(scratch.path()).save(saver, 0).file;
  return error_of([&] { mezzo::load_checkpoint(file, loader, options); });
}

TEST(Checkpoint, NamesThatAreMissingOrExtraAreNamed) {
  int64_t a = 1, b = 2, c = 3;
  EXPECT_THAT(error_between(TrainingState().add("a", a).add("b", b),
                            TrainingState().add("a", a).add("c", c)),
              AllOf(HasSubstr("lacks \"c\""), HasSubstr("has \"b\""), HasSubstr("nothing was")));
  EXPECT_EQ(error_between(TrainingState().add("a", b).add("b", b), TrainingState().add("a", a),
                          {.subset = true}),
            "no error");
  EXPECT_EQ(a, 2);
}

TEST(Checkpoint, AnotherKindOrShapeIsNamedBeforeAnythingIsLoaded) {
  int64_t number = 1;
  double real = 2;
  EXPECT_THAT(error_between(TrainingState().add("x", real), TrainingState().add("x", number)),
              AllOf(HasSubstr("\"real number\" there"), HasSubstr("\"integer\" here")));
  int64_t large = 300;
  std::uint8_t small = 5;
  EXPECT_THAT(error_between(TrainingState().add("x", large), TrainingState().add("x", small)),
              HasSubstr("integer 300, which the variable's type cannot hold"));
  double huge = 1e300, infinite = std::numeric_limits<double>::infinity();
  float single = 5;
  EXPECT_THAT(error_between(TrainingState().add("x", huge), TrainingState().add("x", single)),
              HasSubstr("real number 1e+300, which the variable's type cannot hold"));
  EXPECT_EQ(single, 5);
  EXPECT_EQ(error_between(TrainingState().add("x", infinite), TrainingState().add("x", single)),
            "no error");
  EXPECT_EQ(single, infinite);
  torch::Tensor whole_numbers = torch::arange(3), floats = torch::zeros({3});
  EXPECT_THAT(
      error_between(TrainingState().add("x", whole_numbers), TrainingState().add("x", floats)),
      HasSubstr("it is Long Strided in the file, and Float Strided here"));
  EXPECT_TRUE(torch::equal(floats, torch::zeros({3})));
  torch::nn::Linear narrow(2, 3), wide(4, 3), plain(torch::nn::LinearOptions(2, 3).bias(false));
  torch::nn::Linear half(2, 3);
  half->to(torch::kHalf);
  const auto error = [](torch::nn::Linear saved, torch::nn::Linear loaded) {
    const torch::Tensor before = loaded->weight.detach().clone();
    const std::string text =
        error_between(TrainingState().add("m", saved), TrainingState().add("m", loaded));
    EXPECT_TRUE(torch::equal(loaded->weight, before));
    return text;
  };
  EXPECT_THAT(error(narrow, wide),
              HasSubstr("parameter weight is Float [3, 2] in the file, and Float [3, 4] here"));
  EXPECT_THAT(error(narrow, half), HasSubstr("and Half [3] here"));
  EXPECT_THAT(error(narrow, plain), HasSubstr("the file has the parameter bias"));
  EXPECT_THAT(error(plain, narrow), HasSubstr("the file lacks the parameter bias"));
}

TEST(Checkpoint, WhatWasLoadedIsTakenBackWhenALaterObjectRefusesItsPart) {
  const Scratch scratch;
  const auto groups = [](const torch::nn::Linear& model, int number) {
    std::vector<torch::optim::OptimizerParamGroup> all;
    all.emplace_back(std::vector<torch::Tensor>{model->weight});
    if (number > 1) all.emplace_back(std::vector<torch::Tensor>{model->bias});
    return all;
  };
  torch::nn::Linear saved(2, 2), loaded(2, 2);
  torch::Tensor order = torch::arange(3), undefined;
  int64_t epoch = 1;
  torch::optim::AdamW first(groups(saved, 1), {}), second(groups(loaded, 2), {});
  loaded->forward(torch::ones({1, 2})).sum().backward();
  second.step();
  Checkpoints checkpoints(scratch.path());
  TrainingState saver, loader;
  saver.add("epoch", epoch).add("order", order).add("new", order).add("model", saved);
  checkpoints.save(saver.add("optimizer", first), 0);
  torch::Tensor own_order = torch::full({2}, 8);
  int64_t own_epoch = 5;
  loader.add("epoch", own_epoch).add("order", own_order).add("new", undefined);
  loader.add("model", loaded).add("optimizer", second).with_random_state();
  saver.with_random_state();
  checkpoints.save(saver, 1);
  const torch::Tensor weight = loaded->weight.detach().clone();
  const void* const memory = loaded->weight.const_data_ptr();
  const torch::Tensor random = at::globalContext().defaultGenerator(at::kCPU).get_state();
  EXPECT_THAT(error_of([&] { checkpoints.load_newest(loader); }),
              AllOf(HasSubstr("\"optimizer\" cannot be loaded: loaded state dict has a different "
                              "number of parameter groups"),
                    HasSubstr("everything is as it was before")));
  EXPECT_EQ(own_epoch, 5);
  EXPECT_TRUE(torch::equal(own_order, torch::full({2}, 8)));
  EXPECT_FALSE(undefined.defined());
  EXPECT_TRUE(torch::equal(loaded->weight, weight));
  EXPECT_EQ(loaded->weight.const_data_ptr(), memory) << "a split master would lose its rest";
  EXPECT_EQ(second.state().size(), 2U);
  EXPECT_TRUE(torch::equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), random));
}

TEST(Checkpoint, AnObjectThatCannotBeSavedIsNamedAndLeavesTheFolderAsItWas) {
  const Scratch scratch;
  torch::Tensor undefined;
  Checkpoints checkpoints(scratch.path());
  EXPECT_THAT(error_of([&] { checkpoints.save(TrainingState().add("order", undefined), 1); }),
              HasSubstr("\"order\" cannot be saved: the tensor is undefined"));
  EXPECT_TRUE(checkpoints.files().empty());
}

/// A module with one parameter, or one buffer.
struct Holder : torch::nn::Module {
  Holder(const std::string& name, const torch::Tensor& tensor, bool is_buffer) {
    if (is_buffer) {
      register_buffer(name, tensor);
    } else {
      register_parameter(name, tensor);
    }
  }
};

/// What saving and loading it throws, which must be nothing, or the first of the two.
std::string save_error(const std::string& name, const torch::Tensor& tensor, bool is_buffer) {
  const Scratch scratch;
  Holder saved(name, tensor, is_buffer), loaded(name, tensor.clone(), is_buffer);
  std::filesystem::path file;
  const std::string error = error_of(
      [&] { file = Checkpoints(scratch.path()).save(TrainingState().add("m", saved), 0).file; });
  if (file.empty()) return error;
  EXPECT_EQ(error_of([&] { mezzo::load_checkpoint(file, TrainingState().add("m", loaded)); }),
            "no error")
      << name;
  return error;
}

TEST(Checkpoint, NamesThatLibtorchCannotReadBackAreRefusedBeforeAMonthOfTraining) {
  std::vector<std::string> keywords;
#define MEZZO_TEST_KEYWORD(kind, description, text) keywords.push_back(text);
  TC_FORALL_TOKEN_KINDS(MEZZO_TEST_KEYWORD)
#undef MEZZO_TEST_KEYWORD
  int refused = 0;
  for (const std::string& keyword : keywords) {
    if (keyword.empty() || keyword.find('.') != std::string::npos) continue;
    for (const bool is_buffer : {true, false}) {
      if (save_error(keyword, torch::ones({1}), is_buffer) != "no error") ++refused;
    }
  }
  EXPECT_EQ(refused, 2 * 28) << "words";
  for (const char* name : {"a\"b", "a\\b", "a\nb", "__annotations__", "__parameters__"}) {
    EXPECT_THAT(save_error(name, torch::ones({1}), false), HasSubstr("register it by another"));
  }
  for (const char* name : {"a/b", "a b", "0", "a: b", "\xC3\xBC", "weight-1", "lambda", "a'b"}) {
    EXPECT_EQ(save_error(name, torch::ones({1}), false), "no error");
  }
  torch::nn::Sequential nested;
  nested->push_back("in", torch::nn::Dropout());
  const Scratch scratch;
  EXPECT_THAT(
      error_of([&] { Checkpoints(scratch.path()).save(TrainingState().add("m", nested), 0); }),
      HasSubstr("\"in\" in the name \"in\""));
}

TEST(Checkpoint, BuffersThatLibtorchCannotLoadAreRefusedWhenTheyAreSaved) {
  const torch::Tensor complex = torch::randn({3}, torch::kComplexFloat);
  for (const torch::Tensor& buffer :
       {torch::rand({3, 3}).to_sparse(), complex.conj(), torch::imag(complex.conj()),
        torch::quantize_per_tensor(torch::rand({4}), 0.1, 0, torch::kQInt8)}) {
    EXPECT_THAT(save_error("x", buffer, true), HasSubstr("buffer \"x\" is sparse, quantized"));
  }
  for (const torch::Tensor& buffer :
       {torch::zeros({0, 2}), torch::rand({2, 3}).t(), complex, torch::rand({8}).slice(0, 2, 5)}) {
    EXPECT_EQ(save_error("x", buffer, true), "no error");
  }
}

TEST(Checkpoint, AveragesAreNeitherSavedNorOverwrittenAsTrainingWeights) {
  const Scratch scratch;
  torch::nn::Linear model(1, 1);
  model->to(torch::kBFloat16);
  torch::Tensor weight = model->weight;
  auto optimizer = make(model->parameters(), WeightStorage::split_master);
  const mezzo::Ema ema(model->parameters());
  TrainingState models, optimizers, tensors;
  models.add("x", model);
  optimizers.add("x", optimizer);
  tensors.add("x", weight);
  for (const TrainingState* state : {&models, &optimizers, &tensors}) {
    Checkpoints checkpoints(scratch.path());
    checkpoints.save(*state, 1);
    const mezzo::EmaWeights averaged(ema);
    const auto is_named = HasSubstr("holds an average, for an EmaWeights is alive");
    EXPECT_THAT(error_of([&] { checkpoints.save(*state, 2); }), is_named);
    EXPECT_THAT(error_of([&] { checkpoints.load_newest(*state); }), is_named);
    EXPECT_EQ(checkpoints.files().size(), 1U);
    std::filesystem::remove(checkpoints.files()[0]);
  }
}

TEST(Checkpoint, WrongArgumentsAreNamed) {
  int64_t value = 0;
  EXPECT_THAT(error_of([&] { TrainingState().add("a", value).add("a", value); }),
              HasSubstr("\"a\" is given twice"));
  EXPECT_THAT(error_of([&] { TrainingState().add("", value); }), HasSubstr("a name is empty"));
  EXPECT_THAT(error_of([&] { Checkpoints("x", {.keep = 0}); }), HasSubstr("keep is 0"));
  const Scratch scratch;
  EXPECT_THAT(
      error_of([&] { Checkpoints(scratch.path()).save(TrainingState().add("a", value), -1); }),
      HasSubstr("step is -1"));
  EXPECT_THAT(error_of([&] { Checkpoints(scratch.path()).load_newest({}); }),
              HasSubstr("the state is empty"));
}

TEST(Checkpoints, WithoutAHigherNumberNothingIsSaved) {
  const Scratch scratch;
  int64_t value = 0;
  const auto last = scratch.path() / "checkpoint-18446744073709551615-step-0.mezzo";
  checkpoint_test::put_bytes(last, "somebody's");
  EXPECT_THAT(
      error_of([&] { Checkpoints(scratch.path()).save(TrainingState().add("a", value), 1); }),
      AllOf(HasSubstr(last.string()), HasSubstr("move it elsewhere")));
}

TEST(Checkpoints, AFolderWithoutAnyIsAFreshStart) {
  const Scratch scratch;
  int64_t value = 3;
  EXPECT_FALSE(Checkpoints(scratch.path() / "none").load_newest(TrainingState().add("a", value)));
  EXPECT_FALSE(std::filesystem::exists(scratch.path() / "none"));
}

TEST(Checkpoints, KeepTheNewestByWhenTheyWereSavedNotByStep) {
  const Scratch scratch;
  int64_t value = 0;
  TrainingState state;
  state.add("value", value);
  Checkpoints checkpoints(scratch.path() / "deep" / "run", {.keep = 2});
  for (const int64_t step : {900, 1000, 10}) checkpoints.save(state, step);
  ASSERT_EQ(checkpoints.files().size(), 2U);
  EXPECT_EQ(checkpoints.files()[0].filename(), "checkpoint-000003-step-10.mezzo");
  EXPECT_EQ(checkpoints.load_newest(state)->step, 10);
}

TEST(Checkpoints, ASecondWriterIsRefusedAsLongAsTheFirstLives) {
  const Scratch scratch;
  int64_t value = 0;
  const auto state = TrainingState().add("value", value);
  Checkpoints second(scratch.path());
  {
    Checkpoints first(scratch.path());
    first.save(state, 1);
    EXPECT_THAT(error_of([&] { second.save(state, 2); }),
                HasSubstr("is being saved to by another process"));
    EXPECT_EQ(second.load_newest(state)->step, 1);
  }
  second.save(state, 2);
  EXPECT_EQ(second.load_newest(state)->step, 2);
}

TEST(Checkpoints, LeaveOtherFilesAlone) {
  const Scratch scratch;
  int64_t value = 0;
  Checkpoints checkpoints(scratch.path(), {.keep = 1});
  for (const char* name : {"checkpoint-1-step-2.mezzo.bak", "checkpoint-x-step-2.mezzo",
                           ".checkpoint-1-step-2.mezzo.tmp", ".checkpoint-1-step-2.mezzo.7.tmp.x",
                           "checkpoint-1-step-.mezzo", "notes"}) {
    checkpoint_test::put_bytes(scratch.path() / name, "somebody's");
  }
  const auto state = TrainingState().add("value", value);
  checkpoints.save(state, 1);
  checkpoints.save(state, 2);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(scratch.path()), {}), 6 + 2);
}

std::string hex(const mezzo::detail::Sha256Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[std::to_integer<int>(byte) >> 4];
    text += kDigits[std::to_integer<int>(byte) & 15];
  }
  return text;
}

/// FIPS 180-4's examples, and lengths about the ends of blocks against the other implementation.
TEST(Sha256, HasTheStandardsDigestsOnAnyCpuInPiecesOfAnyLength) {
  using mezzo::detail::Sha256;
  const auto digest = [](const std::string& text, std::size_t piece, auto compress) {
    Sha256 sum(compress);
    for (std::size_t i = 0; i < text.size(); i += piece) {
      sum.add(text.data() + i, std::min(piece, text.size() - i));
    }
    return hex(sum.finish());
  };
  const auto plain = &mezzo::detail::sha256_compress_plain;
  const auto best = mezzo::detail::best_sha256_compress();
  for (const auto compress : {plain, best}) {
    EXPECT_EQ(digest("", 1, compress),
              "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(digest("abc", 1, compress),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 7, compress),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(digest(std::string(1000000, 'a'), 4099, compress),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
  for (std::size_t size = 0; size < 200; ++size) {
    const std::string text(size, 'x');
    EXPECT_EQ(digest(text, 64, best), digest(text, 13, plain)) << size;
  }
}

}  // namespace
