#include "failure.h"

#include <c10/util/Exception.h>

#include "command_line.h"
#include "ranks.h"
#include "table.h"

namespace bert_ner {

Failure failure_of(const std::exception_ptr& exception) {
  constexpr int kFailure = 1, kUsage = 2;
  const auto first_line = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  try {
    std::rethrow_exception(exception);
  } catch (const RowFailed& row) {
    return {row.status, ""};
  } catch (const RanksFailed& ranks) {
    return ranks.failure;
  } catch (const UsageError& error) {
    return {kUsage, first_line(error.what()) + " (bert_ner --help lists the flags)"};
  } catch (const c10::Error& error) {
    return {kFailure, first_line(error.what_without_backtrace())};
  } catch (const std::exception& error) {
    return {kFailure, first_line(error.what())};
  }
}

bool is_of_all_ranks(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const RanksFailed&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace bert_ner
