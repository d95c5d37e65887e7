// Built as two independent shared libraries with hidden visibility, which two_libraries.cpp loads.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/op_overrides.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <optional>

namespace {

std::optional<mezzo::AutocastGuard<at::kCPU>> region;

}  // namespace

extern "C" {

// Enters a region whose overrides deny or allow mm.
C10_EXPORT void enter(bool deny) {
  const auto overrides = deny ? mezzo::OpOverrides().deny("mm") : mezzo::OpOverrides().allow("mm");
  region.emplace(mezzo::AutocastOptions{.op_overrides = mezzo::install_op_overrides(overrides)});
}

C10_EXPORT void leave() { region.reset(); }

C10_EXPORT bool mm_runs_in_float() {
  return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type() == at::kFloat;
}

C10_EXPORT const void* registry() { return &mezzo::detail::override_registry(); }
}
