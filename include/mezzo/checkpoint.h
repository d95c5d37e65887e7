/// \file
/// Checkpoints of the whole state of a training run, samplers that resume inside an epoch, and
/// weights in the safetensors format.
#pragma once

#include <mezzo/checkpoint/checkpoint.h>         // IWYU pragma: export
#include <mezzo/checkpoint/resumable_sampler.h>  // IWYU pragma: export
#include <mezzo/checkpoint/safetensors.h>        // IWYU pragma: export
