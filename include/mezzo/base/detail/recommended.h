/// \file
/// From what the hardware can do to a setting and the sentence that explains it.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <mezzo/base/detail/compute_capability.h>
#include <mezzo/base/detail/cpu_features.h>
#include <mezzo/base/precision.h>
#include <torch/cuda.h>

#include <optional>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline AutocastSetting autocast_off(c10::DeviceType device, const std::string& why) {
  return {.device = device, .enabled = false, .reason = "float32 (autocast off): " + why};
}

/// What emulation costs, measured on a six-layer encoder of width 384 with two cores.
inline const char* cost_of_emulation(const CpuFeatures& cpu, at::ScalarType dtype) {
  if (dtype == at::ScalarType::Half) {
    return "more than 10 times slower than float32";
  }
  return cpu.avx512 ? "about 2.5 times slower than float32" : "about 15 times slower than float32";
}

/// "this CPU has no bfloat16 instructions", or who hides them.
inline std::string lack_of_instructions(const CpuFeatures& cpu, const char* dtype) {
  if (!cpu.capped_by.empty()) {
    return cpu.capped_by + " keeps libtorch from " + dtype + " instructions";
  }
  return std::string("this CPU has no ") + dtype + " instructions";
}

inline AutocastSetting recommend_cpu(const CpuFeatures& cpu) {
  if (!cpu.known) {
    return autocast_off(
        c10::DeviceType::CPU,
        "mezzo can tell bfloat16 instructions on x86-64 only; set the dtype yourself");
  }
  if (!cpu.bf16()) {
    return autocast_off(c10::DeviceType::CPU, lack_of_instructions(cpu, "bfloat16") +
                                                  "; autocast would be " +
                                                  cost_of_emulation(cpu, at::ScalarType::BFloat16));
  }
  return {.device = c10::DeviceType::CPU,
          .dtype = at::ScalarType::BFloat16,
          .reason = cpu.amx_bf16 ? "bfloat16: this CPU has amx_bf16"
                                 : "bfloat16: this CPU has avx512_bf16"};
}

inline AutocastSetting recommend_cuda(std::optional<ComputeCapability> gpu) {
  constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;
  if (!gpu) {
    return autocast_off(kCuda, "libtorch sees no CUDA device");
  }
  const std::string name = "a GPU of compute capability " + std::to_string(gpu->major) + "." +
                           std::to_string(gpu->minor);
  if (gpu->major >= 8) {
    return {.device = kCuda,
            .dtype = at::ScalarType::BFloat16,
            .reason = "bfloat16: " + name + " multiplies it natively, in float32's range"};
  }
  if (gpu->major == 7) {
    return {
        .device = kCuda,
        .dtype = at::ScalarType::Half,
        .reason = "float16: " + name + " multiplies it natively, and bfloat16 not; scale the loss"};
  }
  return autocast_off(kCuda, name + " has no tensor cores");
}

inline std::optional<ComputeCapability> compute_capability(c10::Device device) {
  const c10::DeviceIndex count = torch::cuda::device_count();
  TORCH_CHECK(!device.has_index() || device.index() < count, "device: there is no ", device,
              "; libtorch sees ", int{count}, " CUDA devices");
  if (count == 0) {
    return std::nullopt;
  }
  if (!device.has_index()) {
    device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
  }
  const auto capability = query_compute_capability(device.index());
  TORCH_CHECK(capability, "the CUDA driver library libcuda.so.1 does not describe ", device,
              "; name the dtype instead of asking for a recommendation");
  return capability;
}

}  // namespace detail

inline AutocastSetting recommended(c10::Device device) {
  TORCH_CHECK(default_autocast_dtype(device.type()) != at::ScalarType::Undefined,
              "device: no autocast on ", device.type(), "; use cpu or cuda");
  return device.is_cpu() ? detail::recommend_cpu(detail::cpu_features())
                         : detail::recommend_cuda(detail::compute_capability(device));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
