// AdamW8bit's kernel on the device that the host plays, against the CPU's loop: codes, scales and
// floats, odd tails and any alignment. The same bits, in any order of threads.

#include <mezzo/kernels/adamw8bit_cpu.h>
#include <mezzo/kernels/kernel_dispatch.h>

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "host_device.h"
#include "memory.h"

namespace {

using namespace cuda_emulation_test;
using mezzo::detail::AdamW8bitParamArgs;
using mezzo::detail::num_quant_blocks;

/// A parameter with its state, in memory that does not begin at a multiple of 16 bytes.
struct Parameter {
  Parameter(at::ScalarType dtype, at::ScalarType gradient_dtype, bool has_codes, int64_t count)
      : has_codes_(has_codes), count_(count) {
    const auto random = [count](at::ScalarType own, double spread) {
      return at::randn({count + 4}, at::kDouble).mul(spread).to(own).narrow(0, 3, count);
    };
    streams_ = {random(dtype, 1), random(gradient_dtype, 2)};
    for (int k = 0; k < 2; ++k) {
      if (!has_codes) {
        streams_.push_back(random(at::kFloat, 0.1).abs_());
        continue;
      }
      streams_.push_back(at::randint(0, 256, {count + 4}, at::kByte).narrow(0, 3, count));
      streams_.push_back(at::rand({num_quant_blocks(count)}));
    }
  }

  Parameter clone() const {
    Parameter copy(*this);
    for (at::Tensor& stream : copy.streams_) stream = copy_of(stream);
    return copy;
  }

  AdamW8bitParamArgs step() const {
    const mezzo::detail::AdamHyperParams hyper_params{0.9, 0.99, 1e-8, 0.02, /*is_decoupled=*/true};
    AdamW8bitParamArgs step{
        {streams_[0].data_ptr(), streams_[1].data_ptr(), {}, count_},
        {},
        streams_[0].scalar_type(),
        hyper_params.coefficients(1e-2, 3),
        {.gradient_dtype = streams_[1].scalar_type(), .seed = 77, .step = 3, .param_index = 5}};
    for (std::size_t k = 0; k < 2; ++k) {
      step.pointers.moments[k] = streams_[has_codes_ ? 2 + 2 * k : 2 + k].data_ptr();
      if (has_codes_) step.scales[k] = streams_[3 + 2 * k].mutable_data_ptr<float>();
    }
    return step;
  }

  bool is_same(const Parameter& other) const {
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      if (!bitwise_equal(streams_[i], other.streams_[i])) return false;
    }
    return true;
  }

 private:
  bool has_codes_;
  int64_t count_;
  std::vector<at::Tensor> streams_;
};

template <class Visit>
void for_each_parameter(const Visit& visit) {
  for (const auto& [dtype, gradient] : std::vector<std::pair<at::ScalarType, at::ScalarType>>{
           {at::kFloat, at::kFloat}, {at::kBFloat16, at::kBFloat16}, {at::kBFloat16, at::kFloat}}) {
    for (const bool has_codes : {true, false}) {
      for (const int64_t count : {0, 1, 31, 256, 300, 8191, 8193, 20001}) {
        SCOPED_TRACE(testing::Message() << dtype << ", " << gradient << ", codes " << has_codes
                                        << ", elements " << count);
        visit(Parameter(dtype, gradient, has_codes, count));
      }
    }
  }
}

class AdamW8bitOnHost : public testing::Test {
 protected:
  void SetUp() override { at::manual_seed(2); }
  void TearDown() override { cuda_emulation::set_seed(1); }
};

TEST_F(AdamW8bitOnHost, GivesTheCpusBits) {
  for_each_parameter([](const Parameter& before) {
    const Parameter expected = before.clone();
    const Parameter parameter = before.clone();
    mezzo::detail::step_adamw8bit_cpu({expected.step()});
    mezzo::detail::cuda_kernels()->step_adamw8bit_(at::kCPU, {parameter.step()});
    EXPECT_TRUE(parameter.is_same(expected));
  });
}

TEST_F(AdamW8bitOnHost, TakesUpTo150ParametersOfADtypeInOneLaunch) {
  std::vector<Parameter> all, expected;
  for (int i = 0; i < 152; ++i) {
    all.emplace_back(i == 0 ? at::kBFloat16 : at::kFloat, at::kFloat, /*has_codes=*/i % 2 == 0, 40);
    expected.push_back(all.back().clone());
  }
  const auto steps_of = [](const std::vector<Parameter>& parameters) {
    std::vector<AdamW8bitParamArgs> steps;
    for (const Parameter& parameter : parameters) steps.push_back(parameter.step());
    return steps;
  };
  const auto launches = [] {
    int64_t all_launches = 0;
    for (const auto& [kernel, count] : cuda_emulation::launches()) all_launches += count;
    return all_launches;
  };
  const int64_t before = launches();
  mezzo::detail::cuda_kernels()->step_adamw8bit_(at::kCPU, steps_of(all));
  EXPECT_EQ(launches() - before, 3);  // 151 of float take two
  mezzo::detail::step_adamw8bit_cpu(steps_of(expected));
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(all[i].is_same(expected[i])) << i;
}

TEST_F(AdamW8bitOnHost, IsTheSameInAnyOrder) {
  const Parameter before(at::kBFloat16, at::kBFloat16, /*has_codes=*/true, 9000);
  const Parameter first = before.clone();
  mezzo::detail::cuda_kernels()->step_adamw8bit_(at::kCPU, {first.step()});
  for (uint64_t seed = 0; seed < 20; ++seed) {
    cuda_emulation::set_seed(seed);
    const Parameter again = before.clone();
    mezzo::detail::cuda_kernels()->step_adamw8bit_(at::kCPU, {again.step()});
    ASSERT_TRUE(again.is_same(first)) << seed;
  }
}

}  // namespace
