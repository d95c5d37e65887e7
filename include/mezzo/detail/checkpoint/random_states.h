#pragma once

#include <mezzo/detail/checkpoint/object_parts.h>
#include <mezzo/version.h>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Those that ops draw from unless they are given another: the CPU's and each CUDA device's.
inline std::vector<at::Generator> all_default_generators() {
  std::vector<at::Generator> generators{at::globalContext().defaultGenerator(at::kCPU)};
  const int devices = at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
  if (devices > 0) at::globalContext().lazyInitDevice(at::kCUDA);
  for (int i = 0; i < devices; ++i) {
    const c10::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    generators.push_back(at::globalContext().defaultGenerator(device));
  }
  return generators;
}

class RandomStatesPart final : public ArchivePart {
 public:
  const char* kind() const override { return "random states"; }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    const std::vector<at::Generator> generators = all_default_generators();
    archive.write("number", c10::IValue(static_cast<int64_t>(generators.size())));
    for (std::size_t i = 0; i < generators.size(); ++i) {
      archive.write(std::to_string(i), state_of(generators[i]), /*is_buffer=*/true);
    }
  }

  void take(torch::serialize::InputArchive& archive) const override {
    c10::IValue number;
    archive.read("number", number);
    std::vector<at::Tensor> states(static_cast<std::size_t>(number.toInt()));
    for (std::size_t i = 0; i < states.size(); ++i) {
      archive.read(std::to_string(i), states[i], /*is_buffer=*/true);
    }
    std::vector<at::Generator> generators = all_default_generators();
    if (states.size() != generators.size()) {
      TORCH_WARN("The checkpoint has random states of ", states.size() - 1,
                 " CUDA devices, and here are ", generators.size() - 1,
                 ": devices without one go on with their own, and the run will not repeat bit for "
                 "bit what it would have been.");
    }
    for (std::size_t i = 0; i < std::min(states.size(), generators.size()); ++i) {
      set_state(generators[i], states[i]);
    }
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
