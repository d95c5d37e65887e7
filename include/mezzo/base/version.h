/// \file
/// mezzo's version, which CMake reads from this header.
#pragma once

/// Major version.
#define MEZZO_VERSION_MAJOR 0
/// Minor version.
#define MEZZO_VERSION_MINOR 3
/// Patch version.
#define MEZZO_VERSION_PATCH 0

/// The version as an integer: 10203 for 1.2.3.
#define MEZZO_VERSION \
  (MEZZO_VERSION_MAJOR * 10000 + MEZZO_VERSION_MINOR * 100 + MEZZO_VERSION_PATCH)

/// Implementation of MEZZO_MAKE_NAMESPACE.
#define MEZZO_CONCAT_NAMESPACE(major, minor, patch) v##major##_##minor##_##patch
/// Expands its arguments and concatenates them to v1_2_3.
#define MEZZO_MAKE_NAMESPACE(major, minor, patch) MEZZO_CONCAT_NAMESPACE(major, minor, patch)
/// The inline namespace of all symbols: v1_2_3. Shared libraries built with different versions of
/// mezzo can be loaded in one process.
#define MEZZO_ABI_NAMESPACE \
  MEZZO_MAKE_NAMESPACE(MEZZO_VERSION_MAJOR, MEZZO_VERSION_MINOR, MEZZO_VERSION_PATCH)

/// \def MEZZO_INLINE
/// Marks functions that the target mezzo::compiled (mezzo/optim/compiled.h) can define. It compiles
/// them once, and defines MEZZO_COMPILED_LIB for targets that link it: the functions are then not
/// inline.
#ifdef MEZZO_COMPILED_LIB
#define MEZZO_INLINE
#else
#define MEZZO_INLINE inline
#endif
