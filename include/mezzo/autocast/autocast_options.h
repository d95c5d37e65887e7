/// \file
/// AutocastOptions, the options of an autocast region, and three sources of them: libtorch's
/// defaults, what this hardware computes natively, and an environment variable.
#pragma once

#include <mezzo/base/version.h>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <ostream>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
struct OpOverrideMap;
}  // namespace detail

/// Returns the dtype that libtorch's autocast lowers to by default: bfloat16 on the CPU, HPU, MAIA
/// and XLA, float16 on CUDA, MPS, XPU, IPU, MTIA and PrivateUse1; `Undefined` for a device type for
/// which libtorch has no autocast.
constexpr at::ScalarType default_autocast_dtype(c10::DeviceType device) {
  switch (device) {
    case c10::DeviceType::CPU:
    case c10::DeviceType::HPU:
    case c10::DeviceType::MAIA:
    case c10::DeviceType::XLA:
      return at::ScalarType::BFloat16;
    case c10::DeviceType::CUDA:
    case c10::DeviceType::MPS:
    case c10::DeviceType::XPU:
    case c10::DeviceType::IPU:
    case c10::DeviceType::MTIA:
    case c10::DeviceType::PrivateUse1:
      return at::ScalarType::Half;
    default:
      return at::ScalarType::Undefined;
  }
}

/// Returns whether libtorch's autocast on `device` can lower to `dtype`: float16 and bfloat16, on
/// device types with autocast. `recommended_autocast` returns what is fast.
constexpr bool is_autocast_dtype_supported(c10::DeviceType device, at::ScalarType dtype) {
  const bool is_low_precision = dtype == at::ScalarType::Half || dtype == at::ScalarType::BFloat16;
  return is_low_precision && default_autocast_dtype(device) != at::ScalarType::Undefined;
}

/// OpOverrides convert to this, so that guards do not include op_overrides.h, which takes four
/// seconds to compile. Null: the enclosing region's overrides apply.
using OpOverridesHandle = std::shared_ptr<const detail::OpOverrideMap>;

/// Options of an autocast region: of guards, wrapped callables and modules.
///
///     mezzo::AutocastGuard autocast({.device_type = torch::kCUDA, .dtype = torch::kBFloat16});
///     mezzo::AutocastGuard<torch::kCPU> autocast({.cache_enabled = false});
///
/// Guards, wrappers and modules validate them.
struct AutocastOptions {
  /// Any device type for which libtorch has autocast: CPU, CUDA, MPS, XPU, HPU, ..., PrivateUse1.
  /// Required, except by `AutocastGuard<torch::kCUDA>`, whose type has it.
  std::optional<c10::DeviceType> device_type = std::nullopt;

  /// float16 or bfloat16, the dtype of lowered ops. Unset, as in `torch.autocast`: the thread's
  /// `at::autocast::get_autocast_dtype(device_type)`, which is the enclosing region's or, without
  /// one, default_autocast_dtype. `AutocastGuard<torch::kCUDA>` has it in its type.
  ///
  /// A region of float16 on a CPU without float16 instructions warns once. oneDNN throws for
  /// torch::nn::LSTM there ("could not create a primitive descriptor for the LSTM"), in Python too;
  /// `OpOverrides().deny("aten::mkldnn_rnn_layer")` runs LSTMs in float32.
  std::optional<at::ScalarType> dtype = std::nullopt;

  /// False disables autocast in the region, also inside an enabled one. Tensors that the enclosing
  /// region lowered keep their dtype: cast them (`x.to(torch::kFloat)`) before use.
  bool enabled = true;

  /// Dtype to which float16 and bfloat16 tensors in the result of a callable or module are cast.
  /// With torch::kFloat a loss computed outside the region has float32 precision. Tensors are found
  /// in containers, pairs, tuples, optionals, IValues, and structs with `tensors()`; other results
  /// throw. Unset: results are returned unchanged. Guards, which return nothing, throw for it.
  std::optional<at::ScalarType> output_dtype = std::nullopt;

  /// Whether libtorch caches the cast of a weight for its next uses. Unset: as in the enclosing
  /// region, or `at::autocast::is_autocast_cache_enabled`.
  ///
  /// A process has one cache, keyed by the weight alone and cleared when the outermost region of a
  /// thread ends. Disable it where weights change inside a region, or where threads run the same
  /// weights in different dtypes.
  std::optional<bool> cache_enabled = std::nullopt;

  /// Overrides of the op lists, on top of the enclosing region's. Their ops must be installed: see
  /// install_op_overrides (op_overrides.h).
  OpOverridesHandle op_overrides = {};

  /// Why these options were chosen, for a log line. Has no effect.
  std::string reason = {};
};

/// Prints the members that are set: "AutocastOptions(device_type=cuda, dtype=Half, enabled=true)".
inline std::ostream& operator<<(std::ostream& stream, const AutocastOptions& options) {
  const auto as_text = [](bool value) { return value ? "true" : "false"; };
  stream << "AutocastOptions(";
  if (options.device_type) {
    stream << "device_type=" << c10::DeviceTypeName(*options.device_type, /*lower_case=*/true)
           << ", ";
  }
  if (options.dtype) stream << "dtype=" << *options.dtype << ", ";
  stream << "enabled=" << as_text(options.enabled);
  if (options.output_dtype) stream << ", output_dtype=" << *options.output_dtype;
  if (options.cache_enabled) stream << ", cache_enabled=" << as_text(*options.cache_enabled);
  if (options.op_overrides != nullptr) stream << ", op_overrides=...";
  if (!options.reason.empty()) stream << ", reason=\"" << options.reason << "\"";
  return stream << ")";
}

/// Returns the options that this machine runs natively, with a `.reason`:
/// - CPU: bfloat16 with avx512_bf16, else disabled.
/// - CUDA: bfloat16 from compute capability 8.0, float16 (with a GradScaler) from 7.0, else
///   disabled.
/// - others: libtorch's default dtype, float16 with a GradScaler; mezzo has not been run on them.
///
/// Ignores the environment variable `MEZZO_MIXED_PRECISION`, which
/// `autocast_from_env(device, recommended_autocast(device))` reads first.
///
/// On a CPU, emulated bfloat16 is slower than float32: a six-layer encoder took 2 to 2.5 times as
/// long on AVX-512, 15 times on AVX2. float16 is never recommended there: it needs a loss scale and
/// took 13 to 40 times as long without float16 instructions. avx_ne_convert alone, which converts
/// but does not multiply, is not enough.
///
/// The recommendation depends on the machine and not on the model. A model of small products or
/// convolutions can be slower in native bfloat16, since casts and calls outweigh them (an mnist
/// network took 1.2 times as long). examples/compare_precisions times a model's own steps.
///
/// \param device  a bare type, `torch::kCUDA`, means the current device
/// \throws c10::Error for a device type without autocast, and for a CUDA index that does not exist
///
/// No host sync: reads CPUID, or queries the CUDA driver. Thread-safe.
inline AutocastOptions recommended_autocast(c10::Device device);

/// Returns the options that the environment variable `MEZZO_MIXED_PRECISION` selects, with
/// Accelerate's values: `no`, `bf16`, `fp16`, or `auto`, which is `recommended_autocast(device)`.
/// **Unset or empty**: autocast enabled, in the device's default dtype, fast on this machine or
/// not. `.reason` warns where the hardware emulates the selected dtype.
///
/// TensorFlow's counterpart is `TF_ENABLE_AUTO_MIXED_PRECISION`. Only code that calls this function
/// reads the variable. Call it before other threads use setenv.
/// \throws c10::Error that lists the values, for any other
inline AutocastOptions autocast_from_env(c10::Device device);
/// Returns `fallback` if the variable is unset or empty.
inline AutocastOptions autocast_from_env(c10::Device device, const AutocastOptions& fallback);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/autocast/detail/recommended_autocast.h>
