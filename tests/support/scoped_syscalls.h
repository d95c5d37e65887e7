// Replaces libc's file system calls in a test program, so that tests can make them fail. Include it
// in one translation unit.
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

/// File system calls.
struct Syscalls {
  std::function<int(const char* path, int flags, mode_t mode)> open;
  std::function<ssize_t(int file, const void* from, size_t count)> write;
  std::function<ssize_t(int file, void* to, size_t count, off_t offset)> pread;
  std::function<int(int file)> fsync;
  std::function<int(int file)> close;
  std::function<int(const char* from, const char* to)> rename;
  std::function<int(const char* path)> unlink;
};

template <class Function>
Function libc_function(const char* name, Function) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

/// Returns the calls of libc.
inline Syscalls libc_syscalls() {
  const auto open = reinterpret_cast<int (*)(const char*, int, ...)>(::dlsym(RTLD_NEXT, "open"));
  return {
      .open = [open](const char* path, int flags, mode_t mode) { return open(path, flags, mode); },
      .write = libc_function("write", &::write),
      .pread = libc_function("pread", &::pread),
      .fsync = libc_function("fsync", &::fsync),
      .close = libc_function("close", &::close),
      .rename = libc_function("rename", &::rename),
      .unlink = libc_function("unlink", &::unlink)};
}

inline Syscalls*& overriding_syscalls() {
  static Syscalls* calls = nullptr;
  return calls;
}
inline Syscalls& active_syscalls() {
  static Syscalls& real = *new Syscalls(libc_syscalls());
  return overriding_syscalls() != nullptr ? *overriding_syscalls() : real;
}

/// Overrides the calls in a scope. Not thread-safe.
class ScopedSyscalls {
 public:
  explicit ScopedSyscalls(Syscalls calls) : calls_(std::move(calls)) {
    overriding_syscalls() = &calls_;
  }
  ~ScopedSyscalls() { overriding_syscalls() = nullptr; }
  ScopedSyscalls(const ScopedSyscalls&) = delete;
  ScopedSyscalls& operator=(const ScopedSyscalls&) = delete;

 private:
  Syscalls calls_;
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
  return test_support::active_syscalls().open(path, flags, mode);
}
ssize_t write(int file, const void* from, size_t count) {
  return test_support::active_syscalls().write(file, from, count);
}
ssize_t pread(int file, void* to, size_t count, off_t offset) {
  return test_support::active_syscalls().pread(file, to, count, offset);
}
int fsync(int file) { return test_support::active_syscalls().fsync(file); }
int close(int file) { return test_support::active_syscalls().close(file); }
int rename(const char* from, const char* to) noexcept {
  return test_support::active_syscalls().rename(from, to);
}
int unlink(const char* path) noexcept { return test_support::active_syscalls().unlink(path); }
}
