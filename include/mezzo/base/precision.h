/// \file
/// Precision as a value: the dtypes that a model's weights are kept in, that it computes in, and
/// that its results come in.
#pragma once

#include <c10/core/ScalarType.h>
#include <mezzo/base/version.h>

#include <iosfwd>
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
  [[nodiscard]] auto cast_to_param(T&& value) const;
  template <class T>
  [[nodiscard]] auto cast_to_compute(T&& value) const;
  template <class T>
  [[nodiscard]] auto cast_to_output(T&& value) const;

  /// "params=float32,compute=bfloat16,output=float32"
  std::string to_string() const;

  friend bool operator==(const Precision& a, const Precision& b) noexcept {
    return a.param() == b.param() && a.compute() == b.compute() && a.output() == b.output();
  }

 private:
  PrecisionDtypes dtypes_;
};

inline std::ostream& operator<<(std::ostream& stream, const Precision& precision);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/base/detail/precision_impl.h>
