/// \file
/// Where the milliseconds of training steps go, by kind of op, beside what their matrix products
/// would take at the best speed of this machine.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace bert_ner {

/// Milliseconds and floating-point operations, added up over all steps.
struct StepTimes {
  /// By kind of op ("matrix products", "casts", ...) and then by phase, which is the name of the
  /// innermost RECORD_USER_SCOPE: "forward", "backward", "optimizer".
  std::map<std::string, std::map<std::string, double>> milliseconds;
  std::map<at::ScalarType, double> operations;  ///< of the matrix products, by their dtype
};

/// Times every op of this thread, from its construction until `stop`. An op's time is its own,
/// without that of the ops that it calls. Backward counts: on the CPU libtorch runs it in the
/// thread that calls it. A GPU's ops return before they are done, and are not measured so.
class StepProfile {
 public:
  StepProfile();
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// Ends the timing. \returns what was measured
  StepTimes stop();

 private:
  struct Recording;
  std::shared_ptr<Recording> recording_;
  at::CallbackHandle callback_;
};

/// "casts", for aten::copy_ between two dtypes, say. `inputs` are the op's.
std::string kind_of_op(std::string_view name, c10::ArrayRef<c10::IValue> inputs);

/// Additions and multiplications of a matrix product; 0 for another op.
double matrix_operations(std::string_view name, c10::ArrayRef<c10::IValue> inputs);

/// Operations a second of a large matrix product in `dtype`, the fastest of several; takes a
/// fraction of a second.
double peak_operations_per_second(at::ScalarType dtype);

/// A table of milliseconds a step: a line for each kind of op, the costliest first, and a column
/// for each phase. Below it what the matrix products would take at this machine's peak, which is
/// measured here.
std::string format_step_times(const StepTimes& times, int64_t steps);

}  // namespace bert_ner
