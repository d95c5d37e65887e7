#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// File name of a checkpoint: "checkpoint-000012-step-3400.pt" has sequence number 12. The sequence
/// number orders checkpoints, because steps decrease when a run resumes from an older checkpoint.
struct CheckpointName {
  std::uint64_t sequence = 0;
  std::int64_t step = 0;

  std::string filename() const {
    std::string digits = std::to_string(sequence);
    digits.insert(0, digits.size() < 6 ? 6 - digits.size() : 0, '0');
    return "checkpoint-" + digits + "-step-" + std::to_string(step) + ".pt";
  }
  /// Returns nullopt for the names of other files.
  static std::optional<CheckpointName> parse(const std::string& filename) {
    CheckpointName name;
    const int matches = std::sscanf(filename.c_str(), "checkpoint-%" SCNu64 "-step-%" SCNd64 ".pt",
                                    &name.sequence, &name.step);
    return matches == 2 && name.filename() == filename ? std::optional(name) : std::nullopt;
  }
};

/// Returns the checkpoints in `directory`, latest first.
inline std::vector<CheckpointName> list_checkpoints(const std::filesystem::path& directory) {
  std::vector<CheckpointName> found;
  for (const std::string& filename : list_directory(directory)) {
    if (const auto name = CheckpointName::parse(filename)) found.push_back(*name);
  }
  std::sort(found.begin(), found.end(), [](const CheckpointName& a, const CheckpointName& b) {
    return std::pair(a.sequence, a.step) > std::pair(b.sequence, b.step);
  });
  return found;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
