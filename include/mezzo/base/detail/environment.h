/// \file
/// MEZZO_AUTOCAST, from its text to a setting.
#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/detail/cpu_features.h>
#include <mezzo/base/detail/recommended.h>
#include <mezzo/base/precision.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kAutocastVariable = "MEZZO_AUTOCAST";

// Of recommended.h, which comes later where it is what a unit includes first.
inline AutocastSetting autocast_off(c10::DeviceType device, const std::string& why);
inline const char* cost_of_emulation(const CpuFeatures& cpu, at::ScalarType dtype);
inline std::string lack_of_instructions(const CpuFeatures& cpu, const char* dtype);

/// The dtype that the user named, with a word of warning where this CPU only emulates it.
inline AutocastSetting asked_for(c10::DeviceType device, at::ScalarType dtype,
                                 std::string_view value, const CpuFeatures& cpu) {
  const bool half = dtype == at::ScalarType::Half;
  const char* name = half ? "float16" : "bfloat16";
  std::string reason = std::string(name) + ": " + kAutocastVariable + "=" + std::string(value);
  const bool native = half ? cpu.fp16() : cpu.bf16();
  if (device == c10::DeviceType::CPU && cpu.known && !native) {
    reason += ", though " + lack_of_instructions(cpu, name) + "; expect it to be " +
              cost_of_emulation(cpu, dtype);
  }
  return {.device = device, .dtype = dtype, .reason = reason};
}

inline AutocastSetting parse_autocast(std::string_view value, c10::Device device,
                                      const CpuFeatures& cpu) {
  if (value == "off") {
    return autocast_off(device.type(), std::string(kAutocastVariable) + "=off");
  }
  if (value == "auto") {
    return recommended(device);
  }
  TORCH_CHECK(value == "bf16" || value == "fp16", kAutocastVariable, "=", value,
              " is not a known value; use off, bf16, fp16 or auto");
  return asked_for(device.type(), value == "bf16" ? at::ScalarType::BFloat16 : at::ScalarType::Half,
                   value, cpu);
}

}  // namespace detail

inline AutocastSetting autocast_from_env(c10::Device device, const AutocastSetting& when_unset) {
  TORCH_CHECK(default_autocast_dtype(device.type()) != at::ScalarType::Undefined,
              "device: no autocast on ", device.type(), "; use cpu or cuda");
  const char* value = std::getenv(detail::kAutocastVariable);
  if (value == nullptr || *value == '\0') {
    return when_unset;
  }
  return detail::parse_autocast(value, device, detail::cpu_features());
}

inline AutocastSetting autocast_from_env(c10::Device device) {
  const bool half = default_autocast_dtype(device.type()) == at::ScalarType::Half;
  return autocast_from_env(device, {.device = device.type(),
                                    .reason = half ? "float16: the default on CUDA"
                                                   : "bfloat16: the default on the CPU"});
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
