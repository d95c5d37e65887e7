/// \file
/// What the machine and its settings mean for the numbers of the table, a sentence each.
#pragma once

#include <mezzo/autocast/autocast_setting.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "options.h"
#include "run.h"

namespace bert_ner {

/// What shapes the numbers besides the training options.
struct MachineFacts {
  int threads = 1;                     ///< of this process
  int cores = 1;                       ///< that it may use
  bool chose_threads = false;          ///< by --threads
  std::string omp_num_threads = {};    ///< OMP_NUM_THREADS; empty where it is not set
  std::string mezzo_autocast = {};     ///< MEZZO_AUTOCAST, in the same way
  mezzo::AutocastSetting amp;          ///< what the amp rows compute in
  mezzo::AutocastSetting recommended;  ///< what this machine computes fast, and why
};

/// Those of this process. \throws InputError where the device is not there
MachineFacts machine_facts(const RunOptions& options);

/// On threads and autocast.
std::vector<std::string> machine_notes(const MachineFacts& facts);

/// A warning where other programs took cores while rows were trained; else nothing.
std::optional<std::string> busy_note(std::span<const RunResult> runs);

}  // namespace bert_ner
