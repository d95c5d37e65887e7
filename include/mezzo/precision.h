/// \file
/// Which dtype a region should compute in: libtorch's defaults, what this hardware does natively,
/// and what the user's environment asks for. Everything here is a value; autocast.h acts on it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <mezzo/version.h>

#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The dtype that libtorch's autocast lowers to when nobody says otherwise: half on CUDA, bfloat16
/// on the CPU. `Undefined` for a device type that mezzo has no autocast for.
constexpr at::ScalarType default_autocast_dtype(c10::DeviceType device) {
  switch (device) {
    case c10::DeviceType::CPU:
      return at::ScalarType::BFloat16;
    case c10::DeviceType::CUDA:
      return at::ScalarType::Half;
    default:
      return at::ScalarType::Undefined;
  }
}

/// True where libtorch's autocast on `device` can lower to `dtype`: half and bfloat16, on the CPU
/// and on CUDA. It says nothing about speed; `recommended` does.
constexpr bool autocast_accepts(c10::DeviceType device, at::ScalarType dtype) {
  const bool lower_precision = dtype == at::ScalarType::Half || dtype == at::ScalarType::BFloat16;
  return lower_precision && default_autocast_dtype(device) != at::ScalarType::Undefined;
}

/// What a run-time guard is built from: `AutocastGuard guard({.device = torch::kCUDA})`.
/// Passing one to a guard, a callable or a module validates it; building one checks nothing.
struct AutocastSetting {
  c10::DeviceType device;
  at::ScalarType dtype = default_autocast_dtype(device);  ///< what the lowered ops compute in
  bool enabled = true;        ///< false: the region runs in full precision
  bool cache_enabled = true;  ///< see AutocastOptions::cache_enabled
  std::string reason = {};    ///< one sentence on why, for a log line; no guard reads it
};

/// The setting that this machine runs natively, and why (`.reason`):
/// - CPU: bfloat16 with avx512_bf16 or amx_bf16, else autocast off.
/// - CUDA: bfloat16 from compute capability 8.0, float16 (with a GradScaler) from 7.0, else off.
///
/// On a CPU, emulated bfloat16 is slower than float32: a six-layer encoder took 2 to 2.5 times as
/// long on AVX-512, 15 times on AVX2. float16 is never picked there: it needs a loss scale and took
/// 13 to 40 times as long without instructions of its own. oneDNN computes these ops, so its
/// `ONEDNN_MAX_CPU_ISA` is honoured, and avx_ne_convert alone, which converts but does not
/// multiply, is not enough.
///
/// `device` may be a bare type, `torch::kCUDA`, which means the current device. No host sync; reads
/// CPUID and two environment variables, or asks the CUDA driver. Any thread. Throws c10::Error for
/// a device type without autocast and for a CUDA index that does not exist.
inline AutocastSetting recommended(c10::Device device);

/// The setting that the environment variable `MEZZO_AUTOCAST` asks for: `off`, `bf16`, `fp16`, or
/// `auto`, which is `recommended(device)`. It is what `TF_ENABLE_AUTO_MIXED_PRECISION` is in
/// TensorFlow, and only code that calls this function honours it. `.reason` warns when the hardware
/// emulates what was asked for. Throws c10::Error that lists the values for any other; call it
/// before other threads use setenv.
///
/// Unset or empty means `when_unset`, and in the short form the device's default, enabled: as if
/// the guard had never asked.
inline AutocastSetting autocast_from_env(c10::Device device);
inline AutocastSetting autocast_from_env(c10::Device device, const AutocastSetting& when_unset);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/detail/precision/environment.h>
#include <mezzo/detail/precision/recommended.h>
