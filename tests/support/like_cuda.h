#pragma once

#include <mezzo/autocast/op_policy.h>

namespace test_support {

/// Returns CUDA's lists as edits, for either device: what CUDA does by a dtype argument (softmax,
/// sum, norm) is a cast of the inputs here, and nothing is banned. LSTMs stay in 16 bits, as cuDNN
/// runs them.
inline mezzo::OpPolicy like_cuda() {
  const auto cuda = mezzo::autocast_op_lists(c10::DeviceType::CUDA);
  const auto cpu = mezzo::autocast_op_lists(c10::DeviceType::CPU);
  mezzo::OpPolicy policy;
  for (const auto& [name, category] : cuda.entries()) {
    switch (category) {
      case mezzo::OpCategory::lower_precision:
        policy = policy.allow(name);
        break;
      case mezzo::OpCategory::promote:
        policy = policy.promote(name);
        break;
      default:
        policy = policy.deny(name);
    }
  }
  for (const auto& [name, category] : cpu.entries()) {
    const bool is_of_cuda = cuda.category(name) != mezzo::OpCategory::fallthrough;
    if (!is_of_cuda && name != "aten::mkldnn_rnn_layer") policy = policy.ignore(name);
  }
  return policy;
}

}  // namespace test_support
