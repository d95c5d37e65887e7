// AdamW8bit's kernel on the emulated device, bitwise against the CPU kernel: qvals, absmax and
// floats, odd tails, any alignment, any order of threads.

#include <mezzo/kernels/adamw8bit_cpu.h>
#include <mezzo/kernels/kernel_dispatch.h>

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cuda_emulation.h"
#include "test_tensors.h"

namespace {

using namespace cuda_emulation_test;
using mezzo::detail::AdamW8bitParamArgs;
using mezzo::detail::num_quant_blocks;

/// A parameter with its state, in memory that is not aligned to 16 bytes.
struct Parameter {
  Parameter(at::ScalarType dtype, at::ScalarType gradient_dtype, bool is_quantized, int64_t count)
      : is_quantized_(is_quantized), count_(count) {
    const auto random = [count](at::ScalarType array_dtype, double spread) {
      return at::randn({count + 4}, at::kDouble).mul(spread).to(array_dtype).narrow(0, 3, count);
    };
    arrays_ = {random(dtype, 1), random(gradient_dtype, 2)};
    for (int k = 0; k < 2; ++k) {
      if (!is_quantized) {
        arrays_.push_back(random(at::kFloat, 0.1).abs_());
        continue;
      }
      arrays_.push_back(at::randint(0, 256, {count + 4}, at::kByte).narrow(0, 3, count));
      arrays_.push_back(at::rand({num_quant_blocks(count)}));
    }
  }

  Parameter clone() const {
    Parameter copy(*this);
    for (at::Tensor& array : copy.arrays_) array = copy_of(array);
    return copy;
  }

  AdamW8bitParamArgs args() const {
    const mezzo::detail::AdamHyperParams hyper_params{0.9, 0.99, 1e-8, 0.02, /*is_decoupled=*/true};
    AdamW8bitParamArgs args{{.pointers = {arrays_[0].data_ptr(), arrays_[1].data_ptr(), {}, count_},
                             .param_index = 5,
                             .parameter_dtype = arrays_[0].scalar_type(),
                             .gradient_dtype = arrays_[1].scalar_type()},
                            {},
                            hyper_params.coefficients(1e-2, 3),
                            {.seed = 77, .step = 3}};
    for (std::size_t k = 0; k < 2; ++k) {
      args.param.pointers.moments[k] = arrays_[is_quantized_ ? 2 + 2 * k : 2 + k].data_ptr();
      if (is_quantized_) args.absmax[k] = arrays_[3 + 2 * k].mutable_data_ptr<float>();
    }
    return args;
  }

  bool equals(const Parameter& other) const {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      if (!bitwise_equal(arrays_[i], other.arrays_[i])) return false;
    }
    return true;
  }

 private:
  bool is_quantized_;
  int64_t count_;
  std::vector<at::Tensor> arrays_;
};

template <class Visit>
void for_each_parameter(const Visit& visit) {
  for (const auto& [dtype, gradient] : std::vector<std::pair<at::ScalarType, at::ScalarType>>{
           {at::kFloat, at::kFloat}, {at::kBFloat16, at::kBFloat16}, {at::kBFloat16, at::kFloat}}) {
    for (const bool is_quantized : {true, false}) {
      for (const int64_t count : {0, 1, 31, 256, 300, 8191, 8193, 20001}) {
        SCOPED_TRACE(testing::Message() << dtype << ", " << gradient << ", quantized "
                                        << is_quantized << ", elements " << count);
        visit(Parameter(dtype, gradient, is_quantized, count));
      }
    }
  }
}

class AdamW8bitKernel : public testing::Test {
 protected:
  void SetUp() override { at::manual_seed(2); }
  void TearDown() override { cuda_emulation::set_seed(1); }
};

TEST_F(AdamW8bitKernel, BitwiseEqualToCpu) {
  for_each_parameter([](const Parameter& before) {
    const Parameter expected = before.clone();
    const Parameter parameter = before.clone();
    mezzo::detail::step_adamw8bit_cpu({expected.args()});
    mezzo::detail::cuda_kernels()->step_adamw8bit_(at::kCPU, {parameter.args()});
    EXPECT_TRUE(parameter.equals(expected));
  });
}

TEST_F(AdamW8bitKernel, LaunchesOncePer150Parameters) {
  std::vector<Parameter> all, expected;
  for (int i = 0; i < 152; ++i) {
    all.emplace_back(i == 0 ? at::kBFloat16 : at::kFloat, at::kFloat, /*is_quantized=*/i % 2 == 0,
                     40);
    expected.push_back(all.back().clone());
  }
  const auto args_of = [](const std::vector<Parameter>& parameters) {
    std::vector<AdamW8bitParamArgs> args;
    for (const Parameter& parameter : parameters) args.push_back(parameter.args());
    return args;
  };
  const auto launches = [] {
    int64_t all_launches = 0;
    for (const auto& [kernel, count] : cuda_emulation::launches()) all_launches += count;
    return all_launches;
  };
  const int64_t before = launches();
  mezzo::detail::cuda_kernels()->step_adamw8bit_(at::kCPU, args_of(all));
  EXPECT_EQ(launches() - before, 3);  // 151 of float take two
  mezzo::detail::step_adamw8bit_cpu(args_of(expected));
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(all[i].equals(expected[i])) << i;
}

TEST_F(AdamW8bitKernel, BitwiseIdenticalInAnyOrder) {
  const Parameter before(at::kBFloat16, at::kBFloat16, /*is_quantized=*/true, 9000);
  const Parameter first = before.clone();
  mezzo::detail::cuda_kernels()->step_adamw8bit_(at::kCPU, {first.args()});
  for (uint64_t seed = 0; seed < 20; ++seed) {
    cuda_emulation::set_seed(seed);
    const Parameter again = before.clone();
    mezzo::detail::cuda_kernels()->step_adamw8bit_(at::kCPU, {again.args()});
    ASSERT_TRUE(again.equals(first)) << seed;
  }
}

}  // namespace
