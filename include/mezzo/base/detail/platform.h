#pragma once

#include <mezzo/base/version.h>

#include <ATen/DynamicLibrary.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <ctime>
#include <optional>

#if defined(_WIN32)
#include <c10/util/win32-headers.h>

#include <process.h>
#include <psapi.h>
#else
#include <dlfcn.h>
#include <unistd.h>
#endif
#if defined(__APPLE__)
#include <mach/mach.h>
#endif

// Shared libraries, and properties of this process, on Linux, macOS and Windows.

/// \def MEZZO_HIDDEN
/// Hides a symbol from other shared libraries. Windows hides symbols by default.
#if defined(__GNUC__)
#define MEZZO_HIDDEN __attribute__((visibility("hidden")))
#else
#define MEZZO_HIDDEN
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Loads a library permanently, and returns its function `name`; null if either does not exist.
template <class Function>
Function* load_symbol(const char* library, const char* name) {
  try {
    return reinterpret_cast<Function*>(
        at::DynamicLibrary(library, nullptr, /*leak_handle=*/true).sym(name));
  } catch (const c10::Error&) {
    return nullptr;
  }
}

#if defined(_WIN32)

inline constexpr const char* kCudaDriver = "nvcuda.dll";

/// Prevents unloading of the library that contains `address`.
inline void pin_library(const void* address) {
  HMODULE library = nullptr;
  GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                     static_cast<const char*>(address), &library);
}

inline int process_id() noexcept { return _getpid(); }

inline std::tm to_utc(std::time_t time) noexcept {
  std::tm utc{};
  gmtime_s(&utc, &time);
  return utc;
}

/// Returns the resident set size of this process in bytes; none if the system does not report it.
inline std::optional<double> resident_memory_bytes() noexcept {
  PROCESS_MEMORY_COUNTERS counters{};
  if (!K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters))) return {};
  return static_cast<double>(counters.WorkingSetSize);
}

#else

inline constexpr const char* kCudaDriver = "libcuda.so.1";

/// Prevents unloading of the library that contains `address`. The executable is never unloaded.
inline void pin_library(const void* address) {
  Dl_info library;
  if (dladdr(address, &library) != 0) {
    dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

inline int process_id() noexcept { return getpid(); }

inline std::tm to_utc(std::time_t time) noexcept {
  std::tm utc{};
  gmtime_r(&time, &utc);
  return utc;
}

/// Returns the resident set size of this process in bytes; none if the system does not report it.
inline std::optional<double> resident_memory_bytes() noexcept {
#if defined(__APPLE__)
  mach_task_basic_info_data_t info{};
  mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
  if (task_info(mach_task_self(), MACH_TASK_BASIC_INFO, reinterpret_cast<task_info_t>(&info),
                &count) != KERN_SUCCESS) {
    return {};
  }
  return static_cast<double>(info.resident_size);
#else
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return {};
  long total_pages = 0;
  long resident_pages = 0;
  const bool is_read = std::fscanf(file, "%ld %ld", &total_pages, &resident_pages) == 2;
  std::fclose(file);
  if (!is_read) return {};
  return static_cast<double>(resident_pages) * static_cast<double>(::sysconf(_SC_PAGESIZE));
#endif
}

#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
