#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace test_support {

/// Returns the message of the c10::Error that `call` throws, without the stack trace; "no error" if it
/// does not throw.
template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace test_support
