/// \file
/// AutocastOptions, the value that a region of autocast is told, and three ways to choose one:
/// libtorch's defaults, what this hardware does natively, and what the user's environment asks for.
/// Nothing here acts by itself; mezzo/autocast/autocast_guard.h does.
#pragma once

#include <mezzo/base/version.h>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
struct OpOverrideMap;
}  // namespace detail

/// Returns the dtype that libtorch's autocast lowers to by default: half on CUDA and on Apple's
/// GPUs (MPS), bfloat16 on the CPU. `Undefined` for a device type that mezzo has no autocast for.
constexpr at::ScalarType default_autocast_dtype(c10::DeviceType device) {
  switch (device) {
    case c10::DeviceType::CPU:
      return at::ScalarType::BFloat16;
    case c10::DeviceType::CUDA:
    case c10::DeviceType::MPS:
      return at::ScalarType::Half;
    default:
      return at::ScalarType::Undefined;
  }
}

namespace detail {
/// The device type of an AutocastGuard whose device is known at run time only.
inline constexpr c10::DeviceType kRuntimeDevice = c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES;
}  // namespace detail

/// Whether libtorch's autocast on `device` can lower to `dtype`: half and bfloat16, on the CPU,
/// CUDA and MPS. `recommended_autocast` knows what is fast.
constexpr bool is_autocast_dtype_supported(c10::DeviceType device, at::ScalarType dtype) {
  const bool lower_precision_fp =
      dtype == at::ScalarType::Half || dtype == at::ScalarType::BFloat16;
  return lower_precision_fp && default_autocast_dtype(device) != at::ScalarType::Undefined;
}

/// Handle of an OpOverrides (op_policy.h) in a options; it shares the overrides's edits. Null: the
/// surrounding region's overrides stays in force. An OpOverrides converts to it, so that guards
/// need not include op_policy.h, which takes four seconds to compile.
using OpOverridesHandle = std::shared_ptr<const detail::OpOverrideMap>;

/// Settings of a region of autocast. Guards, wrapped callables and modules take them:
///
///     mezzo::AutocastGuard autocast({.device_type = torch::kCUDA, .dtype = torch::kBFloat16});
///     mezzo::AutocastGuard<torch::kCPU> autocast({.cache_enabled = false, .op_overrides = overrides});
///
/// Making one checks nothing; the guard that takes it validates it.
struct AutocastOptions {
  /// The CPU, CUDA or MPS. AutocastGuard and the like need it; `AutocastGuard<torch::kCUDA>` has it
  /// in its type.
  std::optional<c10::DeviceType> device_type = std::nullopt;

  /// The dtype of the lowered ops: half or bfloat16. None: as with `torch.autocast`, the thread's
  /// `at::autocast::get_autocast_dtype(device)`. This is the surrounding region's, or what
  /// set_autocast_dtype was told, or else default_autocast_dtype. `AutocastGuard<device>` has it in
  /// its type.
  ///
  /// Half on the CPU wants a processor with instructions for it, and a region warns once where they
  /// are missing. oneDNN refuses torch::nn::LSTM in
  /// half without them ("could not create a primitive descriptor for the LSTM"), in Python too; the
  /// overrides `OpOverrides().deny("aten::mkldnn_rnn_layer")` runs LSTMs in float32.
  std::optional<at::ScalarType> dtype = std::nullopt;

  /// False makes the region run in full precision, also inside an enabled one. Tensors that the
  /// surrounding region lowered stay as they are: cast them (`x.to(torch::kFloat)`) before use.
  bool enabled = true;

  /// Dtype of the results of a callable, expression or module that runs under this options: tensors
  /// of bfloat16 and half in them are cast to it. With torch::kFloat a loss that is computed
  /// outside of the region has float32's digits. Tensors are found in containers, pairs, tuples,
  /// optionals, IValues, and structs with `tensors()`; other results throw. None: results stay as
  /// they are. A guard, which returns nothing, refuses it.
  std::optional<at::ScalarType> output_dtype = std::nullopt;

  /// Whether a weight that is used twice is cast once, by libtorch's cache. None: as in the
  /// surrounding region, or as `at::autocast::set_autocast_cache_enabled` was told.
  ///
  /// The cache is one a process, keyed by the weight alone, and lasts until the outermost region of
  /// a thread ends. Switch it off where weights change inside a region, or where threads run the
  /// same weights in different dtypes.
  std::optional<bool> cache_enabled = std::nullopt;

  /// Edits to the op lists: an OpOverrides, on top of the surrounding region's where regions nest.
  /// Its ops must have been installed: install_op_overrides (op_policy.h).
  OpOverridesHandle op_overrides = {};

  /// One sentence on why, for a log line. No guard reads it.
  std::string reason = {};
};

/// Returns the options that this machine runs natively, and why (`.reason`):
/// - CPU: bfloat16 with avx512_bf16, else autocast off.
/// - CUDA: bfloat16 from compute capability 8.0, float16 (with a GradScaler) from 7.0, else off.
/// - MPS: float16 (with a GradScaler), libtorch's default; mezzo has not been run on one.
///
/// The environment variable `MEZZO_MIXED_PRECISION` changes nothing here, set or not:
/// `autocast_from_env(device, recommended_autocast(device))` asks it first.
///
/// On a CPU, emulated bfloat16 is slower than float32: a six-layer encoder took 2 to 2.5 times as
/// long on AVX-512, 15 times on AVX2. float16 is never picked there: it needs a loss scale and took
/// 13 to 40 times as long without instructions of its own. avx_ne_convert alone, which converts but
/// does not multiply, is not enough.
///
/// `recommended_autocast` knows the machine and not the model. A model of small products or
/// convolutions can be slower in bfloat16 although the instructions are there, since casts and
/// calls outweigh them (an mnist network took 1.2 times as long). examples/compare_precisions times
/// the model's own steps.
///
/// `device` may be a bare type, `torch::kCUDA`, which means the current device. No host sync; reads
/// CPUID, or asks the CUDA driver. Any thread.
/// \throws c10::Error for a device type without autocast, and for a CUDA index that does not exist
inline AutocastOptions recommended_autocast(c10::Device device);

/// Returns the options that the environment variable `MEZZO_MIXED_PRECISION` asks for: `no`, `bf16`
/// (or `bfloat16`), `fp16` (or `float16`), or `auto`, which is `recommended_autocast(device)`.
/// **Unset or empty** means `fallback`, and in the short form autocast on, in the device's default
/// dtype, whether this machine is fast at it or not.
///
/// The variable is what `TF_ENABLE_AUTO_MIXED_PRECISION` is in TensorFlow, and only code that calls
/// this function honours it. `.reason` warns when the hardware emulates what was asked for. Call
/// this function before other threads use setenv.
/// \throws c10::Error that lists the values, for any other
inline AutocastOptions autocast_from_env(c10::Device device);
/// Returns `fallback` if the variable is unset or empty, else what the short form returns.
inline AutocastOptions autocast_from_env(c10::Device device, const AutocastOptions& fallback);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/autocast/detail/recommended_autocast.h>
