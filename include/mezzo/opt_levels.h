/// \file
/// Apex's `initialize` and optimization levels O0 to O3.
#pragma once

#include <mezzo/opt_levels/amp.h>        // IWYU pragma: export
#include <mezzo/opt_levels/opt_level.h>  // IWYU pragma: export
