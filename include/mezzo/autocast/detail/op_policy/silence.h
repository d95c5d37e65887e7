/// \file
/// Keeps libtorch's warnings off the terminal where mezzo causes them on purpose.
#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/version.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// While it exists, this thread's warnings go nowhere.
class SilencedWarnings {
 public:
  SilencedWarnings() : guard_(&handler_) {}

 private:
  struct Nowhere final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };

  Nowhere handler_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
