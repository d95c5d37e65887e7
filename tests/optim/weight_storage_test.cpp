// WeightStorage of 16-bit parameters, compared with float32; external writes.
#include <mezzo/kernels/weight_formats.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/muon.h>
#include <mezzo/optim/sgd.h>

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/get_param_state.h"
#include "../support/save_to_string.h"
#include "../support/throwing_sgd.h"
#include "../support/warning_recorder.h"
#include "../support/weight_storage_cases.h"

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::AdamWParamState;
using mezzo::optim::SGD;
using mezzo::optim::SGDOptions;
using mezzo::optim::SGDParamState;
using mezzo::optim::WeightStorage;
using test_support::get_param_state;
using test_support::OwnedOptimizer;
using test_support::WeightStorageCase;
using testing::HasSubstr;
using testing::ThrowsMessage;
using torch::Tensor;

/// Values of every exponent, infinities, subnormals, and the ties of bfloat16.
std::vector<float> make_float_values() {
  std::vector<float> values{0.0F,
                            -0.0F,
                            std::numeric_limits<float>::max(),
                            -std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()};
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t fraction : {0x0U, 0x1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU, 0x18000U,
                                    0x28000U, 0x7F8000U, 0x7FFFFFU}) {
      for (const uint32_t sign : {0U, 0x80000000U}) {
        const uint32_t bits = sign | exponent << 23 | fraction;
        float value = 0;
        std::memcpy(&value, &bits, sizeof(value));
        values.push_back(value);
      }
    }
  }
  return values;
}

TEST(SplitWeightFormat, RoundTripsEveryFloat32) {
  for (const float value : make_float_values()) {
    uint32_t upper = 0;
    uint32_t lower = 0;
    mezzo::detail::split_low_bits(value, upper, lower);
    ASSERT_LE(upper, 0xFFFFU);
    ASSERT_LE(lower, 0xFFFFU);
    float back = 0;
    mezzo::detail::combine_low_bits(upper, lower, back);
    EXPECT_EQ(std::memcmp(&back, &value, sizeof(value)), 0) << value;
  }
}

TEST(SplitWeightFormat, HighBitsAreNearestBfloat16) {
  for (const float value : make_float_values()) {
    uint32_t upper = 0;
    uint32_t lower = 0;
    mezzo::detail::split_low_bits(value, upper, lower);
    const c10::BFloat16 own(static_cast<uint16_t>(upper), c10::BFloat16::from_bits());
    const c10::BFloat16 nearest(value);
    if (static_cast<float>(own) == static_cast<float>(nearest)) continue;
    const double above = std::abs(static_cast<double>(static_cast<float>(own)) - value);
    const double below = std::abs(static_cast<double>(static_cast<float>(nearest)) - value);
    EXPECT_EQ(above, below) << value << " is not a tie, and is not rounded to nearest";
  }
}

TEST(SplitWeightFormat, PreservesNaN) {
  for (const uint32_t bits : {0x7F800001U, 0x7FFFFFFFU, 0xFFFFFFFFU, 0x7FC00000U, 0xFF80FFFFU}) {
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    uint32_t upper = 0;
    uint32_t lower = 0;
    float back = 0;
    mezzo::detail::split_low_bits(value, upper, lower);
    EXPECT_LE(upper, 0xFFFFU);
    mezzo::detail::combine_low_bits(upper, lower, back);
    EXPECT_TRUE(std::isnan(back));
  }
}

/// A 16-bit model and a float32 copy.
struct Models {
  std::vector<torch::Tensor> low;
  std::vector<torch::Tensor> floats;

  explicit Models(torch::ScalarType dtype = torch::kBFloat16) {
    torch::manual_seed(3);
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{33, 17}, {1}, {20000}, {0}}) {
      const auto values = torch::randn(shape).to(dtype);
      low.push_back(values.clone().requires_grad_());
      floats.push_back(values.to(torch::kFloat).requires_grad_());
    }
    low.push_back(torch::randn({6, 5}).to(dtype).t().requires_grad_());
    floats.push_back(low.back().detach().to(torch::kFloat).requires_grad_());
    low.push_back(torch::randn({6, 4}).to(dtype).requires_grad_());
    floats.push_back(low.back().detach().to(torch::kFloat).requires_grad_());
  }

  void set_gradients() const {
    for (std::size_t i = 0; i < low.size(); ++i) {
      const auto gradient = torch::randn(low[i].sizes()).to(low[i].scalar_type());
      low[i].mutable_grad() = gradient.clone();
      floats[i].mutable_grad() = gradient.to(torch::kFloat);
    }
  }

  template <class Left, class Right>
  void step(Left& left, Right& right, int steps) const {
    for (int i = 0; i < steps; ++i) {
      set_gradients();
      left.step();
      right.step();
    }
  }
};

template <class T>
class WeightStorageTraining : public testing::Test {};

struct AdamWCase {
  using Optimizer = mezzo::optim::AdamW;
  using State = mezzo::optim::AdamWParamState;
  static auto options() { return mezzo::optim::AdamWOptions(1e-3).weight_decay(0.1); }
};
struct AmsgradCase {
  using Optimizer = mezzo::optim::Adam;
  using State = mezzo::optim::AdamParamState;
  static auto options() { return mezzo::optim::AdamOptions(1e-3).amsgrad(true); }
};
struct MomentumCase {
  using Optimizer = mezzo::optim::SGD;
  using State = mezzo::optim::SGDParamState;
  static auto options() { return mezzo::optim::SGDOptions(1e-3).momentum(0.9); }
};
struct PlainSgdCase {
  using Optimizer = mezzo::optim::SGD;
  using State = mezzo::optim::SGDParamState;
  static auto options() { return mezzo::optim::SGDOptions(1e-3); }
};
struct LionCase {
  using Optimizer = mezzo::optim::Lion;
  using State = mezzo::optim::LionParamState;
  static auto options() { return mezzo::optim::LionOptions(1e-3); }
};
using Cases = testing::Types<AdamWCase, AmsgradCase, MomentumCase, PlainSgdCase, LionCase>;
TYPED_TEST_SUITE(WeightStorageTraining, Cases, );

TYPED_TEST(WeightStorageTraining, Fp32MasterMatchesFloat32Model) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const Models models(dtype);
    typename TypeParam::Optimizer low(models.low, TypeParam::options(),
                                      {.weight_storage = WeightStorage::fp32_master});
    typename TypeParam::Optimizer floats(models.floats, TypeParam::options());
    models.step(low, floats, 20);
    for (std::size_t i = 0; i < models.low.size(); ++i) {
      const auto& master = get_param_state<typename TypeParam::State>(low, models.low[i]).master();
      EXPECT_TRUE(torch::equal(master, models.floats[i])) << i;
      EXPECT_TRUE(torch::equal(models.low[i], models.floats[i].to(dtype))) << i;
    }
  }
}

TYPED_TEST(WeightStorageTraining, SplitMasterMatchesFloat32Model) {
  const Models models;
  typename TypeParam::Optimizer low(models.low, TypeParam::options(),
                                    {.weight_storage = WeightStorage::split_master});
  typename TypeParam::Optimizer floats(models.floats, TypeParam::options());
  models.step(low, floats, 20);
  for (std::size_t i = 0; i < models.low.size(); ++i) {
    auto& state = get_param_state<typename TypeParam::State>(low, models.low[i]);
    EXPECT_FALSE(state.master().defined());
    const auto combine_master =
        mezzo::detail::combine_with_low_bits(models.low[i], state.low_bits());
    EXPECT_TRUE(torch::equal(combine_master, models.floats[i])) << i;
  }
}

TYPED_TEST(WeightStorageTraining, ResumesBitwiseFromArchive) {
  for (const auto storage : {WeightStorage::plain, WeightStorage::fp32_master,
                             WeightStorage::split_master, WeightStorage::stochastic_rounding}) {
    const Models models;
    typename TypeParam::Optimizer first(models.low, TypeParam::options(),
                                        {.weight_storage = storage, .seed = 5});
    models.step(first, first, 3);
    std::stringstream file;
    torch::save(first, file);
    const std::vector<torch::Tensor> saved = test_support::clone_all(models.low);

    Models resumed;
    {  // as in another process: loads the optimizer before the model
      typename TypeParam::Optimizer second(resumed.low, TypeParam::options());
      torch::load(second, file);
      EXPECT_EQ(second.applied_steps(), first.applied_steps());
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < saved.size(); ++i) resumed.low[i].copy_(saved[i]);
      for (int step = 0; step < 3; ++step) {
        models.set_gradients();
        for (std::size_t i = 0; i < saved.size(); ++i) {
          resumed.low[i].mutable_grad() = models.low[i].grad().clone();
        }
        first.step();
        second.step();
      }
      EXPECT_THAT(resumed.low, test_support::BitwiseEqual(models.low))
          << "storage " << static_cast<int>(storage);
    }
  }
}

TEST(SplitWeightFormat, PreservesMasterTies) {
  const auto parameter = torch::full({1}, 1.0F).to(torch::kBFloat16);
  const auto tie = torch::full({1}, 1.0F + 1.0F / 256);  // the nearest even bfloat16 is 1
  AdamWParamState state;
  state.master(tie.clone());
  mezzo::detail::prepare_low_bits(parameter, state);
  EXPECT_TRUE(torch::equal(mezzo::detail::combine_with_low_bits(parameter, state.low_bits()), tie));
  EXPECT_FALSE(state.master().defined());
}

TEST(WeightStorage, Float32ParamsArePlain) {
  for (const auto storage : {WeightStorage::fp32_master, WeightStorage::split_master,
                             WeightStorage::stochastic_rounding}) {
    const auto ours = torch::ones({50}).requires_grad_();
    const auto plain = torch::ones({50}).requires_grad_();
    AdamW with(std::vector{ours}, AdamWOptions(1e-2), {.weight_storage = storage});
    AdamW without(std::vector{plain}, AdamWOptions(1e-2));
    ours.mutable_grad() = torch::rand({50});
    plain.mutable_grad() = ours.grad().clone();
    with.step();
    without.step();
    EXPECT_TRUE(torch::equal(ours, plain));
    EXPECT_FALSE(get_param_state<AdamWParamState>(with, ours).master().defined());
  }
}

TEST(WeightStorage, WarnsWithout16BitWeights) {
  const c10::WarningUtils::WarnAlways warn_each_time;
  const auto warned = [](WeightStorage storage, torch::ScalarType second) {
    const test_support::WarningRecorder warnings;
    const auto x = torch::ones({2}).requires_grad_();
    const auto y = torch::ones({2}, second).requires_grad_();
    AdamW optimizer({x, y}, AdamWOptions(0.1), {.weight_storage = storage});
    for (const auto& one : {x, y}) one.mutable_grad() = torch::ones_like(one.detach());
    optimizer.step();
    return warnings.texts;
  };
  for (const auto storage : {WeightStorage::split_master, WeightStorage::stochastic_rounding}) {
    EXPECT_THAT(warned(storage, torch::kFloat),
                testing::ElementsAre(HasSubstr("Cast it with model->to(torch::kBFloat16)")));
    EXPECT_THAT(warned(storage, torch::kBFloat16), testing::ElementsAre());
  }
  EXPECT_THAT(warned(WeightStorage::fp32_master, torch::kFloat), testing::ElementsAre());
}

TEST(WeightStorage, ThrowsForFloat16SplitOrStochastic) {
  for (const auto& [storage, name] : std::vector<std::pair<WeightStorage, std::string>>{
           {WeightStorage::split_master, "split_master"},
           {WeightStorage::stochastic_rounding, "stochastic"}}) {
    const auto parameter = torch::ones({3}, torch::kHalf).requires_grad_();
    parameter.mutable_grad() = torch::ones({3}, torch::kHalf);
    AdamW optimizer({parameter}, AdamWOptions(1e-2), {.weight_storage = storage});
    EXPECT_THAT([&] { optimizer.step(); }, ThrowsMessage<c10::Error>(testing::AllOf(
                                               HasSubstr("WeightStorage::" + name),
                                               HasSubstr("not parameter 0 of group 0 (float16 ["),
                                               HasSubstr("use WeightStorage::fp32_master"))));
  }
}

TEST(WeightStorage, LoadOfTorchArchivePreservesStorage) {
  const Models models;
  torch::optim::AdamW theirs(models.low, torch::optim::AdamWOptions(1e-3));
  models.set_gradients();
  theirs.step();
  const std::string file = test_support::save_to_string(theirs);
  AdamW ours(models.low, AdamWOptions(7),
             {.weight_storage = WeightStorage::fp32_master, .seed = 9});
  test_support::load_from_string(ours, file);
  EXPECT_EQ(ours.param_groups()[0].options().get_lr(), 1e-3);
  EXPECT_EQ(ours.weight_storage_options().weight_storage, WeightStorage::fp32_master);
  EXPECT_EQ(ours.weight_storage_options().seed, 9U);
  EXPECT_EQ(ours.applied_steps(), 1);
  models.set_gradients();
  ours.step();
  EXPECT_EQ(get_param_state<AdamWParamState>(ours, models.low[0]).exp_avg().scalar_type(),
            torch::kFloat);
  EXPECT_EQ(get_param_state<AdamWParamState>(ours, models.low[0]).step(), 2);
}

TEST(WeightStorage, PlainStorageWarns) {
  const c10::WarningUtils::WarnAlways warn_each_time;
  const Models models;
  const auto warnings_of = [&models](WeightStorage storage, const std::vector<at::Tensor>& model) {
    AdamW optimizer(model, AdamWOptions(1e-3), {.weight_storage = storage});
    models.set_gradients();
    test_support::WarningRecorder warnings;
    optimizer.step();
    return warnings.texts;
  };
  EXPECT_THAT(warnings_of(WeightStorage::plain, models.low),
              testing::Contains(testing::AllOf(
                  HasSubstr("AdamW: parameter 0 of group 0 (bfloat16"),
                  HasSubstr("Use WeightStorage::fp32_master, or stochastic_rounding"))));
  for (const auto storage : {WeightStorage::fp32_master, WeightStorage::split_master,
                             WeightStorage::stochastic_rounding}) {
    EXPECT_THAT(warnings_of(storage, models.low), testing::IsEmpty());
  }
  EXPECT_THAT(warnings_of(WeightStorage::plain, models.floats), testing::IsEmpty());
}

TEST(WeightStorage, ParamsWithoutGradientAreNotChecked) {
  const c10::WarningUtils::WarnAlways warn_each_time;
  const torch::Tensor trained = torch::ones({3}).requires_grad_();
  trained.mutable_grad() = torch::ones({3});
  for (const auto& [dtype, storage] : {std::pair(torch::kBFloat16, WeightStorage::plain),
                                       std::pair(torch::kHalf, WeightStorage::split_master)}) {
    AdamW optimizer({trained, torch::ones({3}, dtype)}, AdamWOptions(0.1),
                    {.weight_storage = storage});
    test_support::WarningRecorder warnings;
    optimizer.step();
    EXPECT_THAT(warnings.texts, testing::IsEmpty());
  }
}

TEST(WeightStorage, WarningReportsFloat16MomentUnderflow) {
  const c10::WarningUtils::WarnAlways warn_each_time;
  const torch::Tensor weight = torch::ones({2, 2}, torch::kHalf).requires_grad_();
  weight.mutable_grad() = torch::ones_like(weight);
  test_support::WarningRecorder warnings;
  AdamW({weight}, AdamWOptions(0.1)).step();
  EXPECT_THAT(warnings.texts, testing::ElementsAre(HasSubstr("below 0.005 is 0")));
  mezzo::optim::LAMB({weight}).step();
  mezzo::optim::Muon({weight}).step();
  EXPECT_THAT(warnings.texts,
              testing::ElementsAre(testing::_, HasSubstr("LAMB: parameter 0 of group 0"),
                                   testing::AllOf(HasSubstr("Muon: parameter 0 of group 0"),
                                                  HasSubstr("training may stall"))));
  mezzo::optim::Muon inner({weight});
  mezzo::MasterWeights(inner).step();
  EXPECT_EQ(warnings.texts.size(), 3U);
}

// --- Changes of parameters between steps.

torch::Tensor combine_master(const torch::optim::Optimizer& optimizer,
                             const torch::Tensor& parameter) {
  return mezzo::detail::combine_with_low_bits(
      parameter, get_param_state<AdamWParamState>(optimizer, parameter).low_bits());
}

void set_grad(const torch::Tensor& parameter, double value) {
  parameter.mutable_grad() = torch::full_like(parameter.detach(), value);
}

/// A bfloat16 parameter with nonzero low bits.
class SplitMasterParam : public testing::Test {
 protected:
  SplitMasterParam() {
    set_grad(parameter_, 0.5);
    optimizer_.step();
    EXPECT_TRUE(
        get_param_state<AdamWParamState>(optimizer_, parameter_).low_bits().any().item<bool>());
  }

  AdamWOptions& options() {
    return static_cast<AdamWOptions&>(optimizer_.param_groups()[0].options());
  }

  /// A step with lr 0.
  void step_with_zero_lr() {
    options().lr(0);
    set_grad(parameter_, 0);
    optimizer_.step();
  }

  torch::Tensor parameter_ = torch::rand({100}).to(torch::kBFloat16).requires_grad_();
  AdamW optimizer_{
      {parameter_}, AdamWOptions(1e-4), {.weight_storage = WeightStorage::split_master}};
};

TEST_F(SplitMasterParam, SavesAfterDtypeChange) {
  for (const auto dtype : {torch::kHalf, torch::kFloat}) {
    parameter_.set_data(parameter_.detach().to(dtype));
    const std::string file = test_support::save_to_string(optimizer_);
    AdamW loaded({parameter_}, AdamWOptions(1e-4));
    test_support::load_from_string(loaded, file);
    EXPECT_TRUE(torch::equal(get_param_state<AdamWParamState>(loaded, parameter_).master(),
                             parameter_.detach().to(torch::kFloat)));
  }
}

TEST_F(SplitMasterParam, LazyCopyPreservesLowBits) {
  const auto before = combine_master(optimizer_, parameter_);
  const auto copy = at::_lazy_clone(parameter_.detach());
  step_with_zero_lr();
  EXPECT_TRUE(torch::equal(combine_master(optimizer_, parameter_), before));
}

TEST_F(SplitMasterParam, ThrowingStepPreservesLowBits) {
  const auto before = combine_master(optimizer_, parameter_);
  const auto version = parameter_._version();
  const auto other = torch::ones({3}).requires_grad_();
  optimizer_.add_param_group(torch::optim::OptimizerParamGroup(std::vector{other}));
  set_grad(other, 1);
  auto state = std::make_unique<AdamWParamState>();
  state->exp_avg(torch::zeros({4})).exp_avg_sq(torch::zeros({4}));
  optimizer_.state()[other.unsafeGetTensorImpl()] = std::move(state);
  EXPECT_THROW(step_with_zero_lr(), c10::Error);
  EXPECT_EQ(parameter_._version(), version);
  optimizer_.state().erase(other.unsafeGetTensorImpl());
  step_with_zero_lr();
  EXPECT_TRUE(torch::equal(combine_master(optimizer_, parameter_), before));
}

TEST_F(SplitMasterParam, AcceptsResizedStorage) {
  SGD optimizer({parameter_}, SGDOptions(0), {.weight_storage = WeightStorage::split_master});
  optimizer.step();
  parameter_.mutable_grad() = torch::Tensor();
  parameter_.set_data(torch::ones({100000}, torch::kBFloat16));
  set_grad(parameter_, 0);
  optimizer.step();
  EXPECT_EQ(get_param_state<SGDParamState>(optimizer, parameter_).low_bits().numel(), 100000);
  EXPECT_TRUE(torch::equal(parameter_, torch::ones({100000}, torch::kBFloat16)));
}

// --- External writes to 16-bit parameters between steps.

/// All storages of 16-bit parameters.
std::vector<WeightStorageCase> low_precision_cases() {
  std::vector<WeightStorageCase> all = test_support::weight_storage_cases();
  std::erase_if(all, [](const WeightStorageCase& one) { return one.dtype == torch::kFloat; });
  return all;
}

constexpr int64_t kSize = 70;  // full vectors and a tail

/// Steps with all gradients equal to `gradient`.
void step(const OwnedOptimizer& optimizer, const std::vector<Tensor>& parameters, double gradient) {
  for (const Tensor& one : parameters) {
    one.mutable_grad() = torch::full_like(one.detach(), gradient);
  }
  (void)optimizer.ref().step();
}

const char* const kWrites[] = {"copy_",         "data()",
                               "set_data",      "set_data to a flat buffer that is written",
                               "a raw pointer", "torch::load"};

/// Writes `values` to a parameter.
void write_externally(const std::string& way, const Tensor& parameter, const Tensor& values) {
  const torch::NoGradGuard no_grad;
  const Tensor low = values.to(parameter.scalar_type()).clone();
  if (way == "data()") {
    parameter.data().copy_(low);
  } else if (way == "set_data") {
    parameter.set_data(low);
  } else if (way == "set_data to a flat buffer that is written") {
    const Tensor flat = torch::zeros({2 * kSize}, parameter.scalar_type());
    parameter.set_data(flat.narrow(0, 0, kSize));
    flat.narrow(0, 0, kSize).copy_(low);
  } else if (way == "a raw pointer") {
    std::memcpy(parameter.data_ptr(), low.const_data_ptr(), low.nbytes());
  } else if (way == "torch::load") {
    const std::string file = test_support::save_to_string(low);
    Tensor loaded;
    test_support::load_from_string(loaded, file);
    Tensor(parameter).copy_(loaded);
  } else {
    Tensor(parameter).copy_(low);
  }
}

TEST(ExternalWeightWrites, ApplyAtNextStep) {
  for (const WeightStorageCase& storage_case : low_precision_cases()) {
    for (const char* const way : kWrites) {
      SCOPED_TRACE(std::string(storage_case.name) + ", by " + way);
      const Tensor parameter =
          torch::linspace(-1, 1, kSize).to(storage_case.dtype).requires_grad_();
      const OwnedOptimizer optimizer = storage_case.make({parameter});
      for (int round = 0; round < 3; ++round) {
        step(optimizer, {parameter}, 0x1p-12);  // less than the last bit
        const Tensor values = torch::linspace(2 + round, 3 + round, kSize).to(storage_case.dtype);
        write_externally(way, parameter, values);
        step(optimizer, {parameter}, 0.5);
        const Tensor wanted = values.to(torch::kFloat) - 0.5;
        const Tensor apart = (parameter.detach().to(torch::kFloat) - wanted).abs();
        EXPECT_LE(apart.max().item<float>(), 4 * 0x1p-7) << "one ulp of values below 4 or 8";
        if (!storage_case.is_split) {
          EXPECT_TRUE(parameter.equal(wanted.to(storage_case.dtype)));
        }
      }
    }
  }
}

TEST(ExternalWeightWrites, PreserveOtherMasters) {
  for (const WeightStorageCase& storage_case : low_precision_cases()) {
    for (const char* const way : kWrites) {
      SCOPED_TRACE(std::string(storage_case.name) + ", by " + way);
      const Tensor written = torch::ones({kSize}, storage_case.dtype).requires_grad_();
      const Tensor alone = torch::ones({kSize}, storage_case.dtype).requires_grad_();
      const OwnedOptimizer optimizer = storage_case.make({written}),
                           other = storage_case.make({alone});
      for (int round = 0; round < 50; ++round) {
        step(optimizer, {written}, 0x1p-12);
        step(other, {alone}, 0x1p-12);
        Tensor values = written.detach().to(torch::kFloat);
        values[3] = 7;
        write_externally(way, written, values);
      }
      step(optimizer, {written}, 0);
      EXPECT_NEAR(written[3].item<float>(), 7, 0x1p-5);
      EXPECT_LT(alone[0].item<float>(), 1) << "50 updates below one ulp add up";
      EXPECT_TRUE(written.slice(0, 4).equal(alone.slice(0, 4)));
    }
  }
}

TEST(ExternalWeightWrites, ZeroInfAndNaNAreExact) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const WeightStorageCase& storage_case : low_precision_cases()) {
    for (const float from : {1.01F, -1.01F}) {
      SCOPED_TRACE(testing::Message() << storage_case.name << " from " << from);
      const Tensor parameter = torch::full({kSize}, from).to(storage_case.dtype).requires_grad_();
      const OwnedOptimizer optimizer = storage_case.make({parameter});
      step(optimizer, {parameter}, 0x1p-12);
      const std::vector<float> special{0.0F, -0.0F, inf, -inf, std::nanf("")};
      for (std::size_t i = 0; i < special.size(); ++i) {
        const torch::NoGradGuard no_grad;
        parameter[static_cast<int64_t>(i)].fill_(special[i]);
        parameter[kSize - 1 - static_cast<int64_t>(i)].fill_(special[i]);
      }
      step(optimizer, {parameter}, 0);
      for (std::size_t i = 0; i < special.size(); ++i) {
        for (const auto at : {static_cast<int64_t>(i), kSize - 1 - static_cast<int64_t>(i)}) {
          const auto now = parameter[at].item<float>();
          if (std::isnan(special[i])) {
            EXPECT_TRUE(std::isnan(now));
          } else if (std::isinf(special[i]) && storage_case.is_split) {
            EXPECT_GE(std::abs(now), 0x1.FEp127F) << "at most one ulp below inf";
          } else {
            EXPECT_EQ(now, special[i]);
          }
        }
      }
    }
  }
}

TEST(ExternalWeightWrites, InPlaceZeroIsExact) {
  for (const WeightStorageCase& storage_case : low_precision_cases()) {
    SCOPED_TRACE(storage_case.name);
    const Tensor parameter = torch::linspace(-1, 1, kSize).to(storage_case.dtype).requires_grad_();
    const OwnedOptimizer optimizer = storage_case.make({parameter});
    for (const double gradient : {0x1p-12, -0x1p-12}) {
      step(optimizer, {parameter}, gradient);
      {
        const torch::NoGradGuard no_grad;
        parameter.zero_();
      }
      step(optimizer, {parameter}, 0.5);
      EXPECT_TRUE(parameter.equal(torch::full({kSize}, -0.5, storage_case.dtype)));
    }
  }
}

// flat.split(n) returns views with one version counter: a write to one bumps all.
TEST(ExternalWeightWrites, SharedVersionCounterTrains) {
  for (const WeightStorageCase& storage_case : low_precision_cases()) {
    SCOPED_TRACE(storage_case.name);
    const Tensor flat = torch::ones({4 * kSize}, storage_case.dtype);
    std::vector<Tensor> views;
    for (const Tensor& view : flat.split(kSize)) views.push_back(view.requires_grad_());
    const Tensor alone = torch::ones({kSize}, storage_case.dtype).requires_grad_();
    const OwnedOptimizer optimizer = storage_case.make(views), other = storage_case.make({alone});
    for (int i = 0; i < 1000; ++i) {
      step(optimizer, views, 0x1p-13);
      step(other, {alone}, 0x1p-13);
    }
    EXPECT_NEAR(alone[0].item<float>(), 1 - 1000 * 0x1p-13, 0x1p-8);
    for (const Tensor& view : views) EXPECT_TRUE(view.equal(alone));
  }
}

TEST(ExternalWeightWrites, MasterWritesTakePrecedence) {
  for (const WeightStorageCase& storage_case : low_precision_cases()) {
    if (storage_case.is_split) continue;
    SCOPED_TRACE(storage_case.name);
    const Tensor parameter = torch::ones({kSize}, storage_case.dtype).requires_grad_();
    const OwnedOptimizer optimizer = storage_case.make({parameter});
    Tensor master = mezzo::master_params(optimizer.ref())[0];
    step(optimizer, {parameter}, 0.25);
    const torch::NoGradGuard no_grad;
    master.mul_(4);
    step(optimizer, {parameter}, 0.5);
    EXPECT_TRUE(parameter.equal(torch::full({kSize}, 2.5, storage_case.dtype)));
    step(optimizer, {parameter}, 0);
    master.copy_(torch::full({kSize}, 8 + 0x1p-12));
    step(optimizer, {parameter}, 0);
    EXPECT_TRUE(parameter.equal(torch::full({kSize}, 8, storage_case.dtype)));
    EXPECT_TRUE(master.equal(torch::full({kSize}, 8 + 0x1p-12))) << "the master keeps all bits";
    EXPECT_TRUE(mezzo::master_params(optimizer.ref())[0].is_same(master));
    parameter.fill_(3);
    step(optimizer, {parameter}, 0);
    EXPECT_TRUE(master.equal(torch::full({kSize}, 3.0))) << "the later write takes precedence";
  }
}

// A master exposed at an earlier step and not written since.
TEST(ExternalWeightWrites, OverrideExposedMasters) {
  for (const WeightStorageCase& storage_case : low_precision_cases()) {
    if (storage_case.is_split) continue;
    SCOPED_TRACE(storage_case.name);
    const Tensor parameter = torch::ones({kSize}, storage_case.dtype).requires_grad_();
    const OwnedOptimizer optimizer = storage_case.make({parameter});
    const Tensor master = mezzo::master_params(optimizer.ref())[0];
    for (const float value : {3.0F, 5.0F, 7.0F}) {
      step(optimizer, {parameter}, 0.25);
      const torch::NoGradGuard no_grad;
      parameter.fill_(value);
      step(optimizer, {parameter}, 1);
      EXPECT_TRUE(parameter.equal(torch::full({kSize}, value - 1, storage_case.dtype)));
      EXPECT_TRUE(master.equal(torch::full({kSize}, value - 1)));
    }
  }
}

TEST(ExternalWeightWrites, OverrideExposedMastersAfterThrow) {
  const Tensor parameter = torch::ones({kSize}, torch::kBFloat16).requires_grad_();
  test_support::ThrowingSgd inner({parameter}, 1.0);
  mezzo::MasterWeights masters(inner);
  const Tensor master = mezzo::master_params(masters)[0];
  const torch::NoGradGuard no_grad;
  parameter.mutable_grad() = torch::ones_like(parameter);
  for (const bool throws : {true, false}) {
    inner.throws = throws;
    parameter.fill_(throws ? 3 : 5);
    EXPECT_EQ(test_support::throws([&] { masters.step(); }), throws);
  }
  EXPECT_TRUE(parameter.equal(torch::full({kSize}, 4, torch::kBFloat16)));
}

}  // namespace
