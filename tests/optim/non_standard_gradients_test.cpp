// Expanded, overlapping, lazy, sparse and unsupported gradients with every kind of optimizer: a
// step is bitwise identical to one with a contiguous copy, or throws and changes nothing.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/message_of.h"
#include "../support/tiny_optimizer.h"

namespace {

using mezzo::GradBuckets;
using mezzo::GradScaler;
using mezzo::OptimizerRef;
using mezzo::optim::WeightStorage;
using test_support::bitwise_equal;
using test_support::BitwiseEqual;
using test_support::message_of;
using testing::HasSubstr;
using torch::Tensor;

/// An optimizer with its buckets or masters, if any.
struct WrappedOptimizer {
  std::shared_ptr<GradBuckets> buckets{};
  std::shared_ptr<torch::optim::Optimizer> optimizer{};
  std::shared_ptr<mezzo::MasterWeights> masters{};

  OptimizerRef ref() const { return masters ? OptimizerRef(*masters) : OptimizerRef(*optimizer); }
  mezzo::StepResult step(GradScaler& scaler, const mezzo::StepOptions& options) const {
    return scaler.step(ref(), options);
  }
  /// As torch.amp's step: unscales in place unless the optimizer is mezzo's.
  mezzo::StepResult step(GradScaler& scaler) const {
    return masters ? scaler.step(*masters) : scaler.step(*optimizer);
  }
};

/// An optimizer of parameters of one dtype.
struct StepPath {
  std::string name;
  torch::ScalarType dtype;  ///< of the parameters
  std::function<WrappedOptimizer(const std::vector<Tensor>&)> make;
};
std::ostream& operator<<(std::ostream& stream, const StepPath& path) { return stream << path.name; }

template <class Optimizer, class Options>
StepPath plain(std::string name, Options options, torch::ScalarType dtype = torch::kFloat,
               auto... weights) {
  return {std::move(name), dtype, [options, weights...](const std::vector<Tensor>& parameters) {
            return WrappedOptimizer{
                .optimizer = std::make_shared<Optimizer>(parameters, options, weights...)};
          }};
}

template <class Optimizer, class Options>
StepPath with_masters(std::string name, Options options) {
  return {std::move(name), torch::kBFloat16, [options](const std::vector<Tensor>& parameters) {
            WrappedOptimizer made{.optimizer = std::make_shared<Optimizer>(parameters, options)};
            made.masters = std::make_shared<mezzo::MasterWeights>(*made.optimizer);
            return made;
          }};
}

template <class Optimizer, class Options>
StepPath over_buckets(std::string name, Options options, torch::ScalarType dtype = torch::kFloat,
                      auto... weights) {
  return {std::move(name), dtype, [options, weights...](const std::vector<Tensor>& parameters) {
            return WrappedOptimizer{
                .buckets = std::make_shared<GradBuckets>(parameters),
                .optimizer = std::make_shared<Optimizer>(parameters, options, weights...)};
          }};
}

namespace to = torch::optim;
namespace mo = mezzo::optim;

const StepPath kPaths[] = {
    plain<to::SGD>("TorchSgd", to::SGDOptions(0.5).momentum(0.9)),
    plain<to::AdamW>("TorchAdamW", to::AdamWOptions(0.5)),
    plain<mo::SGD>("Sgd", mo::SGDOptions(0.5).momentum(0.9)),
    plain<mo::AdamW>("AdamW", mo::AdamWOptions(0.5)),
    plain<mo::LAMB>("Lamb", mo::LAMBOptions(0.5)),
    plain<mo::Lion>("Lion", mo::LionOptions(0.5)),
    plain<mo::AdamW>("AdamWOfBfloat16", mo::AdamWOptions(0.5), torch::kBFloat16),
    plain<mo::AdamW>("AdamWWithMasters", mo::AdamWOptions(0.5), torch::kBFloat16,
                     mo::WeightStorageOptions{WeightStorage::fp32_master}),
    plain<mo::AdamW>("AdamWWithSplitMasters", mo::AdamWOptions(0.5), torch::kBFloat16,
                     mo::WeightStorageOptions{WeightStorage::split_master}),
    with_masters<to::AdamW>("MastersOfTorchAdamW", to::AdamWOptions(0.5)),
    with_masters<to::SGD>("MastersOfTorchSgd", to::SGDOptions(0.5).momentum(0.9)),
    over_buckets<to::AdamW>("TorchAdamWOverBuckets", to::AdamWOptions(0.5)),
    over_buckets<mo::AdamW>("AdamWOverBuckets", mo::AdamWOptions(0.5)),
    over_buckets<mo::AdamW>("AdamWWithMastersOverBuckets", mo::AdamWOptions(0.5), torch::kBFloat16,
                            mo::WeightStorageOptions{WeightStorage::fp32_master}),
};

constexpr double kLossScale = 1024;

/// bfloat16 values times the scale, a power of two.
Tensor make_values(std::vector<int64_t> shape, torch::ScalarType dtype) {
  return (torch::randn(shape).to(torch::kBFloat16).to(torch::kFloat) * kLossScale).to(dtype);
}

/// Returns a {4, 6} gradient of the given form for a parameter of `dtype`.
Tensor make_gradient(const std::string& form, torch::ScalarType dtype) {
  const auto make_contiguous = [&] { return make_values({4, 6}, dtype); };
  if (form == "Transposed") return make_values({6, 4}, dtype).t();
  if (form == "WithGaps") {
    const Tensor all = torch::full({8, 12}, NAN, dtype);
    all.slice(0, 0, 8, 2).slice(1, 0, 12, 2).copy_(make_contiguous());
    return all.slice(0, 0, 8, 2).slice(1, 0, 12, 2);
  }
  if (form == "ExpandedRows") return make_values({1, 6}, dtype).expand({4, 6});
  if (form == "ExpandedColumns") return make_values({4, 1}, dtype).expand({4, 6});
  if (form == "ExpandedScalar") return make_values({}, dtype).expand({4, 6});
  if (form == "Overlapping") return make_values({9}, dtype).as_strided({4, 6}, {1, 1});
  if (form == "OverlappingRows") return make_values({18}, dtype).as_strided({4, 6}, {4, 1});
  if (form == "NegativeView") return torch::_neg_view(make_contiguous());
  if (form == "ZeroTensor") return torch::_efficientzerotensor({4, 6}, torch::dtype(dtype));
  if (form == "WithGraph") return make_contiguous().requires_grad_() * 1;
  if (form == "Sparse") return make_contiguous().to_sparse(1);
  if (form == "UncoalescedSparse") {
    return torch::sparse_coo_tensor(torch::tensor({{0, 2, 0}}, torch::kLong),
                                    make_values({3, 6}, dtype).sign() * kLossScale, {4, 6});
  }
  if (form == "Integer") return torch::ones({4, 6}, torch::kLong);
  if (form == "Bool") return torch::ones({4, 6}, torch::kBool);
  if (form == "Complex") return torch::ones({4, 6}, torch::kComplexFloat);
  if (form == "Float8") return torch::ones({4, 6}).to(torch::kFloat8_e4m3fn);
  if (form == "Quantized") {
    return torch::quantize_per_tensor(torch::ones({4, 6}), 0.5, 0, torch::kQInt8);
  }
  if (form == "Meta") return torch::ones({4, 6}, torch::dtype(dtype).device(torch::kMeta));
  if (form == "CompressedRows") return make_contiguous().to_sparse_csr();
  EXPECT_EQ(form, "Plain");
  return make_contiguous();
}

const std::vector<std::string> kForms{
    "Plain",          "Transposed",  "WithGaps",         "ExpandedRows", "ExpandedColumns",
    "ExpandedScalar", "Overlapping", "OverlappingRows",  "NegativeView", "ZeroTensor",
    "WithGraph",      "Sparse",      "UncoalescedSparse"};

/// Forms that mezzo's optimizers do not support.
const std::vector<std::string> kUnsupportedForms{"Integer",   "Bool", "Complex",       "Float8",
                                                 "Quantized", "Meta", "CompressedRows"};

std::string save_to_bytes(const OptimizerRef& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

/// Three parameters; the middle one gets the non-standard gradients.
struct TrainingRun {
  explicit TrainingRun(const StepPath& path) : dtype(path.dtype) {
    torch::manual_seed(1);
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{5}, {4, 6}, {3}}) {
      parameters.push_back(torch::randn(shape).to(dtype).requires_grad_());
    }
    wrapped = path.make(parameters);
    scaler.on_skip(nullptr);
    (void)scaler.scale(torch::zeros({}));
  }

  /// Sets the gradients of a step; the middle one of `form`, or a contiguous copy of it.
  void set_gradients(int step, const std::string& form, bool is_contiguous_copy) {
    torch::manual_seed(10 + step);
    Tensor odd = make_gradient(form, dtype);
    if (is_contiguous_copy)
      odd = odd.detach().to_dense().clone(torch::MemoryFormat::Contiguous).resolve_neg();
    parameters[1].mutable_grad() = odd;
    parameters[0].mutable_grad() = make_values({5}, dtype);
    parameters[2].mutable_grad() = make_values({3}, dtype);
  }

  std::vector<Tensor> weights() const { return test_support::clone_all(parameters); }
  OptimizerRef ref() const { return wrapped.ref(); }
  mezzo::StepResult step(const mezzo::StepOptions& options) {
    return wrapped.step(scaler, options);
  }
  mezzo::StepResult step() { return wrapped.step(scaler); }

  torch::ScalarType dtype;
  std::vector<Tensor> parameters;
  WrappedOptimizer wrapped;
  GradScaler scaler{{.init_scale = kLossScale}};
};

/// Steps in one of several ways. Returns nullopt without a result.
std::optional<mezzo::StepResult> step_by(TrainingRun& training, const std::string& call) {
  if (call == "NoScaler") {
    training.ref().step();
    return std::nullopt;
  }
  if (call == "UnscaleThenStep") training.scaler.unscale_(training.ref());
  std::optional result = call == "StepWithClippingAndZeroGrad"
                             ? training.step({.max_norm = 0.5, .zero_grad = true})
                             : training.step();
  training.scaler.update();
  return result;
}

const std::vector<std::string> kCalls{"Step", "StepWithClippingAndZeroGrad", "UnscaleThenStep",
                                      "NoScaler"};

/// Whether the update is torch's, or of ATen ops.
bool updates_with_torch(const StepPath& path) {
  return path.name.find("Torch") != std::string::npos || path.name == "Lamb";
}

bool is_torch_error(const std::string& error) {
  return error.find("does not support sparse gradients") != std::string::npos;
}

class NonStandardGradients : public testing::TestWithParam<StepPath> {};

TEST_P(NonStandardGradients, MatchContiguousBitwiseOrThrow) {
  for (const std::string& call : kCalls) {
    for (const std::string& form : kForms) {
      SCOPED_TRACE(call + ", " + form);
      TrainingRun odd(GetParam()), plain(GetParam());
      for (int step = 0; step < 2; ++step) {
        odd.set_gradients(step, form, false);
        plain.set_gradients(step, form, true);
        const auto before = odd.weights();
        const std::string error = message_of([&] { step_by(odd, call); });
        if (error != "no error") {
          // Writes of torch before the exception stay.
          if (!is_torch_error(error)) {
            EXPECT_THAT(odd.weights(), BitwiseEqual(before));
          }
          break;
        }
        step_by(plain, call);
        for (std::size_t i = 0; i < odd.parameters.size(); ++i) {
          EXPECT_TRUE(torch::isfinite(odd.parameters[i]).all().item<bool>()) << i;
          // torch adds expanded or sparse gradients in another order; without a scaler gradients
          // are as large as the scale.
          const double rounding = updates_with_torch(GetParam()) ? 1e-6 : 0;
          EXPECT_TRUE(torch::allclose(odd.parameters[i], plain.parameters[i], rounding,
                                      rounding * kLossScale))
              << i;
        }
      }
    }
  }
}

// After the exception a supported gradient suffices: no other gradient was unscaled meanwhile.
TEST_P(NonStandardGradients, ThrowingGradientPreservesOthers) {
  for (const std::string& form : kUnsupportedForms) {
    for (const std::string& call : kCalls) {
      if (call == "NoScaler" && updates_with_torch(GetParam())) continue;  // torch accepts integers
      SCOPED_TRACE(call + ", " + form);
      TrainingRun odd(GetParam()), plain(GetParam());
      for (TrainingRun* training : {&odd, &plain}) {
        training->set_gradients(0, "Plain", false);
        step_by(*training, call);
        training->set_gradients(1, "Plain", false);
      }
      const auto before = odd.weights();
      const std::string state = save_to_bytes(odd.ref());
      const Tensor good = odd.parameters[1].grad();
      odd.parameters[1].mutable_grad() = make_gradient(form, odd.dtype);
      EXPECT_NE(message_of([&] { step_by(odd, call); }), "no error");
      EXPECT_THAT(odd.weights(), BitwiseEqual(before));
      EXPECT_EQ(save_to_bytes(odd.ref()), state);
      odd.parameters[1].mutable_grad() = good;
      step_by(odd, call);
      step_by(plain, call);
      EXPECT_THAT(odd.weights(), BitwiseEqual(plain.weights()));
    }
  }
}

TEST_P(NonStandardGradients, InfSkipsStep) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const std::string& call : kCalls) {
    if (call == "NoScaler") continue;
    for (const std::string& form : kForms) {
      if (form == "ZeroTensor" || form == "WithGraph") continue;
      SCOPED_TRACE(call + ", " + form);
      TrainingRun training(GetParam());
      training.set_gradients(0, "Plain", false);
      step_by(training, call);
      training.set_gradients(1, form, false);
      const Tensor gradient = training.parameters[1].grad();
      const Tensor memory = gradient.is_sparse() ? gradient._values() : gradient;
      memory.select(0, 0).select(-1, 0).fill_(inf);
      const auto before = training.weights();
      const std::string state = save_to_bytes(training.ref());
      std::optional<mezzo::StepResult> result;
      if (message_of([&] { result = step_by(training, call); }) != "no error") continue;
      EXPECT_FALSE(result->applied());
      EXPECT_THAT(training.weights(), BitwiseEqual(before));
      EXPECT_EQ(save_to_bytes(training.ref()), state);
      EXPECT_EQ(training.scaler.get_scale(), kLossScale / 2);
    }
  }
}

TEST_P(NonStandardGradients, RepeatedNaNKeepsScalePositive) {
  for (const std::string& call : kCalls) {
    if (call == "NoScaler") continue;
    SCOPED_TRACE(call);
    TrainingRun training(GetParam());
    training.set_gradients(0, "Plain", false);
    step_by(training, call);
    const auto before = training.weights();
    const std::string state = save_to_bytes(training.ref());
    for (int step = 1; step < 200; ++step) {
      training.set_gradients(step, "Plain", false);
      for (const Tensor& parameter : training.parameters) {
        parameter.mutable_grad() = torch::full_like(parameter, NAN);
      }
      EXPECT_FALSE(step_by(training, call)->applied());
    }
    EXPECT_THAT(training.weights(), BitwiseEqual(before));
    EXPECT_EQ(save_to_bytes(training.ref()), state);
    const double scale = training.scaler.get_scale();
    EXPECT_GT(scale, 0);
    EXPECT_TRUE(std::isfinite(1 / static_cast<float>(scale)));
    // Training continues without the NaN.
    for (const Tensor& parameter : training.parameters) {
      parameter.mutable_grad() = torch::full_like(parameter, scale);
    }
    EXPECT_TRUE(step_by(training, call)->applied());
    EXPECT_TRUE(torch::isfinite(training.weights()[1]).all().item<bool>());
    EXPECT_FALSE(bitwise_equal(training.weights()[1], before[1]));
  }
}

TEST_P(NonStandardGradients, InfInOneMicroBatchSkipsStep) {
  for (int bad = 0; bad < 3; ++bad) {
    SCOPED_TRACE(bad);
    TrainingRun training(GetParam());
    const auto accumulate = [&](bool has_inf) {
      for (int micro = 0; micro < 3; ++micro) {
        Tensor loss = torch::zeros({});
        for (const Tensor& parameter : training.parameters) {
          loss = loss + parameter.to(torch::kFloat).square().sum();
        }
        if (has_inf && micro == bad) loss = loss * std::numeric_limits<float>::infinity();
        training.scaler.scale(loss).backward();
      }
    };
    accumulate(false);
    EXPECT_TRUE(training.step().applied());
    training.scaler.update();
    for (const Tensor& parameter : training.parameters) parameter.mutable_grad() = Tensor();
    const auto before = training.weights();
    const std::string state = save_to_bytes(training.ref());
    accumulate(true);
    EXPECT_FALSE(training.step().applied());
    training.scaler.update();
    EXPECT_THAT(training.weights(), BitwiseEqual(before));
    EXPECT_EQ(save_to_bytes(training.ref()), state);
  }
}

TEST_P(NonStandardGradients, UndefinedGradientPreservesParam) {
  for (const std::string& call : kCalls) {
    SCOPED_TRACE(call);
    TrainingRun all(GetParam()), some(GetParam());
    for (int step = 0; step < 2; ++step) {
      all.set_gradients(step, "Plain", false);
      some.set_gradients(step, "Plain", false);
      some.parameters[1].mutable_grad() = Tensor();
      const Tensor untouched = some.weights()[1];
      // Clipping and LAMB's trust ratio depend on all gradients unless nothing is clipped.
      if (call == "StepWithClippingAndZeroGrad") all.parameters[1].mutable_grad().zero_();
      step_by(all, call);
      step_by(some, call);
      EXPECT_THAT(some.weights()[1], BitwiseEqual(untouched));
      EXPECT_THAT(some.weights()[0], BitwiseEqual(all.weights()[0]));
      EXPECT_THAT(some.weights()[2], BitwiseEqual(all.weights()[2]));
    }
  }
}

TEST_P(NonStandardGradients, EmptyParamsThrowOrDoNothing) {
  WrappedOptimizer wrapped;
  const std::string made = message_of([&] { wrapped = GetParam().make({}); });
  if (made != "no error") {
    EXPECT_THAT(made, HasSubstr("parameter"));
    return;
  }
  GradScaler scaler({.init_scale = kLossScale});
  (void)scaler.scale(torch::zeros({}));
  EXPECT_NO_THROW(wrapped.ref().step());
  EXPECT_THAT(message_of([&] { wrapped.step(scaler); }),
              HasSubstr("No inf checks were recorded for this optimizer"));
  EXPECT_THAT(message_of([&] { scaler.update(); }), HasSubstr("No inf checks were recorded"));
  EXPECT_FALSE(save_to_bytes(wrapped.ref()).empty());
}

TEST_P(NonStandardGradients, ThrowingHookPreservesNextStep) {
  TrainingRun thrown(GetParam()), plain(GetParam());
  bool throws = true;
  thrown.parameters[0].register_hook([&](const Tensor& gradient) {
    if (throws) throw std::runtime_error("a hook");
    return gradient;
  });
  const auto backward = [](TrainingRun& training) {
    Tensor loss = torch::zeros({});
    for (const Tensor& parameter : training.parameters) {
      loss = loss + parameter.to(torch::kFloat).square().sum();
    }
    training.scaler.scale(loss).backward();
  };
  EXPECT_THROW(backward(thrown), std::runtime_error);
  throws = false;
  for (TrainingRun* training : {&thrown, &plain}) {
    training->wrapped.optimizer->zero_grad();
    backward(*training);
    training->step({.max_norm = 0.5});
    training->scaler.update();
  }
  EXPECT_THAT(thrown.weights(), BitwiseEqual(plain.weights()));
}

TEST_P(NonStandardGradients, ThrowingClosureChangesNothing) {
  TrainingRun thrown(GetParam()), plain(GetParam());
  for (TrainingRun* training : {&thrown, &plain}) training->set_gradients(0, "Plain", false);
  const auto before = thrown.weights();
  const std::string state = save_to_bytes(thrown.ref());
  EXPECT_THROW(thrown.ref().step([]() -> Tensor { throw std::runtime_error("a closure"); }),
               std::runtime_error);
  EXPECT_THAT(thrown.weights(), BitwiseEqual(before));
  EXPECT_EQ(save_to_bytes(thrown.ref()), state);
  for (TrainingRun* training : {&thrown, &plain}) {
    training->step();
    training->scaler.update();
  }
  EXPECT_THAT(thrown.weights(), BitwiseEqual(plain.weights()));
}

INSTANTIATE_TEST_SUITE_P(AllPaths, NonStandardGradients, testing::ValuesIn(kPaths),
                         [](const auto& path) { return path.param.name; });

}  // namespace
