// Built twice, with hidden visibility: two shared libraries that use policies without knowing of
// each other. two_libraries.cpp loads them.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <optional>

namespace {

std::optional<mezzo::Autocast<at::kCPU>> region;

}  // namespace

extern "C" {

// Enters a region whose policy denies or allows mm.
C10_EXPORT void enter(bool deny) {
  const auto policy = deny ? mezzo::OpPolicy().deny("mm") : mezzo::OpPolicy().allow("mm");
  region.emplace(mezzo::AutocastSetting{.policy = mezzo::install_op_overrides(policy)});
}

C10_EXPORT void leave() { region.reset(); }

C10_EXPORT bool mm_runs_in_float() {
  return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type() == at::kFloat;
}

C10_EXPORT const void* registry() { return &mezzo::detail::override_registry(); }
}
