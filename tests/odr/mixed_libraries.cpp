// Loads shared libraries that hold mezzo with and without its CUDA kernels into one symbol scope,
// where the first that defines a symbol wins, and checks that each runs its own code:
//
//   mixed_libraries LIBRARY...

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

struct Library {
  explicit Library(const char* path_in)
      : path(path_in), handle(dlopen(path_in, RTLD_NOW | RTLD_GLOBAL)) {
    if (handle == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      std::exit(1);
    }
  }
  template <class Function>
  Function* symbol(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(handle, name));
  }

  std::string path;
  void* handle;
};

int failures = 0;

void expect(bool holds, const Library& library, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s: %s\n", library.path.c_str(), what);
  ++failures;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Library> libraries;
  for (int i = 1; i < argc; ++i) libraries.emplace_back(argv[i]);
  if (libraries.size() < 2) return 2;
  const at::Tensor parameter = at::ones({5}).requires_grad_();
  for (const Library& library : libraries) {
    const bool with_cuda = library.symbol<bool()>("was_built_with_cuda")();
    expect(library.symbol<bool()>("has_cuda_kernels")() == with_cuda, library,
           "it calls the code that it was built with");
    const char* type = library.symbol<const char*()>("type_name")();
    expect((std::strstr(type, "_cuda") != nullptr) == with_cuda, library,
           "its types carry how it was built in their names");
    expect(library.symbol<double(const at::Tensor&)>("sum_of_squares")(parameter) == 20, library,
           "its buckets work beside the others'");
  }
  return failures;
}
