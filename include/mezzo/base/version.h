/// \file
/// The one place where mezzo's version stands; CMake reads it from here.
#pragma once

#define MEZZO_VERSION_MAJOR 0
#define MEZZO_VERSION_MINOR 2
#define MEZZO_VERSION_PATCH 0

/// The version as one number to compare with: 10203 for 1.2.3.
#define MEZZO_VERSION \
  (MEZZO_VERSION_MAJOR * 10000 + MEZZO_VERSION_MINOR * 100 + MEZZO_VERSION_PATCH)

/// Everything in mezzo lives in `mezzo::inline MEZZO_ABI_NAMESPACE`: v1_2_3, and v1_2_3_cuda where
/// the CUDA kernels are compiled in. So shared libraries that were built with different versions,
/// or with and without the kernels, keep their own code in one process instead of picking up each
/// other's by link order.
#define MEZZO_JOIN_NAMES(major, minor, patch, suffix) v##major##_##minor##_##patch##suffix
#define MEZZO_NAMESPACE_OF(major, minor, patch, suffix) \
  MEZZO_JOIN_NAMES(major, minor, patch, suffix)
#ifdef MEZZO_WITH_CUDA
#define MEZZO_ABI_NAMESPACE \
  MEZZO_NAMESPACE_OF(MEZZO_VERSION_MAJOR, MEZZO_VERSION_MINOR, MEZZO_VERSION_PATCH, _cuda)
#else
#define MEZZO_ABI_NAMESPACE \
  MEZZO_NAMESPACE_OF(MEZZO_VERSION_MAJOR, MEZZO_VERSION_MINOR, MEZZO_VERSION_PATCH, )
#endif

// A program of many units can have mezzo's functions compiled once, in the target mezzo::compiled
// (mezzo/optim/compiled.h), which defines MEZZO_COMPILED for all that link it. Its units leave the
// definitions that are no templates to it: what is marked MEZZO_INLINE is an ordinary function
// then, and elsewhere an inline one. A library that holds kernels for CUDA serves no units without,
// nor the reverse: their namespaces differ.
#if defined(MEZZO_COMPILED) && (!defined(MEZZO_WITH_CUDA) || defined(MEZZO_COMPILED_WITH_CUDA))
#define MEZZO_LEFT_TO_LIBRARY
#define MEZZO_INLINE
#else
#define MEZZO_INLINE inline
#endif
