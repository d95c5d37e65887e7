#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The progress of a run in the archive of an optimizer or a schedule.
struct StepProgress {
  std::optional<int64_t> applied_steps{};  ///< nullopt in an archive without a count
  std::vector<double> base_lrs{};          ///< empty if the `lr` options are the base lrs
};

/// Reads and checks the progress in the archive of `owner` ("an optimizer", "a schedule").
/// \throws c10::Error unless there is one finite base lr for each of `num_groups` groups, or none
inline StepProgress read_progress(torch::serialize::InputArchive& archive, std::size_t num_groups,
                                  const char* owner) {
  StepProgress progress;
  c10::IValue value;
  if (archive.try_read("applied_steps", value)) {
    TORCH_CHECK(value.isInt() && value.toInt() >= 0, "The archive of ", owner, " has ", value,
                " applied steps; it is corrupt: load an earlier one");
    progress.applied_steps = value.toInt();
  }
  if (!archive.try_read("base_lrs", value)) return progress;
  TORCH_CHECK(value.isDoubleList(), "The archive of ", owner, " has base lrs of type ",
              value.tagKind(), "; it is corrupt: load an earlier one");
  progress.base_lrs = value.toDoubleVector();
  const std::vector<double>& lrs = progress.base_lrs;
  TORCH_CHECK(lrs.size() == num_groups, "The archive of ", owner, " has a different number of ",
              "parameter groups, ", lrs.size(), ", than this optimizer, ", num_groups,
              "; make the groups that existed when it was saved");
  TORCH_CHECK(std::ranges::none_of(lrs, [](double lr) { return is_nonfinite(lr); }),
              "The archive of ", owner, " has the base lrs [", c10::Join(", ", lrs),
              "]; it is corrupt: load an earlier one");
  return progress;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
