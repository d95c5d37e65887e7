/// \file
/// CastTrace: in which dtype each op ran, why, and what the casts cost.
///
///     mezzo::CastTrace trace;      // from here on, this thread's ops are noted
///     step(batch);
///     std::cout << trace;          // a table, the costliest casts first
#pragma once

#include <mezzo/autocast/detail/op_policy/trace_recorder.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The source of an op's category.
enum class CastDecider : std::uint8_t {
  libtorch,  ///< libtorch's list, or the absence of the op from it
  policy,    ///< an OpPolicy in force
};

/// One line of a trace: the sum of equal calls in one scope.
struct CastRecord {
  std::string scope;       ///< names of the RECORD_USER_SCOPEs around the call, joined by '/'
  std::string op;          ///< its full name, with its overload
  c10::DeviceType device;  ///< of the first tensor
  CastDecider decider;     ///< whose list the category is from
  OpCategory category;     ///< fallthrough where autocast is off
  std::vector<at::ScalarType> inputs;  ///< dtypes of the tensors that the caller passed
  at::ScalarType runs_in;  ///< the dtype that the op computes in; Undefined without tensors
  std::int64_t calls;      ///< how many calls this record adds up
  std::int64_t casts;      ///< made, not those that libtorch's cache saved
  std::int64_t bytes;      ///< read and written by the casts
};

/// Notes, while it exists, the ops that the creating thread runs under autocast. Ops that are on a
/// list or in a policy are noted wherever they occur, other ops only where the user called them,
/// not inside another op; views are left out. libtorch's scopes, `RECORD_USER_SCOPE("encoder")`,
/// group the records.
///
/// Listens through at::RecordFunction: a few microseconds an op while it exists, and nothing at
/// all otherwise. Create, read and destroy it in one thread.
class CastTrace {
 public:
  /// Begins to listen.
  /// \throws c10::Error if the thread has a CastTrace already
  CastTrace();

  /// Returns the records so far, most bytes first, then most calls.
  std::vector<CastRecord> records() const;

  /// Returns the bytes that all casts so far read and wrote.
  std::int64_t total_bytes() const;

 private:
  detail::TraceRecorder recorder_;
};

/// Prints the records as a table with a total.
MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const CastTrace& trace);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/autocast/detail/op_policy/cast_trace_impl.h>
#endif
