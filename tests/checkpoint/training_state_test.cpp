// Objects of a TrainingState: round trips and errors.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>
#include <mezzo/scaling/loss_scale_optimizer.h>

#include <torch/csrc/jit/frontend/lexer.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "../support/temp_dir.h"

namespace {

using mezzo::CheckpointManager;
using mezzo::TrainingState;
using test_support::message_of;
using test_support::TempDir;
using testing::AllOf;
using testing::HasSubstr;

/// Values of every supported type.
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

/// The state of a run; two of them differ only in addresses.
struct DeterministicRun {
  explicit DeterministicRun(std::size_t num_padding_bytes) : heap_padding(num_padding_bytes) {
    for (int step = 0; step < 2; ++step) {
      torch::manual_seed(step);
      for (const auto& parameter : model->parameters()) {
        parameter.mutable_grad() = torch::randn(parameter.sizes());
      }
      theirs.step();
      ours.step();
      masters.step();
    }
    state.add("theirs", theirs).add("ours", ours).add("masters", masters);
  }

  std::vector<char> heap_padding;
  torch::nn::Sequential model = [] {
    torch::manual_seed(3);
    return torch::nn::Sequential(torch::nn::Linear(2, 3), torch::nn::Linear(3, 3));
  }();
  torch::optim::AdamW theirs{model->parameters(), 1e-2};
  mezzo::optim::AdamW ours{model->parameters(), mezzo::optim::AdamWOptions(1e-2)};
  torch::optim::SGD sgd{model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9)};
  mezzo::MasterWeights masters{sgd};
  TrainingState state;
};

/// An object that writes several number types.
struct ComplexAndDevice {
  c10::complex<double> number{};
  c10::Device device = torch::kCPU;
};
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const ComplexAndDevice& object) {
  archive.write("number", c10::IValue(object.number));
  archive.write("device", c10::IValue(object.device));
  return archive;
}
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           ComplexAndDevice& object) {
  c10::IValue number, device;
  archive.read("number", number);
  archive.read("device", device);
  object = {number.toComplexDouble(), device.toDevice()};
  return archive;
}

TEST(TrainingState, RoundTripsCsrComplexAndDevices) {
  const test_support::TempDir temp_dir;
  torch::Tensor csr = torch::eye(3).to_sparse_csr();
  ComplexAndDevice object{{1, 2}, c10::Device(torch::kCUDA, 1)};
  mezzo::save_checkpoint(temp_dir.path() / "file",
                         TrainingState().add("csr", csr).add("object", object), 1);
  csr = torch::Tensor();
  object = {};
  mezzo::load_checkpoint(temp_dir.path() / "file",
                         TrainingState().add("csr", csr).add("object", object));
  EXPECT_TRUE(csr.to_dense().equal(torch::eye(3)));
  EXPECT_EQ(object.number, (c10::complex<double>{1, 2}));
  EXPECT_EQ(object.device, c10::Device(torch::kCUDA, 1));
}

TEST(TrainingState, RoundTripsSparseMomentum) {
  const test_support::TempDir temp_dir;
  for (const bool is_saved : {true, false}) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    torch::optim::SGD optimizer(table->parameters(), torch::optim::SGDOptions(1).momentum(0.9));
    table->forward(torch::zeros({1}, torch::kLong)).sum().backward();
    optimizer.step();
    TrainingState state;
    state.add("optimizer", optimizer);
    if (is_saved) {
      mezzo::save_checkpoint(temp_dir.path() / "file", state, 1);
    } else {
      mezzo::load_checkpoint(temp_dir.path() / "file", state);
    }
    optimizer.step();
  }
}

TEST(TrainingState, BadGeneratorStateThrowsBeforeLoading) {
  const test_support::TempDir temp_dir;
  std::int64_t epoch = 1;
  torch::Tensor bytes = torch::zeros({7}, torch::kByte);
  mezzo::save_checkpoint(temp_dir.path() / "file",
                         TrainingState().add("epoch", epoch).add("generator", bytes), 1);
  epoch = 9;
  at::Generator generator = at::detail::createCPUGenerator(1);
  EXPECT_THAT(message_of([&] {
                mezzo::load_checkpoint(
                    temp_dir.path() / "file",
                    TrainingState().add("epoch", epoch).add("generator", generator));
              }),
              HasSubstr("nothing was loaded"));
  EXPECT_EQ(epoch, 9);
}

// Regression test: the learning rates in the optimizer state overwrote those of the schedule.
TEST(TrainingState, LoadsScheduleAddedBeforeOptimizer) {
  const test_support::TempDir temp_dir;
  const auto weight = [] { return torch::ones({2}).requires_grad_(); };
  std::vector<double> lrs;
  for (const bool is_saved : {true, false}) {
    torch::optim::SGD optimizer({weight()}, /*lr=*/0.5);
    mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 0, .total_steps = 10});
    TrainingState state;
    state.add("schedule", schedule).add("optimizer", optimizer);
    if (is_saved) {
      schedule.set_applied_steps(5);
      mezzo::save_checkpoint(temp_dir.path() / "file", state, 5);
    } else {
      mezzo::load_checkpoint(temp_dir.path() / "file", state);
    }
    lrs.push_back(optimizer.param_groups()[0].options().get_lr());
    EXPECT_EQ(schedule.base_lrs(), std::vector<double>{0.5});
  }
  EXPECT_EQ(lrs[1], lrs[0]);
}

TEST(TrainingState, SaveWarnsOnceForNonfiniteBuffer) {
  const test_support::TempDir temp_dir;
  torch::nn::Sequential model(torch::nn::BatchNorm1d(2));
  TrainingState state;
  state.add("model", model);
  std::vector<std::string> warnings;
  mezzo::CheckpointManager manager(
      temp_dir.path() / "directory",
      {.on_warning = [&](const std::string& text) { warnings.push_back(text); }});
  manager.save(state, 1);
  EXPECT_THAT(warnings, testing::IsEmpty());
  model->buffers()[0].fill_(std::numeric_limits<float>::quiet_NaN());
  for (int step = 2; step <= 3; ++step) manager.save(state, step);
  EXPECT_THAT(warnings, testing::ElementsAre(testing::HasSubstr(
                            "the buffer \"model.0.running_mean\" contains inf or NaN")));
}

TEST(TrainingState, EqualOptimizersSaveIdenticalFiles) {
  const TempDir first, second;
  const DeterministicRun one(1), other(100000);
  const auto file = CheckpointManager(first.path()).save(one.state, 2).path;
  const auto same = CheckpointManager(second.path()).save(other.state, 2).path;
  EXPECT_EQ(test_support::read_file(file), test_support::read_file(same));
}

TEST(TrainingState, RoundTripsEveryValueType) {
  const TempDir temp_dir;
  Values saved, loaded;
  const auto file = CheckpointManager(temp_dir.path()).save(saved.state, 0);
  EXPECT_LT(file.size_bytes, 20000U) << "only the elements of a view are saved";
  loaded.integer = 0, loaded.small = 0, loaded.flag = false, loaded.real = 0, loaded.text = "";
  loaded.tensor = torch::Tensor();
  mezzo::load_checkpoint(file.path, loaded.state);
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

TEST(TrainingState, LoadsIntoDefinedAndUndefinedTensors) {
  const torch::Tensor complex = torch::randn({3}, torch::kComplexFloat);
  for (const torch::Tensor& saved :
       {torch::rand({3, 4}).t(), torch::ones({1}).expand({5}), torch::zeros({0, 3}),
        torch::rand({9}).slice(0, 2, 2), torch::rand({3, 3}).to_sparse(), complex.conj(),
        torch::imag(complex.conj()), torch::ones({2}, torch::kBool),
        torch::quantize_per_tensor(torch::rand({4}), 0.1, 0, torch::kQInt8),
        torch::quantize_per_channel(torch::rand({3, 2}), torch::rand({2}) + 0.1,
                                    torch::zeros({2}, torch::kLong), 1, torch::kQInt8),
        torch::rand({3}).to(torch::kFloat8_e4m3fn)}) {
    const TempDir temp_dir;
    torch::Tensor given = saved, over = saved.clone(), none;
    const auto file =
        CheckpointManager(temp_dir.path()).save(TrainingState().add("x", given), 0).path;
    if (!over.is_sparse() && !over.is_quantized()) over.zero_();
    mezzo::load_checkpoint(file, TrainingState().add("x", over));
    mezzo::load_checkpoint(file, TrainingState().add("x", none));
    for (const torch::Tensor& loaded : {over, none}) {
      EXPECT_EQ(loaded.scalar_type(), saved.scalar_type());
      EXPECT_TRUE(dense(loaded).equal(dense(saved))) << loaded << saved;
    }
  }
}

TEST(TrainingState, SavesViewsWithoutBaseStorage) {
  const TempDir temp_dir;
  struct Holder : torch::nn::Module {
    explicit Holder(const torch::Tensor& large) {
      register_parameter("view", large.narrow(0, 3, 2));
      register_buffer("buffer", large.narrow(0, 7, 2));
    }
  };
  const torch::Tensor large = torch::zeros({1 << 20});
  torch::Tensor view = large.narrow(0, 0, 2);
  std::vector<torch::Tensor> views{large.narrow(0, 1, 2), large.view({2, -1}).select(1, 5)};
  auto module = std::make_shared<Holder>(large);
  TrainingState state;
  state.add("tensor", view).add("tensors", views).add("module", module);
  EXPECT_LT(CheckpointManager(temp_dir.path()).save(state, 0).size_bytes, 20000U);
}

TEST(TrainingState, UsesModuleReassignedToHolder) {
  const TempDir temp_dir;
  torch::nn::Linear model(1, 1);
  std::shared_ptr<torch::nn::LinearImpl> none;
  TrainingState state;
  state.add("model", model);
  model = torch::nn::Linear(1, 1);
  const torch::Tensor weight = model->weight.detach().clone();
  const auto file = CheckpointManager(temp_dir.path()).save(state, 0).path;
  model = torch::nn::Linear(1, 1);
  mezzo::load_checkpoint(file, state);
  EXPECT_TRUE(torch::equal(model->weight, weight));
  EXPECT_THAT(message_of([&] { state.add("none", none); }),
              HasSubstr("the module holder is empty"));
}

/// Saves `saver`, and returns the error of loading it into `loader`, equal for all load functions.
std::string load_error(const TrainingState& saver, const TrainingState& loader,
                       const mezzo::LoadOptions& options = {}) {
  const TempDir temp_dir;
  CheckpointManager checkpoints(temp_dir.path());
  const auto file = checkpoints.save(saver, 0).path;
  std::string error = message_of([&] { mezzo::load_checkpoint(file, loader, options); });
  EXPECT_EQ(message_of([&] { checkpoints.load_latest(loader, options); }), error);
  EXPECT_EQ(message_of([&] { checkpoints.load(loader, 0, options); }), error);
  return error;
}

TEST(TrainingState, ReportsMissingAndUnexpectedNames) {
  int64_t a = 1, b = 2, c = 3;
  EXPECT_THAT(
      load_error(TrainingState().add("a", a).add("b", b), TrainingState().add("a", a).add("c", c)),
      AllOf(HasSubstr("missing name(s): \"c\""), HasSubstr("unexpected name(s): \"b\""),
            HasSubstr("nothing was loaded")));
  EXPECT_EQ(load_error(TrainingState().add("a", b).add("b", b), TrainingState().add("a", a),
                       {.ignore_unexpected = true}),
            "no error");
  EXPECT_EQ(a, 2);
}

TEST(TrainingState, MismatchThrowsBeforeLoading) {
  int64_t number = 1;
  double real = 2;
  EXPECT_THAT(
      load_error(TrainingState().add("x", real), TrainingState().add("x", number)),
      HasSubstr("type mismatch: a real number in the checkpoint, an integer in the current state"));
  int64_t large = 300;
  std::uint8_t small = 5;
  EXPECT_THAT(load_error(TrainingState().add("x", large), TrainingState().add("x", small)),
              HasSubstr("the integer 300 in the checkpoint is out of range"));
  double huge = 1e300, infinite = std::numeric_limits<double>::infinity();
  float single = 5;
  EXPECT_THAT(load_error(TrainingState().add("x", huge), TrainingState().add("x", single)),
              HasSubstr("the real number 1e+300 in the checkpoint is out of range"));
  EXPECT_EQ(single, 5);
  EXPECT_EQ(load_error(TrainingState().add("x", infinite), TrainingState().add("x", single)),
            "no error");
  EXPECT_EQ(single, infinite);
  torch::Tensor whole_numbers = torch::arange(3), floats = torch::zeros({3});
  EXPECT_THAT(load_error(TrainingState().add("x", whole_numbers), TrainingState().add("x", floats)),
              AllOf(HasSubstr("tensor mismatch: Long"), HasSubstr("in the checkpoint, float32")));
  EXPECT_TRUE(torch::equal(floats, torch::zeros({3})));
  torch::nn::Linear narrow(2, 3), wide(4, 3), plain(torch::nn::LinearOptions(2, 3).bias(false));
  torch::nn::Linear half(2, 3);
  half->to(torch::kHalf);
  const auto error = [](torch::nn::Linear saved, torch::nn::Linear loaded) {
    const torch::Tensor before = loaded->weight.detach().clone();
    const std::string text =
        load_error(TrainingState().add("m", saved), TrainingState().add("m", loaded));
    EXPECT_TRUE(torch::equal(loaded->weight, before));
    return text;
  };
  EXPECT_THAT(
      error(narrow, wide),
      HasSubstr("size mismatch for weight: float32 [3, 2] in the checkpoint, float32 [3, 4] in "
                "the current model"));
  EXPECT_THAT(error(narrow, half),
              HasSubstr("in the checkpoint, float16 [3, 2] in the current model"));
  EXPECT_THAT(error(narrow, plain), HasSubstr("Unexpected key(s) in state_dict: \"bias\""));
  EXPECT_THAT(error(plain, narrow), HasSubstr("Missing key(s) in state_dict: \"bias\""));
}

/// An object whose operator>> throws for another number.
struct Numbered {
  int64_t number;

  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const Numbered& numbered) {
    archive.write("number", c10::IValue(numbered.number));
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    Numbered& numbered) {
    c10::IValue number;
    archive.read("number", number);
    TORCH_CHECK(number.toInt() == numbered.number, "the number is another");
    return archive;
  }
};

TEST(TrainingState, ThrowingObjectReportsPartialLoad) {
  const TempDir temp_dir;
  int64_t epoch = 1, last = 2;
  Numbered saved{1}, own{2};
  mezzo::save_checkpoint(
      temp_dir.path() / "a",
      TrainingState().add("epoch", epoch).add("numbered", saved).add("last", last));
  epoch = last = 9;
  EXPECT_THAT(message_of([&] {
                mezzo::load_checkpoint(
                    temp_dir.path() / "a",
                    TrainingState().add("epoch", epoch).add("numbered", own).add("last", last));
              }),
              AllOf(HasSubstr("loading \"numbered\" threw: the number is another"),
                    HasSubstr("the objects before it are loaded, those after it are not")));
  EXPECT_EQ(epoch, 1);
  EXPECT_EQ(last, 2) << "archives are loaded last";
}

TEST(TrainingState, InvalidMezzoStateThrowsBeforeLoading) {
  int64_t epoch = 1;
  const auto error = [&epoch](auto& saved, auto& loaded) {
    const std::string message = load_error(TrainingState().add("epoch", epoch).add("x", saved),
                                           TrainingState().add("epoch", epoch).add("x", loaded));
    EXPECT_THAT(message, AllOf(HasSubstr("cannot load \"x\""), HasSubstr("nothing was loaded")));
    return message;
  };
  mezzo::GradScaler disabled({.enabled = false}), scaler;
  EXPECT_THAT(error(disabled, scaler), HasSubstr("The source state dict is empty"));
  torch::nn::Linear narrow(2, 3), wide(4, 3);
  mezzo::Ema of_narrow(narrow->parameters()), of_wide(wide->parameters());
  EXPECT_THAT(error(of_narrow, of_wide), HasSubstr("size mismatch for the average of"));
  torch::optim::SGD one(narrow->parameters(), 0.1), two(narrow->parameters(), 0.1);
  two.add_param_group({wide->parameters()});
  mezzo::LinearSchedule of_one(one, {.total_steps = 9}), of_two(two, {.total_steps = 9});
  EXPECT_THAT(error(of_one, of_two), HasSubstr("parameter groups, 1, than this optimizer, 2"));
  mezzo::LossScaleOptimizer scaled(one);
  EXPECT_THAT(error(of_one, scaled), HasSubstr("the archive is not a LossScaleOptimizer's"));
}

/// An object with lists, including an empty one.
struct Lists {
  std::vector<int64_t> whole;
  std::vector<double> real;
  std::vector<std::string> strings;

  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const Lists& lists) {
    archive.write("whole", c10::IValue(lists.whole));
    archive.write("real", c10::IValue(lists.real));
    archive.write("strings", c10::IValue(lists.strings));
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    Lists& lists) {
    c10::IValue whole, real, strings;
    archive.read("whole", whole);
    archive.read("real", real);
    archive.read("strings", strings);
    lists.whole = whole.toIntVector();
    lists.real = real.toDoubleVector();
    lists.strings = strings.to<std::vector<std::string>>();
    return archive;
  }
};

TEST(TrainingState, RoundTripsListsIncludingEmpty) {
  for (const Lists& saved : {Lists{{1, 2}, {}, {"a"}}, Lists{{}, {0.5}, {}}}) {
    const TempDir temp_dir;
    Lists given = saved, loaded{{7}, {7}, {"seven"}};
    const auto file = temp_dir.path() / "state.pt";
    mezzo::save_checkpoint(file, TrainingState().add("lists", given));
    mezzo::load_checkpoint(file, TrainingState().add("lists", loaded));
    EXPECT_EQ(loaded.whole, saved.whole);
    EXPECT_EQ(loaded.real, saved.real);
    EXPECT_EQ(loaded.strings, saved.strings);
  }
}

TEST(TrainingState, LoadPreservesModuleMemory) {
  const TempDir temp_dir;
  torch::nn::Linear model(2, 2);
  const torch::Tensor weight = model->weight.detach().clone();
  const void* const memory = model->weight.const_data_ptr();
  const auto state = TrainingState().add("model", model);
  mezzo::save_checkpoint(temp_dir.path() / "a", state);
  model->weight.detach().zero_();
  mezzo::load_checkpoint(temp_dir.path() / "a", state);
  EXPECT_TRUE(torch::equal(model->weight, weight));
  EXPECT_EQ(model->weight.const_data_ptr(), memory) << "captured CUDA graphs read it";
}

TEST(TrainingState, LoadClearsAutocastWeightCache) {
  const TempDir temp_dir;
  torch::nn::Conv2d saved(torch::nn::Conv2dOptions(2, 3, 3)),
      model(torch::nn::Conv2dOptions(2, 3, 3));
  mezzo::save_checkpoint(temp_dir.path() / "a", TrainingState().add("model", saved));
  const torch::Tensor x = torch::rand({1, 2, 5, 5});
  torch::Tensor before, inside;
  {
    const mezzo::AutocastGuard<torch::kCPU> region;
    before = model->forward(x);
    mezzo::load_checkpoint(temp_dir.path() / "a", TrainingState().add("model", model));
    inside = model->forward(x);
  }
  EXPECT_FALSE(torch::equal(before, inside));
  const mezzo::AutocastGuard<torch::kCPU> fresh;
  EXPECT_TRUE(torch::equal(inside, saved->forward(x)));
}

TEST(TrainingState, LoadDiscardsPendingIteration) {
  const TempDir temp_dir;
  torch::nn::Linear model(2, 2);
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-3);
  mezzo::GradScaler scaler({.init_scale = 8});
  TrainingState state;
  state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
  CheckpointManager checkpoints(temp_dir.path());
  const auto backward = [&] {
    optimizer.zero_grad();
    scaler.scale(model->forward(torch::ones({1, 2})).sum()).backward();
  };
  backward();
  scaler.step(optimizer);
  scaler.update();
  checkpoints.save(state, 1);
  const torch::Tensor saved = model->weight.detach().clone();
  backward();
  scaler.unscale_(optimizer);
  checkpoints.load_latest(state);
  EXPECT_TRUE(torch::equal(model->weight, saved));
  backward();
  scaler.unscale_(optimizer);
  EXPECT_EQ(model->weight.grad()[0][0].item<float>(), 1) << "unscaled";
}

TEST(TrainingState, FailedSavePreservesDirectory) {
  const TempDir temp_dir;
  torch::Tensor undefined;
  CheckpointManager checkpoints(temp_dir.path());
  EXPECT_THAT(message_of([&] { checkpoints.save(TrainingState().add("order", undefined), 1); }),
              HasSubstr("\"order\" cannot be saved: the tensor is undefined"));
  EXPECT_TRUE(checkpoints.checkpoints().empty());
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

/// Returns the error of saving and loading it.
std::string save_error(const std::string& name, const torch::Tensor& tensor, bool is_buffer) {
  const TempDir temp_dir;
  Holder saved(name, tensor, is_buffer), loaded(name, tensor.clone(), is_buffer);
  std::filesystem::path file;
  const std::string error = message_of([&] {
    file = CheckpointManager(temp_dir.path()).save(TrainingState().add("m", saved), 0).path;
  });
  if (file.empty()) return error;
  for (const torch::Tensor& parameter : loaded.parameters()) parameter.detach().zero_();
  EXPECT_EQ(message_of([&] { mezzo::load_checkpoint(file, TrainingState().add("m", loaded)); }),
            "no error")
      << name;
  if (!is_buffer) {
    EXPECT_TRUE(torch::equal(loaded.parameters()[0], saved.parameters()[0])) << name;
  }
  return error;
}

/// Includes names that TorchScript, the format of torch archives, cannot read back.
TEST(TrainingState, RoundTripsAnyTensorName) {
  std::vector<std::string> names{"a\"b",           "a\\b",     "a\nb", "__annotations__",
                                 "__parameters__", "a/b",      "a b",  "0",
                                 "a: b",           "\xC3\xBC", "a'b",  "weight-1"};
#define MEZZO_TEST_KEYWORD(kind, description, text) names.push_back(text);
  TC_FORALL_TOKEN_KINDS(MEZZO_TEST_KEYWORD)
#undef MEZZO_TEST_KEYWORD
  for (const std::string& name : names) {
    if (name.empty() || name.find('.') != std::string::npos) continue;
    for (const bool is_buffer : {true, false}) {
      EXPECT_EQ(save_error(name, torch::ones({1}), is_buffer), "no error") << name;
    }
  }
  torch::nn::Sequential saved, loaded;
  saved->push_back("in", torch::nn::Linear(1, 1));
  loaded->push_back("in", torch::nn::Linear(1, 1));
  EXPECT_EQ(load_error(TrainingState().add("m", saved), TrainingState().add("m", loaded)),
            "no error");
  EXPECT_TRUE(torch::equal(saved->parameters()[0], loaded->parameters()[0]));
}

TEST(TrainingState, RoundTripsEveryBufferType) {
  const torch::Tensor complex = torch::randn({3}, torch::kComplexFloat);
  for (const torch::Tensor& buffer :
       {torch::rand({3, 3}).to_sparse(), complex.conj(), torch::imag(complex.conj()),
        torch::quantize_per_tensor(torch::rand({4}), 0.1, 0, torch::kQInt8), torch::zeros({0, 2}),
        torch::rand({2, 3}).t(), complex, torch::rand({8}).slice(0, 2, 5)}) {
    EXPECT_EQ(save_error("x", buffer, true), "no error");
  }
}

TEST(TrainingState, ThrowsWhileEmaGuardIsAlive) {
  const TempDir temp_dir;
  torch::nn::Linear model(1, 1);
  model->to(torch::kBFloat16);
  torch::Tensor weight = model->weight;
  mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(1e-2),
                                {.weight_storage = mezzo::optim::WeightStorage::split_master});
  const mezzo::Ema ema(model->parameters());
  TrainingState models, optimizers, tensors;
  models.add("x", model);
  optimizers.add("x", optimizer);
  tensors.add("x", weight);
  for (const TrainingState* state : {&models, &optimizers, &tensors}) {
    CheckpointManager checkpoints(temp_dir.path());
    checkpoints.save(*state, 1);
    const mezzo::EmaGuard averaged(ema);
    const auto is_named = HasSubstr("holds an average while an EmaGuard is alive");
    EXPECT_THAT(message_of([&] { checkpoints.save(*state, 2); }), is_named);
    EXPECT_THAT(message_of([&] { checkpoints.load_latest(*state); }), is_named);
    EXPECT_EQ(checkpoints.checkpoints().size(), 1U);
    std::filesystem::remove(checkpoints.checkpoints()[0]);
  }
}

TEST(TrainingState, RoundTripsEnginesAndIntegerVectors) {
  const TempDir temp_dir;
  std::mt19937 engine(3);
  std::ranlux48 other(4);
  std::vector<std::size_t> order{5, 0, 3};
  std::vector<std::int8_t> small{-128, 127};
  TrainingState state;
  state.add("engine", engine).add("other", other).add("order", order).add("small", small);
  engine.discard(700);
  const auto file = temp_dir.path() / "state.pt";
  mezzo::save_checkpoint(file, state);
  const auto next = engine(), next_other = other();
  engine.seed(9), other.seed(9), order.assign(100, 1), small.clear();
  mezzo::load_checkpoint(file, state);
  EXPECT_EQ(engine(), next);
  EXPECT_EQ(other(), next_other);
  EXPECT_THAT(order, testing::ElementsAre(5, 0, 3));
  EXPECT_THAT(small, testing::ElementsAre(-128, 127));

  std::mt19937_64 wider;
  std::vector<std::int8_t> narrow{1};
  order[0] = 128;
  mezzo::save_checkpoint(file, state);
  const auto error = [&](const std::string& name, auto& object) {
    return message_of([&] {
      mezzo::load_checkpoint(file, TrainingState().add(name, object), {.ignore_unexpected = true});
    });
  };
  EXPECT_THAT(error("engine", wider), HasSubstr("the state of another random engine"));
  EXPECT_EQ(wider, std::mt19937_64()) << "nothing changes";
  EXPECT_THAT(error("order", narrow),
              HasSubstr("the integer 128 in the checkpoint is out of range"));
  EXPECT_THAT(narrow, testing::ElementsAre(1));
  order[0] = ~std::size_t{0};
  EXPECT_THAT(message_of([&] { mezzo::save_checkpoint(file, state); }),
              HasSubstr("does not fit in std::int64_t"));
}

TEST(TrainingState, RoundTripsRealNumbersAndMaps) {
  const TempDir temp_dir;
  std::vector<double> losses{0.5, -1e300}, none;
  std::vector<float> floats{0.25F};
  mezzo::GradScaler scaler({.init_scale = 8});
  mezzo::GradScaler::StateDict numbers = scaler.state_dict();
  const auto saved = numbers;
  TrainingState state;
  state.add("losses", losses).add("none", none).add("floats", floats).add("numbers", numbers);
  const auto file = temp_dir.path() / "state.pt";
  mezzo::save_checkpoint(file, state);
  losses.clear(), none.assign(3, 1), floats.clear(), numbers.clear();
  mezzo::load_checkpoint(file, state);
  EXPECT_THAT(losses, testing::ElementsAre(0.5, -1e300));
  EXPECT_THAT(floats, testing::ElementsAre(0.25F));
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(numbers, saved);
  std::vector<int> integers;
  EXPECT_THAT(message_of([&] {
                mezzo::load_checkpoint(file, TrainingState().add("losses", integers),
                                       {.ignore_unexpected = true});
              }),
              HasSubstr("a vector of integers in the current state"));
}

TEST(TrainingState, UsesOptimizerReassignedToPointer) {
  const TempDir temp_dir;
  const auto weight = torch::ones({2}).requires_grad_();
  auto shared = std::make_shared<mezzo::optim::AdamW>(std::vector<torch::Tensor>{weight}, 0.1);
  std::unique_ptr<torch::optim::Optimizer> owned =
      std::make_unique<torch::optim::SGD>(std::vector<torch::Tensor>{weight}, 0.1);
  std::shared_ptr<torch::optim::AdamW> none;
  EXPECT_THAT(message_of([&] { TrainingState().add("x", none); }), HasSubstr("is null"));
  TrainingState state;
  state.add("shared", shared).add("owned", owned);
  weight.mutable_grad() = torch::ones({2});
  shared->step();
  const auto file = temp_dir.path() / "state.pt";
  mezzo::save_checkpoint(file, state);
  shared = std::make_shared<mezzo::optim::AdamW>(std::vector<torch::Tensor>{weight}, 0.1);
  mezzo::load_checkpoint(file, state);
  EXPECT_EQ(shared->applied_steps(), 1);
}

TEST(TrainingState, LoadsWithAndWithoutAutocastModule) {
  const TempDir temp_dir;
  const auto file = temp_dir.path() / "model.pt";
  const auto make = [](bool is_wrapped) {
    torch::nn::Functional relu([](const torch::Tensor& x) { return torch::relu(x); });
    torch::nn::Sequential model(torch::nn::Linear(2, 2));
    if (is_wrapped) {
      model->push_back(mezzo::AutocastModule(relu, {.device_type = torch::kCPU}));
    } else {
      model->push_back(relu);
    }
    return model;
  };
  for (const bool is_wrapped : {false, true}) {
    auto saved = make(is_wrapped), loaded = make(!is_wrapped);
    torch::save(saved, file.string());
    EXPECT_EQ(message_of([&] { torch::load(loaded, file.string()); }), "no error") << is_wrapped;
    EXPECT_TRUE(saved->parameters()[0].equal(loaded->parameters()[0]));
  }
}

/// A custom optimizer with moments in a map, without save.
class MapOptimizer : public torch::optim::Optimizer {
 public:
  explicit MapOptimizer(const torch::Tensor& weight)
      : Optimizer({weight}, std::make_unique<torch::optim::SGDOptions>(0.1)) {}
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    moment += 1;
    return {};
  }
  double moment = 0;
};
/// A custom optimizer with a custom archive layout.
class OwnFormatOptimizer : public MapOptimizer {
 public:
  using MapOptimizer::MapOptimizer;
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("moment", c10::IValue(moment));
    archive.write("class", c10::IValue("mine"));
  }
  void load(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("moment", value);
    moment = value.toDouble();
  }
};

TEST(TrainingState, CallsCustomOptimizersSaveAndLoad) {
  const TempDir temp_dir;
  const auto file = temp_dir.path() / "state.pt";
  const auto weight = torch::ones({2}).requires_grad_(), longer = torch::ones({3}).requires_grad_();
  OwnFormatOptimizer saved(weight), loaded(weight), other(longer);
  saved.step();
  mezzo::save_checkpoint(file, TrainingState().add("x", saved));
  mezzo::load_checkpoint(file, TrainingState().add("x", loaded));
  EXPECT_EQ(loaded.moment, 1);
  EXPECT_THAT(
      message_of([&] { mezzo::load_checkpoint(file, TrainingState().add("x", other)); }),
      HasSubstr("size mismatch for parameter 0 of group 0: [2] in the checkpoint, [3] in the "
                "current optimizer"));
}

TEST(TrainingState, ThrowsForOptimizerWithoutSave) {
  const TempDir temp_dir;
  MapOptimizer optimizer(torch::ones({2}).requires_grad_());
  EXPECT_THAT(message_of([&] {
                mezzo::save_checkpoint(temp_dir.path() / "x", TrainingState().add("x", optimizer));
              }),
              HasSubstr("MapOptimizer::save wrote nothing"));
}

/// A loader with a position that is not a variable.
struct Loader {
  std::vector<std::int64_t> state() const { return {epoch, sample}; }
  void restore(const std::vector<std::int64_t>& state) {
    TORCH_CHECK(state.at(1) >= 0, "no such sample");
    epoch = state.at(0), sample = state.at(1);
  }
  std::int64_t epoch = 0, sample = 0;
};

TEST(TrainingState, RoundTripsThroughCallables) {
  const TempDir temp_dir;
  Loader loader{3, 70};
  std::string name = "first";
  TrainingState state;
  state.add(
      "loader", [&] { return loader.state(); },
      [&](const std::vector<std::int64_t>& read) { loader.restore(read); });
  state.add(
      "name", [&] { return name; }, [&](std::string read) { name = std::move(read); });
  const auto file = temp_dir.path() / "state.pt";
  mezzo::save_checkpoint(file, state, 5);
  loader = {}, name = "second";
  EXPECT_EQ(mezzo::load_checkpoint(file, state).step, 5);
  EXPECT_EQ(loader.epoch, 3);
  EXPECT_EQ(loader.sample, 70);
  EXPECT_EQ(name, "first");

  loader.sample = -1;  // for which restore throws
  mezzo::save_checkpoint(file, state);
  EXPECT_THAT(message_of([&] { mezzo::load_checkpoint(file, state); }),
              HasSubstr("loading \"loader\" threw: no such sample"));
}

TEST(TrainingState, ReportsInvalidArguments) {
  int64_t value = 0;
  at::Generator none;
  const auto error_of_saving = [](const TrainingState& state) {
    const TempDir temp_dir;
    return message_of([&] { CheckpointManager(temp_dir.path()).save(state, 0); });
  };
  EXPECT_THAT(error_of_saving(TrainingState().add("a", none)),
              HasSubstr("the generator is undefined"));
  std::vector<torch::Tensor> undefined{torch::ones({1}), torch::Tensor()};
  EXPECT_THAT(error_of_saving(TrainingState().add("a", undefined)),
              HasSubstr("tensor 1 is undefined"));
  EXPECT_THAT(message_of([&] { TrainingState().add("a", value).add("a", value); }),
              HasSubstr("\"a\" is already in use"));
  EXPECT_THAT(message_of([&] { TrainingState().add("", value); }), HasSubstr("name is empty"));
  EXPECT_THAT(message_of([&] { TrainingState().add("mezzo", value); }), HasSubstr("is reserved"));
  EXPECT_THAT(message_of([&] { CheckpointManager("x", {.max_to_keep = 0}); }),
              HasSubstr("max_to_keep is 0"));
  const TempDir temp_dir;
  EXPECT_THAT(message_of([&] {
                CheckpointManager(temp_dir.path()).save(TrainingState().add("a", value), -1);
              }),
              HasSubstr("step is -1"));
  EXPECT_THAT(message_of([&] { CheckpointManager(temp_dir.path()).load_latest({}); }),
              HasSubstr("the state is empty"));
}

}  // namespace
