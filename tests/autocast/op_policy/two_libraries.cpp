// Loads two shared libraries that hold mezzo, each with local symbols, and checks that both obey
// the same policies and that an op has one override between them: two_libraries FIRST SECOND

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace {

class Library {
 public:
  explicit Library(const char* path) : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      std::exit(1);
    }
  }

  void enter(bool deny) const { symbol<void(bool)>("enter")(deny); }
  void leave() const { symbol<void()>("leave")(); }
  bool mm_runs_in_float() const { return symbol<bool()>("mm_runs_in_float")(); }
  const void* registry() const { return symbol<const void*()>("registry")(); }

 private:
  template <class Function>
  Function* symbol(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(handle_, name));
  }

  void* handle_;
};

int failures = 0;

void expect(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "not so: %s\n", what);
    ++failures;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    return 2;
  }
  const Library first(argv[1]);
  const Library second(argv[2]);
  first.enter(/*deny=*/true);
  expect(first.mm_runs_in_float(), "the first library obeys its own policy");
  expect(second.mm_runs_in_float(), "so does the second");
  second.enter(/*deny=*/false);
  expect(!first.mm_runs_in_float(), "an inner policy of the second library holds in the first");
  expect(first.registry() == second.registry(), "there is one registry");
  second.leave();
  expect(first.mm_runs_in_float(), "the outer policy is back");
  first.leave();
  return failures;
}
