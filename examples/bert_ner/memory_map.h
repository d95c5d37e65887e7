/// \file
/// What this process's memory is taken up by, as the kernel and malloc see it.
#pragma once

#include <cstdint>
#include <istream>
#include <string>

namespace bert_ner {

/// Bytes of the resident set.
struct MemoryMap {
  int64_t files = 0;    ///< libraries and mapped files
  int64_t kernels = 0;  ///< code made at run time: oneDNN's, for each shape that it has seen
  int64_t in_use = 0;   ///< given out by malloc, tensors included
  int64_t free = 0;     ///< kept by malloc for later
  int64_t rest = 0;     ///< stacks, and what libraries map for themselves
  int64_t total() const { return files + kernels + in_use + free + rest; }
};

/// Of this process, now.
MemoryMap memory_map();

/// Resident bytes of files, of code made at run time, and of all else (in `rest`), from the text of
/// /proc/PID/smaps.
MemoryMap parse_smaps(std::istream& smaps);

/// One line a cause, in MiB; `tensors` are bytes that `in_use` holds for weights and the
/// optimizer's state, `peak` the most that the process has held.
std::string format_memory_map(const MemoryMap& map, int64_t tensors, int64_t peak);

}  // namespace bert_ner
