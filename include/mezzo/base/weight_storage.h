/// \file
/// WeightStorage: how optimizers store 16-bit weights between steps.
#pragma once

#include <mezzo/base/version.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// How an optimizer stores a bfloat16 or float16 parameter between steps. float32 and float64
/// parameters are not affected. Bytes per parameter are those of AdamW, with the gradient.
///
/// The parameter may be modified outside the optimizer: the next step updates the masters of the
/// modified elements from it.
enum class WeightStorage : std::uint8_t {
  /// 16-bit parameters and moments, each result rounded to nearest. 8 bytes. Updates smaller than
  /// half a unit in the last place are lost: bfloat16 has 8 bits of precision, so training stalls,
  /// and moments with a beta2 of 0.999 never change.
  plain,
  /// Trains a float32 copy in the state; the parameter is that copy rounded to nearest. float32
  /// moments. 16 bytes. Apex's O2 calls the copies master weights.
  fp32_master,
  /// Trains the same values as `fp32_master` without a second copy: the state holds the low 16 bits
  /// that complete the bfloat16 parameter to float32. float32 moments. 14 bytes. bfloat16 only.
  split_master,
  /// Like `plain`, but parameters and moments are rounded stochastically: up or down with
  /// probabilities that make the mean exact, so small updates are not lost. 8 bytes. bfloat16 only.
  /// The random bits are a function of `seed`, step and element index: the same for any number of
  /// threads, on any device, and in a resumed run.
  stochastic_rounding,
};

/// Arguments of mezzo's optimizers after libtorch's options, for all param groups:
///
///     mezzo::optim::AdamW optimizer(
///         model->parameters(), torch::optim::AdamWOptions(2e-5),
///         {.weight_storage = WeightStorage::stochastic_rounding, .seed = 7});
struct WeightStorageOptions {
  /// How 16-bit weights are stored.
  WeightStorage weight_storage = WeightStorage::plain;
  /// Seed of the random bits of WeightStorage::stochastic_rounding.
  std::uint64_t seed = 0;
  bool operator==(const WeightStorageOptions&) const = default;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
