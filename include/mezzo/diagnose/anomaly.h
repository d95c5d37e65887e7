/// \file
/// What an AnomalyTrace tells: the op that made an inf or NaN, and the ops before it.
#pragma once

#include <mezzo/base/version.h>

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What one tensor holds.
struct ValueRange {
  std::string parameter = {};  ///< its name, where the tensor is one, or autocast's copy of one
  /// Undefined of what holds no floating numbers, which is not read.
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::int64_t> sizes = {};
  double smallest = 0;  ///< magnitude of those that are finite; 0 where there are none
  double largest = 0;
  std::int64_t infs = 0;  ///< of either sign
  std::int64_t negative_infs = 0;
  std::int64_t nans = 0;

  bool is_finite() const { return infs + nans == 0; }
  /// "encoder.weight float16 [8, 4] 0.001 to 3.2, 1 inf".
  std::string to_string() const;
};

/// One op that ran.
struct AnomalyFrame {
  std::string op = {};      ///< "aten::addmm"
  std::string caller = {};  ///< the op that the program called, if that is another: "aten::linear"
  /// The autograd node in whose backward pass the op ran: "AddmmBackward0"; empty in the forward
  /// pass.
  std::string node = {};
  /// The module, by its name in the model, whose parameters the op reads; of an op that reads none
  /// the last one before it. In the backward pass that of the op that made the node. Empty where no
  /// parameter was read yet.
  std::string module = {};
  bool reads_module = false;  ///< whether the op itself reads a parameter of `module`
  std::vector<ValueRange> outputs = {};

  bool is_backward() const { return !node.empty(); }
  /// "aten::addmm (in aten::linear), in encoder.fc".
  std::string place() const;
};

enum class AnomalyCause : std::uint8_t {
  /// An input was inf or NaN, and no op that was watched made it: a parameter, the batch, a
  /// constant.
  arrived,
  /// In the backward pass, and the dtype would have held the result without the loss scale: the
  /// scaler lowers it, and nothing is wrong with the model.
  loss_scale,
  low_precision,  ///< the op's dtype does not hold the result; float32 does
  model,          ///< a wider type gives an inf or NaN too, or a gradient too large for the dtype
  unknown,        ///< the op could not be run again
};

/// An op whose result has an inf or NaN that was not in what it read.
struct Anomaly {
  AnomalyFrame frame = {};
  std::vector<ValueRange> inputs = {};  ///< before the op ran
  AnomalyCause cause = AnomalyCause::unknown;
  /// The dtype in which the op ran again, float32 or, of an op in float32, float64; and what the
  /// result was then.
  std::optional<at::ScalarType> wide_dtype = std::nullopt;
  std::vector<ValueRange> wide_outputs = {};
  double loss_scale = 1;  ///< at that time; 1 in the forward pass
  /// An eps that was added to an input, or that it was clamped to, and that its dtype rounds to 0.
  std::optional<double> lost_scalar = std::nullopt;
  std::optional<int> rank = std::nullopt;

  /// All of this as one line.
  std::string message() const;
};

struct AnomalyTraceOptions {
  std::size_t frames = 20;  ///< how many ops before the first anomaly are kept
  /// Asked when a backward pass makes an inf or NaN: `[&] { return scaler.get_scale(); }`. Without
  /// it loss_scale is never named as a cause.
  std::function<double()> loss_scale = {};
  std::optional<int> rank = std::nullopt;  ///< of this process in a job of several: it is named
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/anomaly_text.h>  // IWYU pragma: export
