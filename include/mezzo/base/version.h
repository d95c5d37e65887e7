/// \file
/// The one place where mezzo's version stands; CMake reads it from here.
#pragma once

#define MEZZO_VERSION_MAJOR 0
#define MEZZO_VERSION_MINOR 1
#define MEZZO_VERSION_PATCH 0

/// Everything in mezzo lives in `mezzo::inline MEZZO_ABI_NAMESPACE`. The name carries the ABI
/// version and whether the CUDA kernels are compiled in, so that two shared libraries built with
/// and without them keep their own code instead of picking up each other's by link order.
#ifdef MEZZO_WITH_CUDA
#define MEZZO_ABI_NAMESPACE v0_cuda
#else
#define MEZZO_ABI_NAMESPACE v0
#endif
