#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the message of the current exception, without libtorch's backtrace.
inline std::string current_exception_message() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown exception";
  }
}

/// Calls `f`, and returns the message of the exception that it threw, or an empty string.
template <class F>
std::string get_error_message(const F& f) {
  try {
    f();
    return {};
  } catch (...) {
    return current_exception_message();
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
