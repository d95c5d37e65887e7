/// \file
/// The whole state of a training run in a file.
#pragma once

#include <mezzo/checkpoint/checkpoint.h>  // IWYU pragma: export
