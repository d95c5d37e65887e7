/// \file
/// Implementation of recommended_autocast and autocast_from_env, and hardware warnings of regions.
#pragma once

#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/base/detail/dtype_names.h>
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

inline AutocastOptions disabled_autocast_options(c10::DeviceType device,
                                                 const std::string& reason) {
  return {.device_type = device,
          .dtype = default_autocast_dtype(device),
          .enabled = false,
          .reason = "float32 (autocast off): " + reason};
}

inline std::string describe_missing_instructions(const std::string& dtype) {
  return "this CPU has no " + dtype + " instructions, and emulated " + dtype +
         " is slower than float32";
}

inline AutocastOptions recommend_cpu(const CpuFeatures& cpu) {
  constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;
  if (!cpu.known) {
    return disabled_autocast_options(
        kCpu, "mezzo detects bfloat16 instructions on x86-64 only; set the dtype yourself");
  }
  if (!cpu.bf16) return disabled_autocast_options(kCpu, describe_missing_instructions("bfloat16"));
  return {.device_type = kCpu,
          .dtype = at::ScalarType::BFloat16,
          .reason = "bfloat16: this CPU has avx512_bf16"};
}

inline AutocastOptions recommend_cuda(std::optional<ComputeCapability> gpu) {
  constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;
  if (!gpu) return disabled_autocast_options(kCuda, "libtorch finds no CUDA device");
  const std::string name = "a GPU of compute capability " + std::to_string(gpu->major) + "." +
                           std::to_string(gpu->minor);
  if (gpu->major >= 8) {
    return {.device_type = kCuda,
            .dtype = at::ScalarType::BFloat16,
            .reason = "bfloat16: " + name + " multiplies it natively, in float32's range"};
  }
  if (gpu->major == 7) {
    return {
        .device_type = kCuda,
        .dtype = at::ScalarType::Half,
        .reason = "float16: " + name + " multiplies it natively, but not bfloat16; scale the loss"};
  }
  return disabled_autocast_options(kCuda, name + " has no tensor cores");
}

inline std::optional<ComputeCapability> get_compute_capability(c10::Device device) {
  const c10::DeviceIndex count = torch::cuda::device_count();
  TORCH_CHECK(!device.has_index() || device.index() < count, "device: there is no ", device,
              "; libtorch finds ", int{count}, count == 1 ? " CUDA device" : " CUDA devices",
              ", of which the first is cuda:0");
  if (count == 0) return std::nullopt;
  if (!device.has_index()) {
    device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
  }
  const auto capability = query_compute_capability(device.index());
  TORCH_CHECK(capability, "the CUDA driver does not report the compute capability of ", device,
              "; set the dtype yourself");
  return capability;
}

/// Returns the warning for a float16 region on `cpu`; empty if the CPU has float16 instructions, or
/// if that is unknown.
inline std::string float16_cpu_warning(const CpuFeatures& cpu) {
  if (!cpu.known || cpu.fp16) return {};
  return "autocast on the CPU in float16: " + describe_missing_instructions("float16") +
         "; mezzo::recommended_autocast(torch::kCPU) returns what this machine runs natively";
}

/// Warns once per process about an enabled region on a device that this machine lacks, or in a
/// dtype that it only emulates. Reads the number of CUDA devices, which libtorch caches, or, once,
/// CPUID.
inline void warn_if_unsupported_hardware(c10::DeviceType device, at::ScalarType dtype) {
  if (device == c10::DeviceType::CUDA && !torch::cuda::is_available()) {
    TORCH_WARN_ONCE(
        "User provided device_type of 'cuda', but CUDA is not available. In C++: this region "
        "leaves tensors on the CPU in their dtype; use the device that the model is on, "
        "mezzo::AutocastGuard autocast(mezzo::recommended_autocast(device))");
  }
  if (device == c10::DeviceType::CPU && dtype == at::ScalarType::Half) {
    static const std::string warning = float16_cpu_warning(cpu_features());
    if (!warning.empty()) {
      TORCH_WARN_ONCE(warning);
    }
  }
}

inline constexpr const char* kMixedPrecisionVariable = "MEZZO_MIXED_PRECISION";

/// Returns the options of `value`; their `.reason` warns if this CPU only emulates the dtype.
inline AutocastOptions parse_mixed_precision(std::string_view value, c10::Device device,
                                             const CpuFeatures& cpu) {
  if (value == "no") {
    return disabled_autocast_options(device.type(), std::string(kMixedPrecisionVariable) + "=no");
  }
  if (value == "auto") return recommended_autocast(device);
  const bool is_bfloat16 = value == "bf16";
  TORCH_CHECK(is_bfloat16 || value == "fp16", kMixedPrecisionVariable, "=", value,
              " is not a known value; use no, fp16, bf16 or auto");
  const std::string name = is_bfloat16 ? "bfloat16" : "float16";
  std::string reason = name + ": " + kMixedPrecisionVariable + "=" + std::string(value);
  if (device.is_cpu() && cpu.known && !(is_bfloat16 ? cpu.bf16 : cpu.fp16)) {
    reason += ", though " + describe_missing_instructions(name);
  }
  return {.device_type = device.type(),
          .dtype = is_bfloat16 ? at::ScalarType::BFloat16 : at::ScalarType::Half,
          .reason = reason};
}

}  // namespace detail

inline AutocastOptions recommended_autocast(c10::Device device) {
  detail::check_autocast_device(device.type());
  if (device.is_cpu()) return detail::recommend_cpu(detail::cpu_features());
  if (device.is_cuda()) return detail::recommend_cuda(detail::get_compute_capability(device));
  const at::ScalarType dtype = default_autocast_dtype(device.type());
  return {.device_type = device.type(),
          .dtype = dtype,
          .reason = std::string(detail::dtype_name(dtype)) + ": libtorch's default on " +
                    c10::DeviceTypeName(device.type(), /*lower_case=*/true) +
                    (dtype == at::ScalarType::Half ? "; scale the loss" : "")};
}

inline AutocastOptions autocast_from_env(c10::Device device, const AutocastOptions& fallback) {
  detail::check_autocast_device(device.type());
  const char* value = std::getenv(detail::kMixedPrecisionVariable);
  if (value == nullptr || *value == '\0') return fallback;
  return detail::parse_mixed_precision(value, device, detail::cpu_features());
}

inline AutocastOptions autocast_from_env(c10::Device device) {
  const at::ScalarType dtype = default_autocast_dtype(device.type());
  return autocast_from_env(
      device, {.device_type = device.type(),
               .dtype = dtype,
               .reason = std::string(detail::dtype_name(dtype)) + ": the default on " +
                         (device.is_cpu() ? "the CPU" : c10::DeviceTypeName(device.type()))});
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
