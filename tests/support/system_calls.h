// The system calls that write and read files, in the place of libc's, for one source of a program:
// a test lets them fail, or kills the process in one.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <utility>

namespace test_support {

/// libc's, or those of a test.
struct SystemCalls {
  std::function<int(const char* path, int flags, mode_t mode)> open;
  std::function<ssize_t(int file, const void* from, size_t count)> write;
  std::function<ssize_t(int file, void* to, size_t count, off_t offset)> pread;
  std::function<int(int file)> fsync;
  std::function<int(int file)> close;
  std::function<int(const char* from, const char* to)> rename;
  std::function<int(const char* path)> unlink;
};

template <class Function>
Function libcs(const char* name, Function) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

/// libc's calls.
inline SystemCalls real_calls() {
  const auto open = reinterpret_cast<int (*)(const char*, int, ...)>(::dlsym(RTLD_NEXT, "open"));
  return {
      .open = [open](const char* path, int flags, mode_t mode) { return open(path, flags, mode); },
      .write = libcs("write", &::write),
      .pread = libcs("pread", &::pread),
      .fsync = libcs("fsync", &::fsync),
      .close = libcs("close", &::close),
      .rename = libcs("rename", &::rename),
      .unlink = libcs("unlink", &::unlink)};
}

inline SystemCalls*& installed_calls() {
  static SystemCalls* calls = nullptr;
  return calls;
}
inline SystemCalls& present_calls() {
  static SystemCalls& real = *new SystemCalls(real_calls());
  return installed_calls() != nullptr ? *installed_calls() : real;
}

/// Installs calls for a scope. One thread at a time.
class WithCalls {
 public:
  explicit WithCalls(SystemCalls calls) : calls_(std::move(calls)) { installed_calls() = &calls_; }
  ~WithCalls() { installed_calls() = nullptr; }
  WithCalls(const WithCalls&) = delete;
  WithCalls& operator=(const WithCalls&) = delete;

 private:
  SystemCalls calls_;
};

}  // namespace test_support

extern "C" {
int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return test_support::present_calls().open(path, flags, mode);
}
ssize_t write(int file, const void* from, size_t count) {
  return test_support::present_calls().write(file, from, count);
}
ssize_t pread(int file, void* to, size_t count, off_t offset) {
  return test_support::present_calls().pread(file, to, count, offset);
}
int fsync(int file) { return test_support::present_calls().fsync(file); }
int close(int file) { return test_support::present_calls().close(file); }
int rename(const char* from, const char* to) noexcept {
  return test_support::present_calls().rename(from, to);
}
int unlink(const char* path) noexcept { return test_support::present_calls().unlink(path); }
}
