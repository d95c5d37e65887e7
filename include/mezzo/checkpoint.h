/// \file
/// Checkpoints of the whole state of a training run.
#pragma once

#include <mezzo/checkpoint/checkpoint.h>         // IWYU pragma: export
#include <mezzo/checkpoint/resumable_sampler.h>  // IWYU pragma: export
