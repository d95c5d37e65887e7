// Ema with any optimizer, and EmaGuard.
#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/get_param_state.h"
#include "../support/message_of.h"
#include "../support/special_values.h"

namespace {

using mezzo::Ema;
using mezzo::EmaGuard;
using mezzo::EmaWarmup;
using mezzo::StepResult;
using mezzo::optim::WeightStorage;
using test_support::BitwiseEqual;
using test_support::clone_all;
using test_support::get_param_state;
using test_support::message_of;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pointwise;

torch::Tensor weight(std::vector<double> values, at::ScalarType dtype = torch::kFloat) {
  return torch::tensor(values, dtype).requires_grad_();
}

void set_value(torch::Tensor& parameter, double value) {
  const torch::NoGradGuard no_grad;
  parameter.fill_(value);
}

std::function<std::vector<torch::Tensor>()> return_masters(std::vector<torch::Tensor> masters) {
  return [masters] { return masters; };
}

/// A step that a device decides and that is never ready.
class NeverReadyStep final : public mezzo::StepFuture {
 public:
  explicit NeverReadyStep(float found_inf) : found_inf_(torch::full({1}, found_inf)) {}
  bool ready() const noexcept override { return false; }
  const mezzo::StepResult::Values& values() override {
    ADD_FAILURE() << "the host synchronized with the device";
    return outcome_;
  }
  at::Tensor found_inf_on_device() const override { return found_inf_; }

 private:
  torch::Tensor found_inf_;
  mezzo::StepResult::Values outcome_;
};

StepResult make_device_result(float found_inf) {
  return StepResult(std::make_shared<NeverReadyStep>(found_inf));
}

/// Compares with a relative tolerance of float32.
MATCHER(FloatingPointRelative, "") {
  return std::abs(std::get<0>(arg) - std::get<1>(arg)) <= 1e-6 * std::abs(std::get<1>(arg));
}

TEST(Ema, StartsAtWeightsAndDecays) {
  torch::Tensor parameter = weight({8, 8});
  Ema ema({parameter}, {.decay = 0.75});
  EXPECT_EQ(ema.averages()[0][1].item<float>(), 8);
  set_value(parameter, 4);
  ema.update();
  EXPECT_EQ(ema.averages()[0][1].item<float>(), 7);
  ema.update();
  EXPECT_EQ(ema.averages()[0][1].item<float>(), 6.25F);
}

/// torch.optim.swa_utils.AveragedModel of one weight, with get_ema_multi_avg_fn(0.5): its first
/// update copies the weight.
struct AveragedModel {
  double update_parameters(double weight) {
    value = is_first ? weight : value + 0.5 * (weight - value);
    is_first = false;
    return value;
  }
  double value = 0;
  bool is_first = true;
};

// docs/migration.md.
TEST(Ema, MatchesTorchAveragedModel) {
  AveragedModel theirs, without_an_update_at_construction;
  torch::Tensor parameter = weight({8});
  Ema ours({parameter}, {.decay = 0.5});
  EXPECT_EQ(theirs.update_parameters(8), 8);
  for (const double value : {4.0, 1.0, 16.0}) {
    set_value(parameter, value);
    ours.update();
    EXPECT_EQ(ours.averages()[0].item<double>(), theirs.update_parameters(value));
    EXPECT_NE(ours.averages()[0].item<double>(),
              without_an_update_at_construction.update_parameters(value));
  }
  EXPECT_EQ(ours.averages()[0].item<double>(), 9.75);
}

/// Returns the averages of data/ema_averages.py's weight, updated with `make_result(n)`.
std::vector<double> average_squares(const mezzo::EmaOptions& options,
                                    const std::function<StepResult(int)>& make_result) {
  torch::Tensor parameter = weight({0}, torch::kDouble);
  Ema ema({parameter}, options);
  std::vector<double> averages;
  for (int n = 1; n <= 30; ++n) {
    set_value(parameter, 1e9);
    ema.update(StepResult({.applied = false}));
    set_value(parameter, n * n);
    ema.update(make_result(n));
    averages.push_back(ema.averages()[0].item<double>());
  }
  EXPECT_EQ(ema.num_updates(),
            options.warmup == EmaWarmup::none && !options.decay_function ? 0 : 30);
  return averages;
}

StepResult make_host_result(int) { return StepResult({.applied = true}); }

TEST(EmaWarmup, MatchesDiffusers) {
  std::ifstream file(MEZZO_OPTIM_TEST_DATA "/ema_averages.txt");
  std::map<std::string, mezzo::EmaOptions> cases{
      {"num_updates", {.decay = 0.7, .warmup = EmaWarmup::num_updates}},
      {"power", {.decay = 0.999, .warmup = EmaWarmup::power}},
      {"slow_power", {.decay = 0.8, .warmup = EmaWarmup::power, .inv_gamma = 2, .power = 0.75}}};
  for (std::string line, name; std::getline(file, line);) {
    std::istringstream words(line);
    words >> name;
    SCOPED_TRACE(name);
    const std::vector<double> recorded(std::istream_iterator<double>(words), {});
    const mezzo::EmaOptions options = cases.at(name);
    cases.erase(name);
    EXPECT_THAT(average_squares(options, make_host_result), Pointwise(DoubleNear(1e-9), recorded));
    EXPECT_THAT(average_squares(options, [](int) { return make_device_result(0); }),
                Pointwise(FloatingPointRelative(), recorded));
    EXPECT_THAT(average_squares(
                    options,
                    [](int n) { return n % 3 == 0 ? make_host_result(n) : make_device_result(0); }),
                Pointwise(FloatingPointRelative(), recorded))
        << "on the device, and every third on the host";
  }
  EXPECT_TRUE(cases.empty());
}

TEST(EmaWarmup, DecayFunctionGetsNumberOfUpdate) {
  std::vector<int64_t> updates;
  torch::Tensor parameter = weight({8});
  Ema ema({parameter}, {.decay_function = [&](int64_t n) {
            updates.push_back(n);
            return n == 1 ? 1.0 : n == 2 ? 0.75 : n == 3 ? 0.0 : 1.5;
          }});
  set_value(parameter, 4);
  std::vector<float> averages;
  for (int i = 0; i < 3; ++i) {
    ema.update(StepResult({.applied = false}));
    ema.update(StepResult({.applied = true}));
    averages.push_back(ema.averages()[0].item<float>());
  }
  EXPECT_THAT(averages, ElementsAre(8, 7, 4));
  EXPECT_THAT(updates, ElementsAre(1, 2, 3));
  set_value(parameter, 100);
  EXPECT_THAT(message_of([&] { ema.update(); }),
              HasSubstr("decay_function(4) returned 1.5; it should return a decay from 0 to 1"));
  EXPECT_EQ(ema.averages()[0].item<float>(), 4);
  EXPECT_EQ(ema.num_updates(), 3);
}

TEST(EmaWarmup, ResumesFromArchive) {
  const mezzo::EmaOptions options{.decay = 0.9, .warmup = EmaWarmup::num_updates};
  torch::Tensor parameter = weight({0});
  Ema whole({parameter}, options);
  std::optional<Ema> resumed(std::in_place, std::vector{parameter}, options);
  for (int n = 1; n <= 6; ++n) {
    set_value(parameter, n);
    whole.update(make_device_result(n == 2 ? 1.0F : 0.0F));
    resumed->update(make_device_result(n == 2 ? 1.0F : 0.0F));
    std::stringstream stream;
    torch::save(*resumed, stream);
    resumed.emplace(std::vector{weight({0})}, options);
    torch::load(*resumed, stream);
    resumed->parameters()[0].set_data(parameter);
  }
  EXPECT_EQ(resumed->num_updates(), 5);
  EXPECT_THAT(resumed->averages(), BitwiseEqual(whole.averages()));
}

TEST(Ema, UpdatesAveragesOfFrozenParams) {
  torch::Tensor trained = weight({1}), frozen = weight({2}).requires_grad_(false);
  Ema ema({trained, frozen}, {.decay = 0.5});
  set_value(frozen, 100);
  for (int i = 0; i < 30; ++i) ema.update();
  EXPECT_EQ(ema.averages()[1].item<float>(), 100);
  EXPECT_EQ(ema.averages()[0].item<float>(), 1);
}

TEST(Ema, SkippedStepPreservesAverages) {
  torch::Tensor parameter = weight({8});
  Ema ema({parameter}, {.decay = 0.5});
  set_value(parameter, 4);
  ema.update(StepResult({.applied = false}));
  EXPECT_EQ(ema.averages()[0].item<float>(), 8);
  ema.update(StepResult({.applied = true}));
  EXPECT_EQ(ema.averages()[0].item<float>(), 6);
}

TEST(Ema, AveragesAreFloat32AndFollowMasters) {
  torch::Tensor parameter = weight({1, 1}, torch::kBFloat16), other = weight({1}, torch::kBFloat16);
  torch::Tensor master = torch::ones({2});
  Ema ema({parameter, other}, {.decay = 0.5, .masters = return_masters({master, torch::Tensor()})});
  master.fill_(1.001);  // rounds to 1 in bfloat16
  set_value(other, 3);
  ema.update();
  EXPECT_EQ(ema.averages()[0].scalar_type(), torch::kFloat);
  EXPECT_NEAR(ema.averages()[0][0].item<float>(), 1.0005, 1e-6);
  EXPECT_EQ(ema.averages()[1].item<float>(), 2);
}

TEST(Ema, FollowsMastersReplacedByLoad) {
  torch::Tensor parameter = weight({0}, torch::kHalf);
  torch::optim::SGD sgd({parameter}, 1);
  mezzo::MasterWeights optimizer(sgd);
  Ema ema({parameter}, {.decay = 0.5, .masters = [&] { return mezzo::master_params(optimizer); }});
  const auto train = [&] {
    parameter.mutable_grad() = torch::full({1}, -1, torch::kHalf);
    optimizer.step();
    ema.update();
    return ema.averages()[0].item<float>();
  };
  EXPECT_EQ(train(), 0.5F);
  std::stringstream stream;
  torch::save(optimizer, stream);
  torch::load(optimizer, stream);
  EXPECT_EQ(train(), 1.25F);
}

TEST(Ema, FailedUpdateChangesNoAverage) {
  torch::Tensor first = torch::zeros({1}), second = torch::zeros({1});
  Ema ema({first, second}, {.decay = 0.5});
  first.fill_(8);
  second.set_data(torch::zeros({2}));
  EXPECT_THAT(message_of([&] { ema.update(); }),
              HasSubstr("parameter 1 (float32 [2] on cpu) had the shape [1]"));
  EXPECT_EQ(ema.averages()[0].item<float>(), 0);
}

TEST(Ema, TiedWeightsShareOneAverage) {
  torch::nn::Linear tied(2, 2);
  const torch::nn::Sequential model(tied, tied);  // parameters() has each twice
  Ema ema(model->parameters(), {.decay = 0.5});
  const torch::Tensor begin = tied->weight.detach().clone();
  set_value(tied->weight, 4);
  ema.update();
  {
    const EmaGuard averaged(ema);
    EXPECT_TRUE(torch::allclose(tied->weight, begin * 0.5 + 2));
  }
  EXPECT_TRUE(tied->weight.eq(4).all().item<bool>());
}

TEST(Ema, ThrowsForInvalidArguments) {
  const torch::Tensor parameter = weight({1});
  EXPECT_THAT(message_of([&] { Ema({parameter}, {.decay = 1}); }), HasSubstr("decay is 1"));
  EXPECT_THAT(message_of([&] { Ema({parameter}, {.decay = -0.1}); }), HasSubstr("decay is -0.1"));
  EXPECT_THAT(message_of([&] { Ema({parameter}, {.inv_gamma = 0}); }),
              HasSubstr("inv_gamma is 0; it should be positive"));
  EXPECT_THAT(message_of([&] { Ema({parameter}, {.power = -1}); }), HasSubstr("power is -1"));
  EXPECT_THAT(message_of([&] {
                Ema({parameter},
                    {.warmup = EmaWarmup::power, .decay_function = [](int64_t) { return 0.5; }});
              }),
              HasSubstr("warmup and decay_function are both set"));
  EXPECT_THAT(message_of([&] { Ema({torch::arange(3)}); }), HasSubstr("parameter 0"));
  EXPECT_THAT(message_of([&] { Ema({torch::ones({3}).to_sparse()}); }), HasSubstr("parameter 0"));
  EXPECT_THAT(message_of([&] { Ema({parameter, torch::Tensor()}); }), HasSubstr("parameter 1"));
  EXPECT_THAT(message_of([&] {
                Ema({parameter}, {.masters = return_masters({parameter, parameter})});
              }),
              HasSubstr("options.masters returned 2 tensors for 1 parameters; it should"));
  EXPECT_THAT(
      message_of([&] { Ema({parameter}, {.masters = return_masters({torch::zeros({2})})}); }),
      HasSubstr("has a master that is float32 [2]"));
}

/// A convolution without an average, batch norm, and a layer whose weight is used twice.
struct SmallModel : torch::nn::Module {
  explicit SmallModel(int64_t width = 3) : norm(width), linear(width, width) {
    register_module("norm", norm);
    register_module("linear", linear);
    register_module("tied", linear);
  }
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear linear;
};

TEST(Ema, CopiesAveragesAndBuffersToSecondModel) {
  SmallModel model, destination;
  destination.to(torch::kBFloat16);
  Ema ema({model.linear->weight, model.norm->weight}, {.decay = 0.5});
  set_value(model.linear->weight, 5.01);
  set_value(model.linear->bias, 7);
  model.norm->running_mean.fill_(2);
  model.norm->num_batches_tracked.fill_(9);
  ema.update();
  const std::vector<torch::Tensor> before = clone_all(model.parameters());
  ema.copy_to(model, destination);
  EXPECT_TRUE(torch::equal(destination.linear->weight, ema.averages()[0].to(torch::kBFloat16)));
  EXPECT_TRUE(destination.linear->weight.requires_grad());
  EXPECT_EQ(destination.linear->bias[0].item<float>(), 7) << "has no average";
  EXPECT_EQ(destination.norm->running_mean[1].item<float>(), 2);
  EXPECT_EQ(destination.norm->num_batches_tracked.item<int64_t>(), 9);
  EXPECT_THAT(model.parameters(), BitwiseEqual(before));
  ema.copy_to(model, model);
  EXPECT_TRUE(torch::equal(model.linear->weight, ema.averages()[0]));
}

TEST(Ema, CopyToThrowsForAnotherModel) {
  SmallModel model, wider(4);
  torch::nn::Linear linear(3, 3);
  Ema ema(model.parameters()), other({weight({1})});
  const torch::Tensor before = wider.norm->weight.detach().clone();
  EXPECT_THAT(message_of([&] { ema.copy_to(model, wider); }),
              HasSubstr("the destination has no norm.weight of the shape [3]"));
  EXPECT_THAT(message_of([&] { ema.copy_to(model, *linear); }),
              HasSubstr("parameters or buffers, and the destination 2"));
  EXPECT_THAT(message_of([&] { other.copy_to(model, model); }),
              HasSubstr("the model has no parameter of this Ema"));
  EXPECT_TRUE(torch::equal(wider.norm->weight, before));
  const EmaGuard averaged(ema);
  EXPECT_THAT(message_of([&] { ema.copy_to(model, model); }), HasSubstr("an EmaGuard is alive"));
}

TEST(Ema, RoundTripsOnlyIntoSameModel) {
  torch::Tensor parameter = weight({8, 6});
  Ema ema({parameter}, {.decay = 0.5});
  set_value(parameter, 2);
  ema.update();
  std::stringstream stream;
  torch::save(ema, stream);
  Ema loaded({weight({0, 0})});
  torch::load(loaded, stream);
  EXPECT_TRUE(torch::equal(loaded.averages()[0], torch::tensor({5.0F, 4.0F})));
  Ema other({weight({0, 0, 0})});
  stream.seekg(0);
  EXPECT_THAT(
      message_of([&] { torch::load(other, stream); }),
      HasSubstr(": float32 [2] on cpu in the checkpoint, float32 [3] on cpu in the current model"));
  EXPECT_TRUE(torch::equal(other.averages()[0], torch::zeros({3})));
  Ema wide({torch::zeros({2}, torch::kDouble)}), two({weight({0, 0}), weight({0})});
  for (const auto& [one, message] : {std::pair(&wide, "in the checkpoint, float64 [2]"),
                                     std::pair(&two, "has 1 averages, and this Ema has 2")}) {
    stream.seekg(0);
    EXPECT_THAT(message_of([&] { torch::load(*one, stream); }), HasSubstr(message));
  }
  for (const c10::IValue& value : {c10::IValue(), c10::IValue(torch::ones({2}))}) {
    torch::serialize::OutputArchive archive;
    archive.write(value.isNone() ? "weights" : "averages", value);
    std::stringstream of_another;
    archive.save_to(of_another);
    EXPECT_THAT(message_of([&] { torch::load(loaded, of_another); }),
                HasSubstr("is not that of an"));
  }
  torch::serialize::OutputArchive archive;
  archive.write("averages", c10::IValue(std::vector{torch::ones({2})}));
  std::stringstream without_count;
  archive.save_to(without_count);
  EXPECT_THAT(message_of([&] { torch::load(loaded, without_count); }),
              HasSubstr("has no \"num_updates\""));
  EXPECT_TRUE(torch::equal(loaded.averages()[0], torch::tensor({5.0F, 4.0F})));
}

TEST(EmaGuard, SwapsInAveragesAndRestoresStorage) {
  torch::Tensor parameter = weight({8, 8}, torch::kBFloat16);
  Ema ema({parameter}, {.decay = 0.5});
  set_value(parameter, 4);
  ema.update();
  const void* const memory = parameter.const_data_ptr();
  {
    const EmaGuard averaged(ema);
    EXPECT_EQ(parameter[0].item<float>(), 6);
    EXPECT_EQ(parameter.scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(parameter.requires_grad());
    set_value(parameter, 100);  // lost at the end of the scope
  }
  EXPECT_EQ(parameter.const_data_ptr(), memory);
  EXPECT_EQ(parameter[0].item<float>(), 4);
  EXPECT_EQ(ema.averages()[0][0].item<float>(), 6);
}

TEST(EmaGuard, PreservesAverages) {
  torch::Tensor parameter = weight({8}), other = weight({1});
  Ema ema({parameter}, {.decay = 0.5}), other_ema({other});
  {
    const EmaGuard outer(ema);
    EXPECT_THAT(message_of([&] { ema.update(); }), HasSubstr("an EmaGuard is alive"));
    other_ema.update();
  }
  ema.update();
}

TEST(EmaGuard, PreservesStrides) {
  torch::Tensor parameter = torch::rand({2, 3, 4, 5}).to(torch::MemoryFormat::ChannelsLast);
  parameter.requires_grad_();
  const Ema ema({parameter});
  const auto strides = parameter.strides().vec();
  const EmaGuard averaged(ema);
  EXPECT_EQ(parameter.strides().vec(), strides);
}

// Two guards destroyed in the order of construction would leave an average in the parameter.
TEST(EmaGuard, NestedGuardThrows) {
  torch::Tensor shared = weight({8}), own = weight({8});
  Ema first({shared}, {.decay = 0.5}), second({own, shared}, {.decay = 0.25});
  for (torch::Tensor* const one : {&shared, &own}) set_value(*one, 4);
  first.update();
  second.update();
  auto outer = std::make_unique<EmaGuard>(first);
  EXPECT_THAT(message_of([&] { const EmaGuard inner(second); }),
              HasSubstr("an EmaGuard is alive; end its scope first"));
  EXPECT_EQ(shared.item<float>(), 6);
  EXPECT_EQ(own.item<float>(), 4);
  outer.reset();
  EXPECT_EQ(shared.item<float>(), 4);
  {
    const EmaGuard later(second);
    EXPECT_EQ(shared.item<float>(), 5);
  }
  EXPECT_EQ(shared.item<float>(), 4);
}

/// A step of `optimizer` with gradients that depend on the weights.
void step(mezzo::optim::AdamW& optimizer, torch::Tensor& parameter) {
  parameter.mutable_grad() = (parameter.detach().to(torch::kFloat) - 0.3).to(parameter.dtype());
  optimizer.step();
}

mezzo::optim::AdamW make(const torch::Tensor& parameter, WeightStorage storage) {
  return mezzo::optim::AdamW(std::vector<torch::Tensor>{parameter},
                             mezzo::optim::AdamWOptions(1e-2), {.weight_storage = storage});
}

mezzo::EmaOptions make_ema_options(mezzo::optim::AdamW& optimizer, WeightStorage storage) {
  mezzo::EmaOptions options{.decay = 0.9};
  if (storage == WeightStorage::fp32_master) {
    options.masters = [&optimizer] { return mezzo::master_params(optimizer); };
  }
  return options;
}

/// The parameter and its state.
std::vector<torch::Tensor> get_tensors(mezzo::optim::AdamW& optimizer,
                                       const torch::Tensor& parameter) {
  auto& state = get_param_state<mezzo::optim::AdamWParamState>(optimizer, parameter);
  std::vector<torch::Tensor> all{parameter, state.exp_avg(), state.exp_avg_sq()};
  for (const torch::Tensor& kept : {state.master(), state.low_bits()}) {
    if (kept.defined()) all.push_back(kept);
  }
  return all;
}

/// Compares two runs with the same gradients, one of which evaluates averages, bitwise: parameters
/// and states.
void expect_training_unchanged(WeightStorage storage, at::ScalarType dtype) {
  torch::Tensor parameter = torch::linspace(-1, 1, 37).to(dtype).requires_grad_();
  torch::Tensor evaluated_parameter = parameter.detach().clone().requires_grad_();
  auto optimizer = make(parameter, storage), evaluated = make(evaluated_parameter, storage);
  Ema ema({parameter}, make_ema_options(optimizer, storage));
  Ema evaluated_ema({evaluated_parameter}, make_ema_options(evaluated, storage));
  { const EmaGuard before_the_first_step(evaluated_ema); }
  for (int i = 0; i < 40; ++i) {
    step(optimizer, parameter);
    ema.update();
    step(evaluated, evaluated_parameter);
    evaluated_ema.update();
    const EmaGuard averaged(evaluated_ema);
    EXPECT_TRUE(torch::equal(evaluated_parameter.detach(), ema.averages()[0].to(dtype)));
    if (i > 2) {
      EXPECT_FALSE(torch::equal(evaluated_parameter, parameter)) << i;
    }
  }
  EXPECT_THAT(get_tensors(evaluated, evaluated_parameter),
              BitwiseEqual(get_tensors(optimizer, parameter)));
}

// A master or archive created in the scope would hold the average.
TEST(EmaGuard, MasterParamsAndSaveThrowInside) {
  torch::Tensor parameter = torch::ones({3}, torch::kBFloat16).requires_grad_();
  auto optimizer = make(parameter, WeightStorage::fp32_master);
  step(optimizer, parameter);
  Ema ema({parameter});
  {
    const EmaGuard averaged(ema);
    const auto says = HasSubstr("end its scope first");
    EXPECT_THAT(message_of([&] { (void)mezzo::master_params(optimizer); }), says);
    std::ostringstream file;
    EXPECT_THAT(message_of([&] { torch::save(optimizer, file); }), says);
  }
  EXPECT_EQ(mezzo::master_params(optimizer).size(), 1U);
}

TEST(EmaGuard, TrainingContinuesBitwise) {
  expect_training_unchanged(WeightStorage::plain, torch::kFloat);
  expect_training_unchanged(WeightStorage::fp32_master, torch::kBFloat16);
  expect_training_unchanged(WeightStorage::fp32_master, torch::kHalf);
  expect_training_unchanged(WeightStorage::split_master, torch::kBFloat16);
  expect_training_unchanged(WeightStorage::stochastic_rounding, torch::kBFloat16);
}

TEST(EmaGuard, ThrowsForResizedParam) {
  torch::Tensor first = weight({1}), second = weight({1});
  Ema ema({first, second}, {.decay = 0.5});
  set_value(first, 3);
  ema.update();
  second.set_data(torch::zeros({2}));
  EXPECT_THAT(message_of([&] { const EmaGuard averaged(ema); }),
              HasSubstr("parameter 1 (float32 [2] on cpu) had the shape [1]"));
  EXPECT_EQ(first.item<float>(), 3);
  second.set_data(torch::ones({1}));
  EXPECT_NO_THROW(ema.update());
}

TEST(EmaGuard, StepInsideGuardHasNoGradients) {
  for (const auto storage :
       {WeightStorage::plain, WeightStorage::fp32_master, WeightStorage::split_master}) {
    torch::Tensor parameter = torch::linspace(-1, 1, 37).to(torch::kBFloat16).requires_grad_();
    auto optimizer = make(parameter, storage);
    Ema ema({parameter}, {.decay = 0.5});
    step(optimizer, parameter);
    ema.update();
    const auto before = clone_all(get_tensors(optimizer, parameter));
    const torch::Tensor gradient = parameter.grad();
    {
      const EmaGuard averaged(ema);
      EXPECT_FALSE(parameter.grad().defined());
      optimizer.step();
      parameter.sum().backward();
    }
    EXPECT_TRUE(parameter.grad().is_same(gradient));
    EXPECT_THAT(get_tensors(optimizer, parameter), BitwiseEqual(before));
  }
}

TEST(EmaGuard, RestoresWeightsTrainedInsideGuard) {
  for (const auto storage :
       {WeightStorage::plain, WeightStorage::fp32_master, WeightStorage::split_master}) {
    torch::Tensor parameter = torch::linspace(-1, 1, 37).to(torch::kBFloat16).requires_grad_();
    auto optimizer = make(parameter, storage);
    Ema ema({parameter}, {.decay = 0.5});
    step(optimizer, parameter);
    ema.update();
    const torch::Tensor before = parameter.detach().clone();
    {
      const EmaGuard averaged(ema);
      step(optimizer, parameter);
    }
    EXPECT_TRUE(torch::equal(parameter, before));
    parameter.mutable_grad() = torch::zeros_like(parameter.detach());
    optimizer.param_groups()[0].options().set_lr(0);
    optimizer.step();
    EXPECT_TRUE(torch::equal(parameter, before)) << "the next step resumes from them";
  }
}

// master_params sets the gradients of the masters.
TEST(Ema, ReleasesGradientsOfMasters) {
  const torch::Tensor parameter = torch::ones({4}, torch::kBFloat16).requires_grad_();
  mezzo::optim::AdamW optimizer({parameter}, mezzo::optim::AdamWOptions(1e-2),
                                {.weight_storage = WeightStorage::fp32_master});
  Ema ema({parameter}, {.masters = [&] { return mezzo::master_params(optimizer); }});
  parameter.sum().backward();
  optimizer.step();
  ema.update();
  const auto& state = get_param_state<const mezzo::optim::AdamWParamState>(optimizer, parameter);
  EXPECT_FALSE(state.master().grad().defined());
  EXPECT_TRUE(parameter.grad().defined());
}

TEST(Ema, AveragesAppendedBuffers) {
  torch::nn::BatchNorm1d norm(3);
  std::vector<torch::Tensor> averaged = norm->parameters();
  averaged.push_back(norm->running_mean);
  Ema ema(averaged,
          {.decay = 0.5, .masters = return_masters({torch::full({3}, 7), torch::Tensor()})});
  set_value(norm->bias, 6);
  norm->running_mean.fill_(4);
  ema.update();
  EXPECT_EQ(ema.averages()[0][0].item<float>(), 7);
  EXPECT_EQ(ema.averages()[1][0].item<float>(), 3);
  const EmaGuard scope(ema);
  EXPECT_EQ(norm->running_mean[0].item<float>(), 2);
}

// --- Steps that a device decides, emulated with CPU tensors.

/// One parameter for each code path of an update.
std::vector<torch::Tensor> make_parameters() {
  const torch::Tensor square = torch::rand({4, 4});
  return {torch::rand({1000}),
          torch::rand({7}),
          torch::rand({3}, torch::kDouble),
          torch::rand({33}).to(torch::kBFloat16),
          torch::rand({5}).to(torch::kHalf),
          torch::rand({2, 3, 4, 5}).to(torch::MemoryFormat::ChannelsLast),
          square.t(),
          torch::rand({6, 4}).slice(1, 0, 4, 2),
          torch::empty({0}),
          torch::rand({})};
}

TEST(StepResult, HostResultLacksDeviceFoundInf) {
  EXPECT_FALSE(StepResult({.applied = true}).found_inf_on_device().defined());
  EXPECT_FALSE(StepResult({.applied = false}).found_inf_on_device().defined());
}

TEST(EmaDeviceResult, MatchesHostResultWithoutSync) {
  torch::manual_seed(3);
  const std::vector<torch::Tensor> parameters = make_parameters();
  Ema on_device(parameters, {.decay = 0.9}), on_host(parameters, {.decay = 0.9});
  for (int i = 0; i < 10; ++i) {
    for (const torch::Tensor& parameter : parameters) parameter.copy_(torch::rand_like(parameter));
    on_device.update(make_device_result(0));
    on_host.update(StepResult({.applied = true}));
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::allclose(on_device.averages()[i], on_host.averages()[i], 1e-6, 1e-7)) << i;
    EXPECT_EQ(on_device.averages()[i].strides(), on_host.averages()[i].strides()) << i;
  }
}

TEST(EmaDeviceResult, WritesOnlyAverages) {
  const std::vector<torch::Tensor> parameters = make_parameters();
  const std::vector<torch::Tensor> before = clone_all(parameters);
  Ema ema(parameters, {.decay = 0.5});
  for (const torch::Tensor& average : ema.averages()) torch::Tensor(average).zero_();
  ema.update(make_device_result(0));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_THAT(parameters[i], BitwiseEqual(before[i])) << i;
    EXPECT_TRUE(torch::allclose(ema.averages()[i], before[i].to(ema.averages()[i].dtype()) / 2))
        << i;
  }
}

TEST(EmaDeviceResult, SkippedStepPreservesAverages) {
  const std::vector<torch::Tensor> parameters = make_parameters();
  Ema ema(parameters, {.decay = 0.5});
  for (const torch::Tensor& average : ema.averages()) {
    if (average.numel() > 1) torch::Tensor(average).flatten()[0] = -0.0;
  }
  const std::vector<torch::Tensor> before = clone_all(ema.averages());
  for (const float found_inf : {1.0F, 3.0F, kInfinity}) {  // a sum over several checks
    for (const float broken : {5.0F, kInfinity, kNan}) {
      for (const torch::Tensor& parameter : parameters) parameter.fill_(broken);
      ema.update(make_device_result(found_inf));
    }
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_THAT(ema.averages()[i], BitwiseEqual(before[i])) << i;
  }
}

TEST(EmaDeviceResult, BumpsVersionCounters) {
  Ema ema({torch::ones({2})});
  const auto version = ema.averages()[0]._version();
  ema.update(make_device_result(0));
  EXPECT_GT(ema.averages()[0]._version(), version);
}

TEST(EmaInferenceMode, UpdatesInsideAndOutside) {
  torch::Tensor parameter = torch::ones({4});
  std::unique_ptr<Ema> ema;
  {
    const c10::InferenceMode inference;
    ema = std::make_unique<Ema>(std::vector{parameter, torch::ones({4})},
                                mezzo::EmaOptions{.decay = 0.5});
    parameter.fill_(3);
    ema->update();
  }
  EXPECT_FALSE(ema->averages()[0].is_inference());
  ema->update();
  ema->update(make_device_result(0));
  EXPECT_TRUE(torch::equal(ema->averages()[0], torch::full({4}, 2.75)));
  EXPECT_TRUE(torch::equal(ema->averages()[1], torch::ones({4})));
}

}  // namespace
