/// \file
/// The numbers that a WeightCache keeps of itself.
#pragma once

#include <mezzo/base/version.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What a WeightCache did since it was made or its statistics were reset.
struct WeightCacheStatistics {
  std::int64_t casts = 0;        ///< of weights, because no current copy was held
  std::int64_t hits = 0;         ///< uses of a weight that found a current copy
  std::int64_t published = 0;    ///< copies that an optimizer wrote
  std::int64_t evicted = 0;      ///< copies that had to go because of max_bytes
  std::int64_t bytes_cast = 0;   ///< read and written by the casts
  std::int64_t bytes_saved = 0;  ///< what casts in the place of the hits would have moved
  std::int64_t bytes_held = 0;   ///< in copies of living weights, now
  std::int64_t copies_held = 0;  ///< now
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
