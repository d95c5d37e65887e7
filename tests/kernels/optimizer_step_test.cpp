// CPU optimizer steps against scalar references, bitwise, for every pair of dtypes, instruction
// set, tail and alignment, and for extreme values.

#include <mezzo/kernels/adam_functor.h>
#include <mezzo/kernels/lion_functor.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/sgd_functor.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "step_buffers.h"

namespace {

using mezzo::detail::AdamFunctor;
using mezzo::detail::CpuIsa;
using mezzo::detail::get_step_kernel;
using mezzo::detail::LionFunctor;
using mezzo::detail::SgdFunctor;
using test_support::BitwiseEqual;

constexpr auto kPlain = mezzo::optim::WeightStorage::plain;

// Scalar references for one element, as in the papers and torch::optim. T is float, or double for
// double.

template <class T>
void reference_adam(const mezzo::detail::AdamCoefficients& c, bool amsgrad, T& parameter,
                    T gradient, T& mean, T& square, T& largest) {
  const auto in = [](double value) { return static_cast<T>(value); };
  if (c.l2 != 0) gradient = std::fma(in(c.l2), parameter, gradient);
  mean = std::fma(in(c.beta1), mean, in(1.0 - c.beta1) * gradient);
  square = std::fma(in(c.beta2), square, in(1.0 - c.beta2) * gradient * gradient);
  T divisor = square;
  if (amsgrad) divisor = largest = largest > square ? largest : square;
  const T denominator = std::fma(std::sqrt(divisor), in(c.inv_bias_correction2_sqrt), in(c.eps));
  parameter = std::fma(in(-c.step_size), mean / denominator, parameter * in(c.decay_factor));
}

template <class T>
void reference_sgd(const mezzo::detail::SgdCoefficients& c, bool has_momentum, T& parameter,
                   T gradient, T& buffer) {
  const auto in = [](double value) { return static_cast<T>(value); };
  if (c.weight_decay != 0) gradient = std::fma(in(c.weight_decay), parameter, gradient);
  T direction = gradient;
  if (has_momentum) {
    direction = buffer = std::fma(in(c.momentum), buffer, in(c.one_minus_dampening) * gradient);
    if (c.nesterov_momentum != 0) direction = std::fma(in(c.nesterov_momentum), buffer, gradient);
  }
  parameter = std::fma(in(-c.lr), direction, parameter);
}

template <class T>
void reference_lion(const mezzo::detail::LionCoefficients& c, T& parameter, T gradient, T& mean) {
  const auto in = [](double value) { return static_cast<T>(value); };
  const T direction = std::fma(in(c.beta1), mean, in(1.0 - c.beta1) * gradient);
  mean = std::fma(in(c.beta2), mean, in(1.0 - c.beta2) * gradient);
  const T zero_or_nan = direction * 0;  // zero or NaN
  const T change = direction > 0 ? in(-c.lr) : direction < 0 ? in(c.lr) : zero_or_nan;
  parameter = std::fma(parameter, in(c.decay_factor), change);
}

/// A functor with hyperparameters: its kernels and its scalar reference.
struct FunctorCase {
  std::string name;
  mezzo::detail::FunctorArgs coefficients;
  std::function<mezzo::detail::StepKernelFn(torch::ScalarType, CpuIsa)> kernel;
  /// Steps parameter, gradient and moments, all of float or all of double.
  std::function<void(const std::vector<torch::Tensor>& values, double factor)> step_reference;
};

/// \param reference  called with the coefficients, a parameter, its gradient and three moments
template <class Functor, class Reference>
FunctorCase functor_case(std::string name, const typename Functor::HyperParams& hyper_params,
                         Reference reference) {
  const auto coefficients = hyper_params.coefficients(/*lr=*/1e-3, /*step=*/3);
  const auto kernel = [](torch::ScalarType dtype, CpuIsa isa) {
    return get_step_kernel<Functor>(kPlain, dtype, isa);
  };
  return {std::move(name), coefficients, kernel,
          [coefficients, reference](const std::vector<torch::Tensor>& values, double factor) {
            const auto step_all = [&]<class T>(T) {
              for (int64_t i = 0; i < values[0].numel(); ++i) {
                const auto at = [&](std::size_t k) -> T& { return values[k].data_ptr<T>()[i]; };
                reference(coefficients, at(0), at(1) * static_cast<T>(factor), at(2), at(3), at(4));
              }
            };
            values[0].scalar_type() == torch::kDouble ? step_all(double{}) : step_all(float{});
          }};
}

std::vector<FunctorCase> functor_cases() {
  std::vector<FunctorCase> all;
  for (const bool decoupled : {false, true}) {
    const mezzo::detail::AdamHyperParams hyper_params{
        .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .is_decoupled = decoupled};
    const std::string name = decoupled ? "adamw" : "adam";
    all.push_back(functor_case<AdamFunctor<false>>(
        name, hyper_params, [](const auto& c, auto& p, auto g, auto& m, auto& s, auto& l) {
          reference_adam(c, false, p, g, m, s, l);
        }));
    all.push_back(
        functor_case<AdamFunctor<true>>(name + " amsgrad", hyper_params,
                                        [](const auto& c, auto& p, auto g, auto& m, auto& s,
                                           auto& l) { reference_adam(c, true, p, g, m, s, l); }));
  }
  const auto sgd = [](const auto& c, auto& p, auto g, auto& m, auto&, auto&) {
    reference_sgd(c, false, p, g, m);
  };
  const auto momentum = [](const auto& c, auto& p, auto g, auto& m, auto&, auto&) {
    reference_sgd(c, true, p, g, m);
  };
  all.push_back(functor_case<SgdFunctor<false>>("sgd", {}, sgd));
  all.push_back(functor_case<SgdFunctor<false>>("sgd with decay", {.weight_decay = 0.1}, sgd));
  all.push_back(
      functor_case<SgdFunctor<true>>("momentum", {.momentum = 0.9, .dampening = 0.25}, momentum));
  all.push_back(functor_case<SgdFunctor<true>>(
      "nesterov", {.momentum = 0.9, .weight_decay = 0.1, .nesterov = true}, momentum));
  all.push_back(functor_case<LionFunctor>(
      "lion", {.beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1},
      [](const auto& c, auto& p, auto g, auto& m, auto&, auto&) { reference_lion(c, p, g, m); }));
  return all;
}

/// One step of a kernel and of its scalar reference.
struct StepCase {
  FunctorCase functor;
  DtypePair dtypes;
  CpuIsa isa;

  std::string name() const { return functor.name + " " + name_of(dtypes); }

  void run(const mezzo::detail::ParamPointers& pointers, double factor,
           bool zero_grad = false) const {
    const mezzo::detail::ParamArgs param{.pointers = pointers,
                                         .parameter_dtype = dtypes.parameter,
                                         .gradient_dtype = dtypes.gradient};
    mezzo::detail::run_step_cpu(std::vector{param},
                                {{functor.kernel(dtypes.parameter, isa), functor.coefficients}},
                                {.multipliers = {.first = factor}, .zero_grad = zero_grad});
  }

  /// The buffers after one step of the scalar reference with gradients times `factor`.
  StepBuffers expected(const StepBuffers& before, double factor) const {
    const bool is_double = dtypes.parameter == torch::kDouble;
    std::vector<torch::Tensor> values;
    for (const auto& tensor : before.tensors()) {
      values.push_back(tensor.to(is_double ? torch::kDouble : torch::kFloat, false, /*copy=*/true));
    }
    functor.step_reference(values, factor);
    StepBuffers after = before.clone();
    after.parameter = values[0].to(dtypes.parameter);
    for (std::size_t k = 0; k < 3; ++k) after.moments[k] = values[2 + k].to(dtypes.parameter);
    return after;
  }
};

class OptimizerStepKernel : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(GetParam())) GTEST_SKIP() << "not on this CPU";
    torch::manual_seed(1);
  }

  static std::vector<StepCase> cases() {
    std::vector<StepCase> all;
    for (const FunctorCase& functor : functor_cases()) {
      for (const auto& dtypes : kDtypePairs) all.push_back({functor, dtypes, GetParam()});
    }
    return all;
  }
};

TEST_P(OptimizerStepKernel, BitwiseEqualsReferenceForEveryTail) {
  for (const StepCase& step_case : cases()) {
    for (int64_t count = 0; count <= 67; ++count) {
      auto buffers = StepBuffers::random(step_case.dtypes, count);
      const auto after = step_case.expected(buffers, 0.3);
      step_case.run(buffers.pointers(), 0.3);
      EXPECT_THAT(buffers.tensors(), BitwiseEqual(after.tensors()))
          << step_case.name() << " " << count;
    }
  }
}

TEST_P(OptimizerStepKernel, BitwiseEqualsReferenceForExtremeValues) {
  for (const StepCase& step_case : cases()) {
    auto buffers = StepBuffers::edges(step_case.dtypes);
    const double factor = std::ldexp(1.0, -16);
    const auto after = step_case.expected(buffers, factor);
    step_case.run(buffers.pointers(), factor);
    EXPECT_THAT(buffers.tensors(), BitwiseEqual(after.tensors())) << step_case.name();
  }
}

TEST_P(OptimizerStepKernel, StepsMisalignedMemoryInBounds) {
  for (const StepCase& step_case : cases()) {
    const auto before = StepBuffers::random(step_case.dtypes, 35);
    const auto after = step_case.expected(before, 1.0);
    for (std::size_t offset = 0; offset < 33; ++offset) {
      MisalignedBuffers memory(before, offset);
      step_case.run(memory.pointers(), 1.0);
      EXPECT_TRUE(memory.equals(after)) << step_case.name() << " " << offset;
    }
  }
}

TEST_P(OptimizerStepKernel, ZeroesGradientsIfRequested) {
  for (const StepCase& step_case : cases()) {
    auto buffers = StepBuffers::random(step_case.dtypes, 45);
    auto after = step_case.expected(buffers, 0.5);
    step_case.run(buffers.pointers(), 0.5, /*zero_grad=*/true);
    after.gradient.zero_();
    EXPECT_THAT(buffers.tensors(), BitwiseEqual(after.tensors())) << step_case.name();
  }
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, OptimizerStepKernel,
                         testing::Values(CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2,
                                         CpuIsa::avx512),
                         [](const auto& test) { return isa_name(test.param); });

TEST(GetStepKernel, ReturnsNullForUnsupportedDtype) {
  EXPECT_TRUE(get_step_kernel<AdamFunctor<false>>(kPlain, torch::kHalf, mezzo::detail::best_isa()));
  EXPECT_FALSE(
      get_step_kernel<AdamFunctor<false>>(kPlain, torch::kLong, mezzo::detail::best_isa()));
}

TEST(RunStepCpu, StepsEveryElementOnce) {
  constexpr int64_t kChunk = mezzo::detail::kMinChunkElements;
  std::vector<std::vector<char>> memory;
  for (const int64_t count : {int64_t{3}, int64_t{0}, kChunk - 4, kChunk + 1, int64_t{1},
                              3 * kChunk, int64_t{7}, kChunk - 1, kChunk}) {
    memory.emplace_back(static_cast<std::size_t>(count));
  }
  std::vector<mezzo::detail::ParamArgs> params;
  for (auto& bytes : memory) {
    params.push_back({.pointers = {bytes.data(), nullptr, {}, static_cast<int64_t>(bytes.size())},
                      .parameter_dtype = torch::kByte});
  }
  const auto visit = [](const mezzo::detail::ParamArgs& param, const auto&, const auto&) {
    auto* visits = static_cast<char*>(param.pointers.parameter);
    for (int64_t i = 0; i < param.pointers.numel; ++i) ++visits[i];
  };
  mezzo::detail::run_step_cpu(params, {{visit, {}}}, {});
  for (const auto& bytes : memory) EXPECT_EQ(bytes, std::vector<char>(bytes.size(), 1));
}

}  // namespace
