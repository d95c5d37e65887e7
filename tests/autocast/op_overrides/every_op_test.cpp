#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/op_overrides.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <ostream>
#include <set>

#include "op_samples.h"

// Compares each listed op of a device under autocast, bitwise, with the op called without autocast
// on inputs that the test casts.

namespace {

using mezzo::CastPolicy;
using op_overrides_test::OpSample;
using testing::IsSubsetOf;

// MKL chooses code by alignment. With this set before its first call, equal inputs give bitwise
// identical results, except for the ops in `values_of`.
[[maybe_unused]] const int kReproducibleMkl = ::setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/1);

// The dtypes of the inputs.
enum class Inputs { all_float, all_lower, first_lower, all_double };

struct Setting {
  c10::DeviceType device;
  at::ScalarType lower;
};

std::vector<c10::IValue> prepare(const OpSample& sample, Inputs inputs, const Setting& setting) {
  bool first = true;
  return op_overrides_test::map_tensors(
      op_overrides_test::complete_arguments(sample), [&](const at::Tensor& tensor) {
        const bool is_first = std::exchange(first, false);
        const bool lower =
            inputs == Inputs::all_lower || (inputs == Inputs::first_lower && is_first);
        const auto dtype = inputs == Inputs::all_double ? at::kDouble
                           : lower                      ? setting.lower
                                                        : at::kFloat;
        return tensor.to(setting.device).to(dtype);
      });
}

bool is_castable(const at::Tensor& tensor) { return tensor.scalar_type() != at::kDouble; }

bool has_float_tensor(const std::vector<c10::IValue>& arguments) {
  bool found = false;
  op_overrides_test::map_tensors(arguments, [&](const at::Tensor& tensor) {
    found |= tensor.scalar_type() == at::kFloat;
    return tensor;
  });
  return found;
}

std::vector<c10::IValue> cast_all(const std::vector<c10::IValue>& arguments, at::ScalarType dtype) {
  return op_overrides_test::map_tensors(arguments, [dtype](const at::Tensor& tensor) {
    return is_castable(tensor) ? tensor.to(dtype) : tensor;
  });
}

// Sets the dtype argument of softmax, sum and similar ops unless the caller set it.
void set_dtype(const c10::OperatorHandle& op, std::vector<c10::IValue>& arguments) {
  const auto& declared = op.schema().arguments();
  for (std::size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() == "dtype" && is_castable(arguments[0].toTensor())) {
      arguments[i] = at::kFloat;
    }
  }
}

// Applies the cast policy manually.
op_overrides_test::Outcome call_with_manual_cast(const std::string& name, CastPolicy cast_policy,
                                                 std::vector<c10::IValue> arguments,
                                                 const Setting& setting) {
  auto op = op_overrides_test::find_op(name);
  switch (cast_policy) {
    case CastPolicy::lower_precision_fp:
      return op_overrides_test::call(op, cast_all(arguments, setting.lower));
    case CastPolicy::fp32:
      return op_overrides_test::call(op, cast_all(arguments, at::kFloat));
    case CastPolicy::promote:
      return op_overrides_test::call(
          op, cast_all(arguments, has_float_tensor(arguments) ? at::kFloat : setting.lower));
    case CastPolicy::fp32_set_opt_dtype:
      set_dtype(op, arguments);
      return op_overrides_test::call(op, arguments);
    case CastPolicy::fp32_append_dtype: {
      static const std::map<std::string, std::string> kWithDtype = {
          {"aten::norm.Scalar", "aten::norm.ScalarOpt_dtype"},
          {"aten::norm.ScalarOpt_dim", "aten::norm.ScalarOpt_dim_dtype"},
          {"aten::norm.names_ScalarOpt_dim", "aten::norm.names_ScalarOpt_dim_dtype"}};
      const auto& first = arguments[0].toTensor();
      arguments.emplace_back(is_castable(first) ? at::kFloat : first.scalar_type());
      return op_overrides_test::call(op_overrides_test::find_op(kWithDtype.at(name)), arguments);
    }
    case CastPolicy::banned:
      return {.threw = true, .error = "banned", .results = {}};
    default:
      return op_overrides_test::call(op, arguments);
  }
}

// Two calls of linalg_lstsq with equal inputs differ by 1e-6, depending on alignment.
op_overrides_test::Values values_of(const OpSample& sample) {
  return sample.op == "aten::linalg_lstsq" ? op_overrides_test::Values::within_rounding
                                           : op_overrides_test::Values::bitwise_equal;
}

// Compares every listed sample; returns the ops without a kernel for this setting, with a manual
// cast or under autocast.
std::vector<std::string> compare_all(const mezzo::AutocastOpList& list, const Setting& setting,
                                     const mezzo::OpOverrides& overrides) {
  std::vector<std::string> threw;
  for (const auto& sample : op_overrides_test::op_samples()) {
    const auto cast_policy = list.cast_policy(sample.op);
    if (cast_policy == CastPolicy::fallthrough) {
      continue;
    }
    for (const auto inputs :
         {Inputs::all_float, Inputs::all_lower, Inputs::first_lower, Inputs::all_double}) {
      const auto arguments = prepare(sample, inputs, setting);
      const auto expected = call_with_manual_cast(sample.op, cast_policy, arguments, setting);
      op_overrides_test::Outcome found;
      {
        const mezzo::AutocastGuard autocast(
            {.device_type = setting.device, .dtype = setting.lower, .op_overrides = overrides});
        found = op_overrides_test::call(op_overrides_test::find_op(sample.op), arguments);
      }
      EXPECT_EQ(op_overrides_test::difference(expected, found, values_of(sample)), "")
          << sample.op << ", " << mezzo::to_string(cast_policy) << ", inputs "
          << static_cast<int>(inputs);
      if (inputs == Inputs::all_float && found.threw) {
        threw.push_back(sample.op);
      }
    }
  }
  return threw;
}

std::vector<std::string> without_sample(const mezzo::AutocastOpList& list) {
  std::set<std::string> sampled;
  for (const auto& sample : op_overrides_test::op_samples()) {
    sampled.insert(sample.op);
  }
  std::vector<std::string> missing;
  for (const auto& entry : list.entries()) {
    if (sampled.count(entry.name) == 0) {
      missing.push_back(entry.name);
    }
  }
  return missing;
}

// oneDNN's LSTM needs bfloat16 or float16 instructions; libtorch throws for a named dimension here.
const std::vector<std::string> kWithoutCpuKernel = {"aten::mkldnn_rnn_layer",
                                                    "aten::index_copy.dimname"};

// A libtorch with CUDA adds cuDNN's RNN, whose kernel under autocast also flattens the weights.
TEST(AutocastEveryOp, HasSample) {
  EXPECT_EQ(without_sample(mezzo::autocast_op_list(torch::kCPU)), std::vector<std::string>());
  EXPECT_THAT(without_sample(mezzo::autocast_op_list(torch::kCUDA)),
              IsSubsetOf({"aten::_cudnn_rnn"}));
}

TEST(AutocastEveryOp, CpuEqualsManualCast) {
  const auto list = mezzo::autocast_op_list(torch::kCPU);
  for (const auto lower : {torch::kBFloat16, torch::kHalf}) {
    EXPECT_THAT(compare_all(list, {torch::kCPU, lower}, {}), IsSubsetOf(kWithoutCpuKernel));
  }
}

/// Returns CUDA's lists as overrides for either device: a dtype argument (softmax, sum, norm)
/// becomes a cast of the inputs, and nothing is banned. LSTMs stay in 16-bit dtypes, as cuDNN runs
/// them.
mezzo::OpOverrides like_cuda() {
  const auto cuda = mezzo::autocast_op_list(c10::DeviceType::CUDA);
  const auto cpu = mezzo::autocast_op_list(c10::DeviceType::CPU);
  mezzo::OpOverrides overrides;
  for (const auto& [name, cast_policy] : cuda.entries()) {
    switch (cast_policy) {
      case mezzo::CastPolicy::lower_precision_fp:
        overrides = overrides.allow(name);
        break;
      case mezzo::CastPolicy::promote:
        overrides = overrides.promote(name);
        break;
      default:
        overrides = overrides.deny(name);
    }
  }
  for (const auto& [name, cast_policy] : cpu.entries()) {
    const bool is_of_cuda = cuda.cast_policy(name) != mezzo::CastPolicy::fallthrough;
    if (!is_of_cuda && name != "aten::mkldnn_rnn_layer") overrides = overrides.ignore(name);
  }
  return overrides;
}

/// The cast policy of each op in the overrides.
mezzo::AutocastOpList list_of(const mezzo::OpOverrides& overrides) {
  return {torch::kCPU, overrides.entries()};
}

TEST(AutocastEveryOp, CpuFollowsOverridesLikeCudaLists) {
  const auto overrides = mezzo::install_op_overrides(like_cuda());
  EXPECT_THAT(compare_all(list_of(overrides), {torch::kCPU, torch::kBFloat16}, overrides),
              IsSubsetOf({"aten::_scaled_dot_product_flash_attention", "aten::_thnn_fused_gru_cell",
                          "aten::_thnn_fused_lstm_cell", "aten::cudnn_convolution",
                          "aten::cudnn_convolution_transpose", "aten::norm.names_ScalarOpt_dim"}));
}

TEST(AutocastEveryOp, CudaEqualsManualCast) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "no CUDA device";
  }
  const auto list = mezzo::autocast_op_list(torch::kCUDA);
  EXPECT_THAT(compare_all(list, {torch::kCUDA, torch::kHalf}, {}),
              IsSubsetOf({"aten::binary_cross_entropy", "aten::norm.names_ScalarOpt_dim"}));
}

}  // namespace
