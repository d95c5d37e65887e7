// Loads shared libraries with and without mezzo's CUDA kernels into the global symbol scope, where
// the first definition of a symbol wins, and checks which kernels each library uses:
//
//   mixed_libraries hidden|default LIBRARY...
//
// Libraries with hidden symbols use their own kernels, or none. Libraries with default visibility
// share kernels.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <string_view>
#include <vector>

#include "../support/shared_library.h"

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const bool are_shared = argv[1] == std::string_view("default");
  std::vector<test_support::SharedLibrary> libraries;
  for (int i = 2; i < argc; ++i) libraries.emplace_back(argv[i], RTLD_GLOBAL);
  const at::Tensor parameter = at::ones({5}).requires_grad_();
  for (const auto& library : libraries) {
    const auto expect = [&](bool holds, const char* what) {
      test_support::expect(holds, library.path() + ": " + what);
    };
    const bool has_kernels = are_shared || library.call<bool>("links_cuda_kernels");
    expect(library.call<bool>("has_cuda_kernels") == has_kernels,
           "uses the kernels that it links or shares");
    expect(library.call<double, const at::Tensor&>("norm_sq", parameter) == 20,
           "gradient buckets work");
  }
  return test_support::expect(true, "");
}
