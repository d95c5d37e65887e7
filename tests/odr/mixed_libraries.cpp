// Loads shared libraries that hold mezzo with and without its CUDA kernels into one symbol scope,
// where the first that defines a symbol wins, and checks that each runs its own code:
//
//   mixed_libraries LIBRARY...

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <cstring>
#include <vector>

#include "../support/loaded_library.h"

int main(int argc, char** argv) {
  std::vector<test_support::LoadedLibrary> libraries;
  for (int i = 1; i < argc; ++i) libraries.emplace_back(argv[i], RTLD_GLOBAL);
  if (libraries.size() < 2) return 2;
  const at::Tensor parameter = at::ones({5}).requires_grad_();
  for (const auto& library : libraries) {
    const auto expect = [&](bool holds, const char* what) {
      test_support::expect(holds, library.path() + ": " + what);
    };
    const bool with_cuda = library.call<bool>("was_built_with_cuda");
    expect(library.call<bool>("has_cuda_kernels") == with_cuda,
           "it calls the code that it was built with");
    const char* type = library.call<const char*>("type_name");
    expect((std::strstr(type, "_cuda") != nullptr) == with_cuda,
           "its types carry how it was built in their names");
    expect(library.call<double, const at::Tensor&>("sum_of_squares", parameter) == 20,
           "its buckets work beside the others'");
  }
  return test_support::expect(true, "");
}
