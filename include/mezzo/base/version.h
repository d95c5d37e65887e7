/// \file
/// mezzo's version. CMake reads it from this header.
#pragma once

/// The first number of the version.
#define MEZZO_VERSION_MAJOR 0
/// The second number of the version.
#define MEZZO_VERSION_MINOR 3
/// The third number of the version.
#define MEZZO_VERSION_PATCH 0

/// The version as one number to compare with: 10203 for 1.2.3.
#define MEZZO_VERSION \
  (MEZZO_VERSION_MAJOR * 10000 + MEZZO_VERSION_MINOR * 100 + MEZZO_VERSION_PATCH)

/// Joins the parts of a namespace's name, for MEZZO_ABI_NAMESPACE.
#define MEZZO_CONCAT_NAMESPACE(major, minor, patch) v##major##_##minor##_##patch
/// Joins the parts after expanding them, for MEZZO_ABI_NAMESPACE.
#define MEZZO_MAKE_NAMESPACE(major, minor, patch) MEZZO_CONCAT_NAMESPACE(major, minor, patch)
/// The inline namespace of everything in mezzo: v1_2_3. Shared libraries that were built with
/// different versions therefore keep their own code in one process, whatever the link order.
#define MEZZO_ABI_NAMESPACE \
  MEZZO_MAKE_NAMESPACE(MEZZO_VERSION_MAJOR, MEZZO_VERSION_MINOR, MEZZO_VERSION_PATCH)

/// \def MEZZO_INLINE
/// Marks functions that mezzo::compiled can define. The target mezzo::compiled
/// (mezzo/optim/compiled.h) compiles mezzo's functions once for a program of many units, and
/// defines MEZZO_COMPILED_LIB for all targets that link it. Marked functions are then ordinary
/// functions, defined in that library; without it they are inline.
#ifdef MEZZO_COMPILED_LIB
#define MEZZO_INLINE
#else
#define MEZZO_INLINE inline
#endif
