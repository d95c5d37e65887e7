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

// What is the system's: loaded libraries and their functions, and this process. On Linux, macOS and
// Windows.

/// \def MEZZO_HIDDEN
/// Marks what each library has of its own. Windows exports nothing that is not marked.
#if defined(__GNUC__)
#define MEZZO_HIDDEN __attribute__((visibility("hidden")))
#else
#define MEZZO_HIDDEN
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a function of a library, which stays loaded for the life of the process; null if there
/// is no such library, or it lacks the function.
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

/// Keeps the library that holds `address` loaded after its last unload.
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

/// Returns the bytes of memory that the process holds; none where the system does not say.
inline std::optional<double> resident_memory_bytes() noexcept {
  PROCESS_MEMORY_COUNTERS counters{};
  if (!K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters))) return {};
  return static_cast<double>(counters.WorkingSetSize);
}

#else

inline constexpr const char* kCudaDriver = "libcuda.so.1";

/// Keeps the library that holds `address` loaded after its last dlclose. The program itself cannot
/// be closed.
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

/// Returns the bytes of memory that the process holds; none where the system does not say.
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
  long all = 0;
  long resident = 0;
  const bool is_read = std::fscanf(file, "%ld %ld", &all, &resident) == 2;
  std::fclose(file);
  if (!is_read) return {};
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE));
#endif
}

#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
