/// \file
/// How optimizers store 16-bit weights between steps.
#pragma once

#include <mezzo/base/version.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// How an optimizer stores a bfloat16 or half parameter between steps. Float and double parameters
/// are always stored as they are. The bytes per parameter are those of AdamW, with the gradient.
///
/// The model's parameter may be written between steps, in any way. A master then takes over the
/// elements that were written and keeps its digits for the others. A split master keeps the 16 bits
/// below an element that was written, less than a digit of it.
enum class WeightStorage : std::uint8_t {
  /// Parameters and moments in 16 bits, each result rounded to nearest. 8 bytes. Updates smaller
  /// than half a unit in the last place are lost: bfloat16 has 8 bits, so training stalls, and
  /// moments with a beta2 of 0.999 never change.
  plain,
  /// Trains a float copy in the state; the parameter is that copy rounded to nearest. Moments are
  /// floats. 16 bytes. Apex's O2 calls the copies master weights.
  fp32_master,
  /// Trains the same values as `fp32_master` without a second copy: the state holds the 16 bits
  /// that
  /// complete the bfloat16 parameter to a float. Moments are floats. 14 bytes. bfloat16 only.
  split_master,
  /// Like `plain`, but parameters and moments are rounded stochastically: up or down with the
  /// probabilities that make the mean exact, so small updates are not lost. 8 bytes. bfloat16 only.
  /// The random bits follow from `seed`, the step and the element's index: they are the same for
  /// any number of threads, on any device, and in a resumed run.
  stochastic_rounding,
};

/// What mezzo's optimizers take beside libtorch's options, for all of their groups:
///
///     mezzo::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(2e-5),
///                                   {.weight_storage = WeightStorage::stochastic_rounding, .seed = 7});
struct WeightStorageOptions {
  /// How weights of 16 bits are kept.
  WeightStorage weight_storage = WeightStorage::plain;
  /// Seed of the random bits of WeightStorage::stochastic_rounding.
  std::uint64_t seed = 0;
  /// Compares both.
  bool operator==(const WeightStorageOptions&) const = default;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
