/// \file
/// Where in a type's range do a model's values lie, and by how much could the loss scale move?
///
///     mezzo::UnderflowReport report(torch::kHalf, {.loss_scale = scaler.get_scale()});
///     report.add_gradients(model);                  // after backward, before unscaling
///     std::cout << report;                          // a line a layer
///     double scale = mezzo::suggest_loss_scale(report);
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
class ExponentCounts;
}

/// What a floating type can hold, by the power of two below a value's magnitude.
struct ExponentRange {
  int smallest = 0;  ///< of the smallest subnormal number: -24 of half
  int normal = 0;    ///< of the smallest normal number: -14
  int largest = 0;   ///< of the largest number: 15

  /// \throws c10::Error unless `dtype` is half, bfloat16 or float32
  static ExponentRange of(at::ScalarType dtype);
};

/// One layer's sampled values; shares are of all of them, from 0 to 1.
struct LayerExponents {
  /// The exponent of the first bin of the histogram, which also holds all below it.
  static constexpr int kFirst = -127;

  std::string layer;         ///< its name, as given to `add`
  std::int64_t sampled = 0;  ///< how many values were counted
  double zero = 0;           ///< zero already
  double lost = 0;           ///< not zero, but nearer to zero than to the smallest subnormal number
  double subnormal = 0;      ///< held with fewer bits than others
  double overflow = 0;       ///< finite, but inf in the type
  double non_finite = 0;     ///< inf or NaN already
  /// Bin i counts values with 2^e <= |value| < 2^(e + 1), where e = i + kFirst.
  std::array<std::int64_t, 255> histogram{};

  /// The exponent of the smallest and of the largest finite value that is not zero, if there is
  /// one.
  std::optional<int> smallest() const;
  /// Likewise.
  std::optional<int> largest() const;
};

/// What an UnderflowReport samples.
struct UnderflowOptions {
  double loss_scale = 1;        ///< that the values carry; only suggest_loss_scale wants to know
  std::int64_t samples = 8192;  ///< at most so many values of a tensor, evenly spread
};

/// Counts sampled values by exponent, layer by layer, against the range of a low type. Values may
/// be of any floating dtype. Values that were in the low type before, as gradients of float32
/// weights under autocast were, have lost what it does not hold already, and count as zero.
///
/// Adding launches some small kernels and does not wait for a device; the questions do. A copy
/// shares the counts. Any thread may add.
class UnderflowReport {
 public:
  /// \throws c10::Error for a dtype without an ExponentRange, or options that are not positive
  explicit UnderflowReport(at::ScalarType dtype, const UnderflowOptions& options = {});

  /// Counts some of `values`: an activation, a gradient. Calls for the same layer add up.
  void add(const std::string& layer, const at::Tensor& values);

  /// Counts the gradients of all parameters that have one; a layer is a module with parameters of
  /// its own.
  void add_gradients(torch::nn::Module& model);

  /// Counts the gradient of an activation when backward makes it.
  /// \throws c10::Error if it requires no grad
  void add_gradient_of(const std::string& layer, const at::Tensor& activation);

  /// In the order in which they were added.
  std::vector<LayerExponents> layers() const;

  /// All layers as one, called "all layers".
  LayerExponents total() const;

  /// The lost share of the values that are not zero, for TelemetryStep::underflow. Zeros are left
  /// out because most are gradients of weights that were not used.
  double lost() const;

  /// Returns the dtype that the report is about.
  at::ScalarType dtype() const noexcept { return dtype_; }
  /// Returns what that dtype holds.
  ExponentRange range() const { return ExponentRange::of(dtype_); }
  /// Returns the options that the report was made with.
  const UnderflowOptions& options() const noexcept { return options_; }

 private:
  at::ScalarType dtype_;
  UnderflowOptions options_;
  std::shared_ptr<detail::ExponentCounts> counts_;
};

/// A table with a line a layer, and by how much the loss scale could move.
inline std::ostream& operator<<(std::ostream& stream, const UnderflowReport& report);

/// The largest power of two up to 2^24 (Apex's ceiling) under which the largest value seen stays
/// `margin` doublings below the type's largest number; half of the present scale at most where a
/// value overflowed. For a fixed scale, or as init_scale. Waits for the device.
///
/// Where every value is 0, the gradients have underflowed or there are none. Underflowed values
/// were at most half of the type's smallest number: the suggestion is what values of that size
/// allow. If the next report has zeros alone again, the loss does not depend on these weights.
/// \throws c10::Error where no value was seen
double suggest_loss_scale(const UnderflowReport& gradients, int margin = 3);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/underflow_impl.h>  // IWYU pragma: export
