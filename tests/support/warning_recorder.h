#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace test_support {

/// Records the warnings of this thread in a scope instead of printing them.
class WarningRecorder : public c10::WarningHandler {
 public:
  explicit WarningRecorder(bool throws = false) : throws_(throws), guard_(this) {}
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
    if (throws_) throw std::runtime_error("the warning handler throws");
  }
  std::vector<std::string> texts;

 private:
  bool throws_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace test_support
