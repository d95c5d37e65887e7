#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace test_support {

/// A shared library that is never closed. Exits if it cannot be opened.
class SharedLibrary {
 public:
  /// \param scope  with RTLD_GLOBAL later libraries use its symbols
  SharedLibrary(const char* path, int scope)
      : path_(path), handle_(dlopen(path, RTLD_NOW | scope)) {
    if (handle_ != nullptr) return;
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  const std::string& path() const { return path_; }

  template <class Result, class... Args>
  Result call(const char* name, Args... args) const {
    return reinterpret_cast<Result (*)(Args...)>(dlsym(handle_, name))(args...);
  }

 private:
  std::string path_;
  void* handle_;
};

/// Prints `what` unless `holds`. \returns the number of failures
inline int expect(bool holds, const std::string& what) {
  static int failures = 0;
  if (holds) return failures;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  return ++failures;
}

}  // namespace test_support
