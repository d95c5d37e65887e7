#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

/// kSize elements that a thread loads and stores in accesses of up to 16 bytes
/// (at::native::memory's aligned_vector).
template <class Stored, int kSize>
struct alignas(sizeof(Stored) * kSize < 16 ? sizeof(Stored) * kSize : 16) AlignedVector {
  Stored element[kSize];
};

/// Returns the number of elements of `bytes` bytes before the first aligned for an AlignedVector of
/// `size` of them.
__device__ inline int elements_before_vectors(const void* data, int bytes, int size) {
  const int alignment = bytes * size < 16 ? bytes * size : 16;
  const auto misalignment = static_cast<int>(reinterpret_cast<uintptr_t>(data) % alignment);
  return misalignment == 0 ? 0 : (alignment - misalignment) / bytes;
}

/// \param data  aligned for an AlignedVector
template <class Stored, class Bits, int kSize>
__device__ void load_vector(const Stored* data, Bits (&bits)[kSize]) {
  const auto vector = *reinterpret_cast<const AlignedVector<Stored, kSize>*>(data);
  MEZZO_UNROLL
  for (int i = 0; i < kSize; ++i) bits[i] = vector.element[i];
}

template <class Stored, class Bits, int kSize>
__device__ void store_vector(const Bits (&bits)[kSize], Stored* data) {
  AlignedVector<Stored, kSize> vector;
  MEZZO_UNROLL
  for (int i = 0; i < kSize; ++i) vector.element[i] = static_cast<Stored>(bits[i]);
  *reinterpret_cast<AlignedVector<Stored, kSize>*>(data) = vector;
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
