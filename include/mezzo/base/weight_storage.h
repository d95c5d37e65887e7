/// \file
/// How weights of 16 bits are kept from one step of an optimizer to the next.
#pragma once

#include <mezzo/base/version.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// How an optimizer keeps a parameter of bfloat16 or half between steps. Parameters of float and
/// double are always kept as they are. Bytes a parameter are those of AdamW with its gradient.
///
/// The model's parameter may be written between steps: what was written counts, and a master keeps
/// the rest, element by element; a split master begins anew from the parameter as a whole (also
/// when that moves to another device). Writes through `parameter.data()`, or by a raw pointer that
/// bumps no version, leave no trace, and the next step undoes them where there is a master: write
/// under NoGradGuard, or use set_data.
enum class WeightStorage : std::uint8_t {
  /// As they are, moments too, each result rounded to nearest. 8 bytes. Updates smaller than half a
  /// unit in the last place are lost: bfloat16 has 8 bits, so training stalls, and moments with a
  /// beta2 of 0.999 never move at all.
  plain,
  /// A float copy in the state is what is trained; the parameter is that copy rounded to nearest.
  /// Moments are floats. 16 bytes. What Apex's O2 calls master weights.
  master,
  /// The same trained values without the copy: 16 more bits a parameter complete the bfloat16 to
  /// the float that it was rounded from. Moments are floats. 14 bytes. Parameters are of bfloat16.
  split_master,
  /// As plain, but each result goes to one of its two neighbours with the probability that makes
  /// the mean right, moments too, so that small updates count. 8 bytes. Parameters are of bfloat16.
  /// The random bits follow from `seed`, the step, and the element's place: the same on any number
  /// of threads, on any device, and in a resumed run.
  stochastic,
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
