#pragma once

#include <mezzo/kernels/cpu_isa.h>

#include <array>
#include <cstddef>
#include <string>

/// Returns the name of an instruction set for test names.
inline std::string isa_name(mezzo::detail::CpuIsa isa) {
  const std::array<const char*, 4> names{"scalar", "vector128", "avx2", "avx512"};
  return names[static_cast<std::size_t>(isa)];
}
