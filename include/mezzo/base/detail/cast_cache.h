#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Export.h>

namespace at::autocast {

TORCH_API void clear_cache();  // ATen/autocast_mode.h, which brings in every operator

}  // namespace at::autocast

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Drops libtorch's 16-bit casts of weights, which autocast otherwise uses until this process's
/// outermost region ends. Call it after weights have been written: the next use casts them again,
/// in all threads.
inline void drop_weight_casts() { at::autocast::clear_cache(); }

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
