/// \file
/// Precision as a value: the dtypes that a model is kept, computed and handed on in; and which
/// dtype a region should compute in: libtorch's defaults, what this hardware does natively, and
/// what the user's environment asks for. Nothing here acts by itself; mezzo/autocast/autocast.h
/// does.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>

#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What a Precision is made of, each float32, bfloat16, float16 or float64.
struct PrecisionDtypes {
  at::ScalarType param = at::ScalarType::Float;    ///< what the weights are kept in
  at::ScalarType compute = at::ScalarType::Float;  ///< what the forward pass runs in
  at::ScalarType output = at::ScalarType::Float;   ///< what the results are handed on in
};

/// Which dtype a model's weights are kept in, which it computes in, and which its results come in;
/// an immutable value, which jmp calls a Policy.
///
///     mezzo::Precision mixed({.compute = torch::kBFloat16});         // the others are float32
///     auto precision = mezzo::Precision::parse("params=float32,compute=bfloat16,output=float32");
///     auto output = precision.cast_to_output(net(precision.cast_to_compute(batch)));
///
/// Casts are differentiable, copy nothing that is in its dtype already, and know no device. Any
/// thread.
class Precision {
 public:
  /// float32 throughout.
  Precision() = default;

  /// \throws c10::Error naming the member that is not float32, bfloat16, float16 or float64
  explicit Precision(const PrecisionDtypes& dtypes);

  /// Reads what `to_string` writes and jmp's short forms: "p=f32,c=bf16,o=f32", or one dtype for
  /// all three, "bfloat16". Order and white space do not matter. What is left out follows as in
  /// jmp: params are float32, compute is as params, output as compute. Dtypes: float32, f32, float,
  /// full; bfloat16, bf16; float16, f16, half (also on devices where jmp would take bfloat16);
  /// float64, f64, double.
  /// \throws c10::Error naming the part that was not understood, and what is
  static Precision parse(std::string_view text);

  at::ScalarType param() const noexcept { return dtypes_.param; }
  at::ScalarType compute() const noexcept { return dtypes_.compute; }
  at::ScalarType output() const noexcept { return dtypes_.output; }

  /// The same but for one dtype.
  /// \throws c10::Error as the constructor does
  [[nodiscard]] Precision with_param(at::ScalarType dtype) const;
  [[nodiscard]] Precision with_compute(at::ScalarType dtype) const;
  [[nodiscard]] Precision with_output(at::ScalarType dtype) const;

  /// `value` with its tensors of those four dtypes cast to one; all other tensors (integers, bool,
  /// complex, float8, quantized, undefined) stay as they are. A value is a tensor, or an optional,
  /// pair, tuple, array, vector or map of values, nested as you like, or a struct that lists its
  /// tensors (`auto tensors() { return std::tie(logits, loss); }`). It is copied, and moved from
  /// where it is an rvalue; an ArrayRef becomes a vector. Modules cast themselves: `to(dtype)`.
  template <class T>
  [[nodiscard]] detail::OwningType<T> cast_to_param(T&& value) const;
  template <class T>
  [[nodiscard]] detail::OwningType<T> cast_to_compute(T&& value) const;
  template <class T>
  [[nodiscard]] detail::OwningType<T> cast_to_output(T&& value) const;

  /// "params=float32,compute=bfloat16,output=float32"
  std::string to_string() const;

  friend bool operator==(const Precision& a, const Precision& b) noexcept {
    return a.param() == b.param() && a.compute() == b.compute() && a.output() == b.output();
  }

 private:
  PrecisionDtypes dtypes_;
};

inline std::ostream& operator<<(std::ostream& stream, const Precision& precision);

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
  bool enabled = true;                               ///< false: the region runs in full precision
  std::optional<bool> cache_enabled = std::nullopt;  ///< see AutocastOptions::cache_enabled
  std::string reason = {};  ///< one sentence on why, for a log line; no guard reads it
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

#include <mezzo/base/detail/environment.h>
#include <mezzo/base/detail/precision_impl.h>
#include <mezzo/base/detail/recommended.h>
