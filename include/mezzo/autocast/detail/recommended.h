/// \file
/// The settings that `recommended` and `autocast_from_env` return, each with a sentence that
/// explains it.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/base/detail/hardware.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_has_autocast(c10::DeviceType device) {
  TORCH_CHECK(default_autocast_dtype(device) != at::ScalarType::Undefined,
              "device: no autocast on ", device, "; use cpu, cuda or mps");
}

inline AutocastSetting autocast_off(c10::DeviceType device, const std::string& why) {
  return {.device = device,
          .dtype = default_autocast_dtype(device),
          .enabled = false,
          .reason = "float32 (autocast off): " + why};
}

inline std::string lack_of_instructions(const std::string& dtype) {
  return "this CPU has no " + dtype + " instructions, and emulated " + dtype +
         " is slower than float32";
}

inline AutocastSetting recommend_cpu(const CpuFeatures& cpu) {
  constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;
  if (!cpu.known) {
    return autocast_off(
        kCpu, "mezzo can tell bfloat16 instructions on x86-64 only; set the dtype yourself");
  }
  if (!cpu.bf16) return autocast_off(kCpu, lack_of_instructions("bfloat16"));
  return {.device = kCpu,
          .dtype = at::ScalarType::BFloat16,
          .reason = "bfloat16: this CPU has avx512_bf16"};
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
              "; libtorch sees ", int{count}, count == 1 ? " CUDA device" : " CUDA devices",
              ", of which the first is cuda:0");
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

/// Returns the warning for a region of half on `cpu`; empty where the CPU computes half natively,
/// or where that is not known.
inline std::string half_warning(const CpuFeatures& cpu) {
  if (!cpu.known || cpu.fp16) return {};
  return "autocast on the CPU in float16: " + lack_of_instructions("float16") +
         "; mezzo::recommended(torch::kCPU) is the setting that this machine runs natively";
}

/// Warns once a process of an enabled region that this machine has no device for, and of one that
/// it only emulates. Reads the number of CUDA devices, which libtorch remembers, or, once, CPUID.
inline void warn_of_hardware(c10::DeviceType device, at::ScalarType dtype) {
  if (device == c10::DeviceType::CUDA && !torch::cuda::is_available()) {
    TORCH_WARN_ONCE(
        "User provided device_type of 'cuda', but CUDA is not available. In C++: this region "
        "leaves tensors on the CPU in their dtype; enter the setting of the device that the model "
        "is on, mezzo::AutocastGuard autocast(mezzo::recommended(device))");
  }
  if (device == c10::DeviceType::CPU && dtype == at::ScalarType::Half) {
    static const std::string warning = half_warning(cpu_features());
    if (!warning.empty()) {
      TORCH_WARN_ONCE(warning);
    }
  }
}

inline constexpr const char* kAutocastVariable = "MEZZO_AUTOCAST";

/// The reason of what it returns warns where this CPU only emulates the dtype.
inline AutocastSetting parse_autocast(std::string_view value, c10::Device device,
                                      const CpuFeatures& cpu) {
  if (value == "off") {
    return autocast_off(device.type(), std::string(kAutocastVariable) + "=off");
  }
  if (value == "auto") {
    return recommended(device);
  }
  const bool is_bfloat16 = value == "bf16" || value == "bfloat16";
  TORCH_CHECK(is_bfloat16 || value == "fp16" || value == "float16", kAutocastVariable, "=", value,
              " is not a known value; use off, bf16, fp16 or auto");
  const std::string name = is_bfloat16 ? "bfloat16" : "float16";
  std::string reason = name + ": " + kAutocastVariable + "=" + std::string(value);
  if (device.is_cpu() && cpu.known && !(is_bfloat16 ? cpu.bf16 : cpu.fp16)) {
    reason += ", though " + lack_of_instructions(name);
  }
  return {.device = device.type(),
          .dtype = is_bfloat16 ? at::ScalarType::BFloat16 : at::ScalarType::Half,
          .reason = reason};
}

}  // namespace detail

inline AutocastSetting recommended(c10::Device device) {
  detail::check_has_autocast(device.type());
  if (device.is_mps()) {
    return {.device = c10::DeviceType::MPS,
            .dtype = at::ScalarType::Half,
            .reason = "float16: libtorch's default on mps; scale the loss"};
  }
  return device.is_cpu() ? detail::recommend_cpu(detail::cpu_features())
                         : detail::recommend_cuda(detail::compute_capability(device));
}

inline AutocastSetting autocast_from_env(c10::Device device, const AutocastSetting& when_unset) {
  detail::check_has_autocast(device.type());
  const char* value = std::getenv(detail::kAutocastVariable);
  if (value == nullptr || *value == '\0') {
    return when_unset;
  }
  return detail::parse_autocast(value, device, detail::cpu_features());
}

inline AutocastSetting autocast_from_env(c10::Device device) {
  const std::string reason = device.is_cpu()   ? "bfloat16: the default on the CPU"
                             : device.is_mps() ? "float16: the default on MPS"
                                               : "float16: the default on CUDA";
  return autocast_from_env(
      device,
      {.device = device.type(), .dtype = default_autocast_dtype(device.type()), .reason = reason});
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
