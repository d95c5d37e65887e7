// Optimizer kernels on the emulated device, bitwise against the CPU kernels: every functor, pair of
// dtypes and weight storage, odd tails, any alignment, and all options of a step.

#include <mezzo/kernels/adam_functor.h>
#include <mezzo/kernels/cuda/optimizer_step.cuh>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/kernels/lion_functor.h>
#include <mezzo/kernels/multi_tensor_metadata.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/sgd_functor.h>
#include <mezzo/kernels/weight_formats.h>

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda_emulation.h"
#include "test_tensors.h"

namespace {

using namespace cuda_emulation_test;
using mezzo::detail::AdamHyperParams;
using mezzo::detail::ParamArgs;
using mezzo::detail::SgdHyperParams;
using mezzo::detail::StepArgs;
using mezzo::optim::WeightStorage;

AdamHyperParams adam_hyper_params(bool is_decoupled) {
  return {
      .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.02, .is_decoupled = is_decoupled};
}
SgdHyperParams sgd_hyper_params() {
  return {.momentum = 0.9, .dampening = 0.1, .weight_decay = 0.02, .nesterov = true};
}

/// Options of a step.
struct StepCase {
  std::string name;
  float scale = 0;      ///< inv_scale; 0: none
  double max_norm = 0;  ///< 0: no clipping
  bool is_checked = false;
  bool is_skipped = false;
  bool zero_grad = false;
  int64_t lr_factors = 0;        ///< length of the schedule
  bool has_model_param = false;  ///< float32 parameters are masters
  bool model_param_is_fp16 = false;
  int params_per_group = 4;
};

std::vector<StepCase> step_cases() {
  return {{.name = "plain"},
          {.name = "zero_grad", .zero_grad = true},
          {.name = "checked", .scale = 0.25F, .is_checked = true},
          {.name = "skipped", .scale = 0.25F, .is_skipped = true},
          {.name = "skipped, zero_grad", .is_skipped = true, .zero_grad = true},
          {.name = "clipped", .scale = 0.5F, .max_norm = 0.5},
          {.name = "scheduled", .lr_factors = 3},
          {.name = "bfloat16 model param", .has_model_param = true},
          {.name = "float16 model param", .has_model_param = true, .model_param_is_fp16 = true}};
}

/// Dtypes and weight storage.
struct Storage {
  const char* name;
  at::ScalarType parameter;
  at::ScalarType gradient;
  at::ScalarType moment;
  WeightStorage weights = WeightStorage::plain;
};

/// Calls `work<Parameter, Gradient, WeightFormat>(Storage)` for all that have kernels.
template <class Work>
void for_each_storage(const Work& work) {
  using c10::BFloat16;
  using c10::Half;
  using mezzo::detail::PlainWeightFormat;
  using mezzo::detail::SplitWeightFormat;
  using mezzo::detail::StochasticWeightFormat;
  using enum WeightStorage;
  const auto visit = [&]<class Parameter, class Gradient, class WeightFormat>(
                         const char* name, WeightStorage weights) {
    const auto dtype = c10::CppTypeToScalarType<Parameter>::value;
    const auto gradient = c10::CppTypeToScalarType<Gradient>::value;
    const auto moment = c10::CppTypeToScalarType<typename WeightFormat::Moment>::value;
    work.template operator()<Parameter, Gradient, WeightFormat>(
        Storage{name, dtype, gradient, moment, weights});
  };
  const auto visit_plain = [&]<class Parameter, class Gradient>(const char* name,
                                                                WeightStorage weights) {
    visit.template operator()<Parameter, Gradient, PlainWeightFormat<Parameter>>(name, weights);
  };
  visit_plain.template operator()<float, float>("float", plain);
  visit_plain.template operator()<float, BFloat16>("master of bfloat16", fp32_master);
  visit_plain.template operator()<float, Half>("master of float16", fp32_master);
  visit_plain.template operator()<double, double>("double", plain);
  visit_plain.template operator()<double, float>("double with float", plain);
  visit_plain.template operator()<BFloat16, BFloat16>("bfloat16", plain);
  visit_plain.template operator()<BFloat16, float>("bfloat16 with float", plain);
  visit_plain.template operator()<Half, Half>("float16", plain);
  visit_plain.template operator()<Half, float>("float16 with float", plain);
  visit.template operator()<BFloat16, BFloat16, SplitWeightFormat>("split", split_master);
  visit.template operator()<BFloat16, float, SplitWeightFormat>("split with float", split_master);
  visit.template operator()<BFloat16, BFloat16, StochasticWeightFormat>("stochastic",
                                                                        stochastic_rounding);
  visit.template operator()<BFloat16, float, StochasticWeightFormat>("stochastic with float",
                                                                     stochastic_rounding);
}

/// Parameters of one storage with their state. Every second is misaligned; of each six others one
/// has a single misaligned array, each time another one.
class StepParameters {
 public:
  StepParameters(const Storage& storage, const StepCase& step, const std::vector<int64_t>& sizes)
      : storage_(storage), sizes_(sizes) {
    const bool has_copies = step.has_model_param && storage.parameter == at::kFloat;
    const bool is_split = storage.weights == WeightStorage::split_master;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const int64_t offset = static_cast<int64_t>(i) % 2;
      std::size_t array = 0;
      const auto random = [&](at::ScalarType dtype, double spread) {
        const int64_t more = i % 2 == 0 && i / 2 % 6 == array++ ? 1 : 0;
        const at::Tensor values =
            at::randn({sizes[i] + offset + more + kMargin}, at::kDouble).mul(spread);
        return values.to(dtype).narrow(0, offset + more, sizes[i]);
      };
      std::vector<at::Tensor> arrays{
          // evaluated in order, as braces guarantee
          random(storage.parameter, 1), random(storage.gradient, 2), random(storage.moment, 0.1),
          random(storage.moment, 0.1).abs_(), random(storage.moment, 0.1).abs_()};
      arrays.push_back(is_split || has_copies ? random(at::kShort, 1e4) : at::Tensor());
      arrays_.push_back(std::move(arrays));
      counts_.push_back(static_cast<float>(i % 7));
    }
  }

  StepParameters clone() const {
    StepParameters copy(*this);
    for (std::vector<at::Tensor>& arrays : copy.arrays_) {
      for (at::Tensor& array : arrays) {
        if (array.defined()) array = copy_of(array);
      }
    }
    return copy;
  }

  std::size_t size() const { return sizes_.size(); }
  const Storage& storage() const { return storage_; }
  const at::Tensor& array(std::size_t i, std::size_t k) const { return arrays_[i][k]; }
  float& count(std::size_t i) { return counts_[i]; }

  mezzo::detail::ParamPointers pointers(std::size_t i) const {
    const auto data = [&](std::size_t k) {
      return arrays_[i][k].defined() ? arrays_[i][k].data_ptr() : nullptr;
    };
    return {data(0), data(1), {data(2), data(3), data(4)}, sizes_[i], data(5)};
  }

  /// Returns the first array that differs, or an empty string.
  std::string difference(const StepParameters& other) const {
    for (std::size_t i = 0; i < size(); ++i) {
      for (std::size_t k = 0; k < arrays_[i].size(); ++k) {
        const at::Tensor &own = arrays_[i][k], &others = other.arrays_[i][k];
        if (!own.defined() || bitwise_equal(with_margin(own), with_margin(others))) continue;
        return "array " + std::to_string(k) + " of parameter " + std::to_string(i);
      }
    }
    return "";
  }

 private:
  static constexpr int64_t kMargin = 8;  // which must not be written

  static at::Tensor with_margin(const at::Tensor& array) {
    return array.as_strided({array.numel() + kMargin}, {1});
  }

  Storage storage_;
  std::vector<int64_t> sizes_;
  std::vector<std::vector<at::Tensor>> arrays_;
  std::vector<float> counts_;
};

constexpr double kLrFactors[] = {1.0, 0.5, 0.125};
constexpr float kApplied = 5;  // beyond the schedule: its last factor applies
constexpr double kNormSq = 4;

double lr_of_group(int group) { return 1e-2 * (group + 1); }
int group_of(std::size_t i, const StepCase& step) {
  return static_cast<int>(i) / step.params_per_group;
}

ParamArgs make_param_args(const StepParameters& parameters, std::size_t i, const StepCase& step) {
  const Storage& storage = parameters.storage();
  return {.pointers = parameters.pointers(i),
          .param_index = 1000 + static_cast<uint32_t>(i),
          .model_param_is_fp16 = step.model_param_is_fp16,
          .storage = storage.weights,
          .parameter_dtype = storage.parameter,
          .gradient_dtype = storage.gradient};
}

/// The StepArgs that the kernels compute on the device.
StepArgs make_step_args(StepParameters& parameters, std::size_t i, const StepCase& step) {
  StepArgs args{.zero_grad = step.zero_grad,
                .seed = 77U + static_cast<uint64_t>(group_of(i, step)),
                .step = static_cast<uint64_t>(parameters.count(i)) + 1};
  args.multipliers = mezzo::detail::grad_multipliers(
      step.scale != 0 ? static_cast<double>(step.scale) : 1.0,
      step.max_norm != 0 ? std::min(1.0, step.max_norm / (std::sqrt(kNormSq) + 1e-6)) : 1.0);
  return args;
}

template <class Parameter, class Functor, class WeightFormat>
void step_on_cpu(StepParameters& parameters, const StepCase& step,
                 const typename Functor::HyperParams& hyper_params) {
  using Vec = mezzo::detail::ScalarVec<Parameter>;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (step.is_skipped) {
      if (step.zero_grad) parameters.array(i, 1).zero_();
      continue;
    }
    const StepArgs args = make_step_args(parameters, i, step);
    const double lr = lr_of_group(group_of(i, step)) *
                      (step.lr_factors == 0 ? 1.0 : kLrFactors[step.lr_factors - 1]);
    const auto coefficients = hyper_params.coefficients(lr, static_cast<int64_t>(args.step));
    mezzo::detail::OptimizerStepKernel<Parameter, Functor, WeightFormat, Vec>::run(
        make_param_args(parameters, i, step), coefficients, args);
  }
}

template <class Functor>
constexpr bool kHasExtraMoment = std::is_same_v<Functor, mezzo::detail::AdamFunctor<true>> ||
                                 std::is_same_v<Functor, mezzo::detail::SgdFunctor<true>>;

/// Steps all parameters in one call. Moments beyond the functor's are null.
template <class Functor>
void step_on_device(const std::vector<StepParameters*>& all, const StepCase& step,
                    const typename Functor::HyperParams& hyper_params) {
  const float found_inf = step.is_skipped ? 1.0F : 0.0F;
  mezzo::detail::DeviceStepArgs step_args{.max_norm = step.max_norm, .zero_grad = step.zero_grad};
  if (step.scale != 0) step_args.inv_scale = &step.scale;
  if (step.is_checked || step.is_skipped) step_args.found_inf = &found_inf;
  if (step.max_norm != 0) step_args.norm_sq = &kNormSq;
  if (step.lr_factors != 0) {
    step_args.applied_steps = &kApplied;
    step_args.lr_factors = kLrFactors;
    step_args.lr_factor_count = step.lr_factors;
  }
  std::vector<mezzo::detail::ParamArgs> params;
  std::vector<mezzo::detail::DeviceGroupArgs> groups;
  for (StepParameters* const parameters : all) {
    for (std::size_t i = 0; i < parameters->size(); ++i) {
      const auto group = static_cast<uint32_t>(group_of(i, step));
      while (groups.size() <= group) {
        const int next = static_cast<int>(groups.size());
        groups.push_back({hyper_params, lr_of_group(next), 77U + static_cast<uint64_t>(next)});
      }
      auto pointers = parameters->pointers(i);
      for (unsigned k = Functor::kNumMoments; k < mezzo::detail::kMaxMoments; ++k)
        pointers.moments[k] = nullptr;
      const Storage& storage = parameters->storage();
      params.push_back({pointers, &parameters->count(i), group, 1000 + static_cast<uint32_t>(i),
                        kHasExtraMoment<Functor>, step.model_param_is_fp16, storage.weights,
                        storage.parameter, storage.gradient});
    }
  }
  mezzo::detail::cuda_kernels()->step_(at::kCPU, Functor::kOptimizerKind, params, groups,
                                       step_args);
}

class CudaEmulationStep : public testing::Test {
 protected:
  void SetUp() override { at::manual_seed(2); }
  void TearDown() override { cuda_emulation::set_seed(1); }
};

/// Sizes around a vector, a stride and a block of the kernel.
const std::vector<int64_t> kSizes{0,    1,     3,    4,    1023, 1026, 8192,
                                  8195, 20001, 8193, 1030, 77,   1031, 78};

template <class Functor>
void expect_step_of_every_storage(const StepCase& step,
                                  const typename Functor::HyperParams& hyper_params) {
  const auto expect = [&]<class Parameter, class Gradient, class WeightFormat>(Storage storage) {
    StepParameters parameters(storage, step, kSizes);
    const StepParameters before = parameters.clone();
    StepParameters expected = parameters.clone();
    step_on_cpu<Parameter, Functor, WeightFormat>(expected, step, hyper_params);
    step_on_device<Functor>({&parameters}, step, hyper_params);
    EXPECT_EQ(parameters.difference(expected), "") << storage.name;
    if (!step.is_skipped) {
      EXPECT_NE(parameters.difference(before), "") << storage.name;
    }
  };
  for_each_storage(expect);
}

template <class Functor>
void expect_steps(const typename Functor::HyperParams& hyper_params) {
  for (const StepCase& step : step_cases()) {
    SCOPED_TRACE(step.name);
    expect_step_of_every_storage<Functor>(step, hyper_params);
  }
}

TEST_F(CudaEmulationStep, AdamWAndAdamMatchCpu) {
  expect_steps<mezzo::detail::AdamFunctor<false>>(adam_hyper_params(/*is_decoupled=*/true));
  expect_steps<mezzo::detail::AdamFunctor<false>>(adam_hyper_params(/*is_decoupled=*/false));
}

TEST_F(CudaEmulationStep, AmsgradMatchesCpu) {
  expect_steps<mezzo::detail::AdamFunctor<true>>(adam_hyper_params(/*is_decoupled=*/true));
}

TEST_F(CudaEmulationStep, SgdMatchesCpu) {
  expect_steps<mezzo::detail::SgdFunctor<false>>({.weight_decay = 0.02});
  expect_steps<mezzo::detail::SgdFunctor<true>>(sgd_hyper_params());
}

TEST_F(CudaEmulationStep, LionMatchesCpu) {
  expect_steps<mezzo::detail::LionFunctor>({.beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1});
}

/// Parameters of several groups and every storage in one call.
template <class Functor>
void expect_one_call(const typename Functor::HyperParams& hyper_params) {
  const StepCase step{.name = "one call", .scale = 0.5F, .zero_grad = true};
  std::vector<StepParameters> all;
  std::vector<StepParameters> expected;
  for_each_storage([&]<class Parameter, class Gradient, class WeightFormat>(Storage storage) {
    all.emplace_back(storage, step, std::vector<int64_t>{5, 9000});
    expected.push_back(all.back().clone());
    step_on_cpu<Parameter, Functor, WeightFormat>(expected.back(), step, hyper_params);
  });
  std::vector<StepParameters*> pointers;
  for (StepParameters& one : all) pointers.push_back(&one);
  step_on_device<Functor>(pointers, step, hyper_params);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].difference(expected[i]), "") << i;
  }
}

TEST_F(CudaEmulationStep, MixedWeightStoragesMatchCpu) {
  expect_one_call<mezzo::detail::AdamFunctor<true>>(adam_hyper_params(true));
  expect_one_call<mezzo::detail::SgdFunctor<true>>(sgd_hyper_params());
}

/// More parameters and groups than a launch holds.
void expect_many(int count, int params_per_group) {
  using Functor = mezzo::detail::AdamFunctor<false>;
  const StepCase step{.name = "many", .params_per_group = params_per_group};
  std::vector<int64_t> sizes;
  for (int i = 0; i < count; ++i) sizes.push_back(i % 41);
  sizes[static_cast<std::size_t>(count) / 2] = 20001;
  StepParameters parameters({"float", at::kFloat, at::kFloat, at::kFloat}, step, sizes);
  StepParameters expected = parameters.clone();
  step_on_cpu<float, Functor, mezzo::detail::PlainWeightFormat<float>>(expected, step,
                                                                       adam_hyper_params(true));
  step_on_device<Functor>({&parameters}, step, adam_hyper_params(true));
  EXPECT_EQ(parameters.difference(expected), "") << count;
}

TEST_F(CudaEmulationStep, SeveralLaunchesMatchCpu) {
  for (const int count : {300, 301, 5000}) expect_many(count, 50);
  expect_many(30, 1);
}

TEST_F(CudaEmulationStep, IncrementsStepCountsUnlessSkipped) {
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{480}, std::size_t{700}, std::size_t{1000}}) {
    for (const float found : {-1.0F, 0.0F, 1.0F, 2.0F}) {  // -1: null; 2: of two devices
      std::vector<float> counts(size, 7.0F);
      std::vector<float*> counters;
      for (float& count : counts) counters.push_back(&count);
      mezzo::detail::cuda_kernels()->increment_state_steps_(at::kCPU, counters,
                                                            found < 0 ? nullptr : &found);
      EXPECT_EQ(counts, std::vector<float>(size, found > 0 ? 7.0F : 8.0F));
    }
  }
}

// Suppresses a warning: this test does not launch the kernel itself.
[[maybe_unused]] const auto kCountSteps = &mezzo::detail::cuda::increment_state_steps_kernel;

/// Runs only the last block of a parameter, whose element indices exceed 32 bits.
TEST_F(CudaEmulationStep, StochasticRoundingBeyond2To32MatchesCpu) {
  using Functor = mezzo::detail::SgdFunctor<false>;
  using mezzo::detail::StochasticWeightFormat;
  constexpr int64_t kFirst = int64_t{1} << 32;
  constexpr int64_t kTail = 1001;
  const at::Tensor weights = at::ones({kTail}, at::kBFloat16);
  const at::Tensor gradients = at::ones({kTail}, at::kFloat);
  const at::Tensor expected = weights.clone();
  const auto address_of_first = [](const at::Tensor& tail) {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(tail.data_ptr()) -
                                   static_cast<uintptr_t>(kFirst * tail.element_size()));
  };
  mezzo::detail::ParamArgs param{};
  param.pointers = {address_of_first(weights), address_of_first(gradients), {}, kFirst + kTail};
  param.param_index = 5;
  param.storage = WeightStorage::stochastic_rounding;
  param.parameter_dtype = at::kBFloat16;
  param.gradient_dtype = at::kFloat;
  mezzo::detail::ParamListMetadata metadata(mezzo::detail::cuda::kStepElementsPerBlock);
  ASSERT_TRUE(metadata.push_back(param, {SgdHyperParams{}, /*lr=*/1e-3, /*seed=*/7}));
  cuda_emulation::run_block(metadata.num_blocks() - 1, mezzo::detail::cuda::kStepThreads, [&] {
    mezzo::detail::cuda::optimizer_step_kernel<c10::BFloat16, Functor, StochasticWeightFormat>(
        metadata, {});
  });
  const auto step_on_cpu = [&](const at::Tensor& parameter, int64_t first) {
    mezzo::detail::OptimizerStepKernel<c10::BFloat16, Functor, StochasticWeightFormat,
                                       mezzo::detail::ScalarVec<c10::BFloat16>>::
        run({.pointers = {parameter.data_ptr(), gradients.data_ptr(), {}, kTail, nullptr, first},
             .param_index = 5},
            SgdHyperParams{}.coefficients(1e-3, 1), {.seed = 7});
  };
  step_on_cpu(expected, kFirst);
  EXPECT_THAT(weights, BitwiseEqual(expected));
  const at::Tensor elsewhere = at::ones({kTail}, at::kBFloat16);
  step_on_cpu(elsewhere, 0);
  EXPECT_FALSE(bitwise_equal(elsewhere, expected)) << "2^32 elements apart";
}

/// A hundred orders, divided among the storages.
template <class Functor>
void expect_identical_in_any_order(const typename Functor::HyperParams& hyper_params) {
  const StepCase step{.name = "orders", .scale = 0.5F, .max_norm = 1};
  uint64_t seed = 0;
  for_each_storage([&]<class Parameter, class Gradient, class WeightFormat>(Storage storage) {
    const StepParameters before(storage, step, {3, 1030});
    StepParameters first = before.clone();
    step_on_device<Functor>({&first}, step, hyper_params);
    for (const uint64_t end = seed + 12; seed < end; ++seed) {
      cuda_emulation::set_seed(seed);
      StepParameters again = before.clone();
      step_on_device<Functor>({&again}, step, hyper_params);
      ASSERT_EQ(again.difference(first), "") << storage.name << " with the seed " << seed;
    }
  });
}

TEST_F(CudaEmulationStep, BitwiseIdenticalInAnyOrder) {
  expect_identical_in_any_order<mezzo::detail::AdamFunctor<false>>(adam_hyper_params(true));
  expect_identical_in_any_order<mezzo::detail::AdamFunctor<true>>(adam_hyper_params(true));
  expect_identical_in_any_order<mezzo::detail::SgdFunctor<false>>({});
  expect_identical_in_any_order<mezzo::detail::SgdFunctor<true>>(sgd_hyper_params());
  expect_identical_in_any_order<mezzo::detail::LionFunctor>({.beta1 = 0.9, .beta2 = 0.99});
}

TEST(ParamArrays, AlignHandlesMisalignedArrays) {
  using Arrays = mezzo::detail::cuda::ParamArrays<mezzo::detail::LionFunctor,
                                                  mezzo::detail::PlainWeightFormat<float>>;
  const at::Tensor memory = at::zeros({3, 128});  // each row is aligned
  const auto head_of = [&](int parameter, int gradient, int moment, bool& is_gradient_aligned) {
    mezzo::detail::ParamListMetadata::Chunk chunk{};
    chunk.pointers.parameter = memory[0].data_ptr<float>() + parameter;
    chunk.pointers.gradient = memory[1].data_ptr<float>() + gradient;
    chunk.pointers.moments[0] = memory[2].data_ptr<float>() + moment;
    Arrays arrays(chunk);
    const int head = arrays.align(100);
    is_gradient_aligned = arrays.gradient.is_aligned;
    return head;
  };
  bool is_aligned = false;
  EXPECT_EQ(head_of(0, 0, 0, is_aligned), 0);
  EXPECT_TRUE(is_aligned);
  EXPECT_EQ(head_of(1, 5, 1, is_aligned), 3);
  EXPECT_TRUE(is_aligned);
  EXPECT_EQ(head_of(0, 1, 4, is_aligned), 0);
  EXPECT_FALSE(is_aligned);
  EXPECT_EQ(head_of(1, 1, 2, is_aligned), 100);  // no vectors
}

}  // namespace
