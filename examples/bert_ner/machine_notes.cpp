#include "machine_notes.h"

#include <algorithm>
#include <cstdlib>

#include "formatted.h"
#include "machine.h"

namespace bert_ner {
namespace {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string counted(int count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string note_on_threads(const MachineFacts& facts) {
  const std::string cause = facts.chose_threads ? "--threads"
                            : facts.omp_num_threads.empty()
                                ? "OMP_NUM_THREADS is not set"
                                : "OMP_NUM_THREADS=" + facts.omp_num_threads;
  const auto text = counted(facts.threads, "thread") + " on " + counted(facts.cores, "core") +
                    " (" + cause + "): ";
  if (facts.threads > facts.cores) {
    return text + "threads wait for one another, and the speeds say little; set it to " +
           std::to_string(facts.cores) + " or less.";
  }
  if (facts.threads < facts.cores) {
    return text +
           "speeds are those of a part of this machine; more threads are faster in all rows, "
           "and change a score by rounding.";
  }
  return text +
         "speeds are those of the whole machine; another number of threads adds up in "
         "another order, and changes a score by rounding.";
}

std::string note_on_autocast(const MachineFacts& facts) {
  const std::string dtype = describe(facts.amp);
  if (!facts.amp.enabled) {
    return "MEZZO_AUTOCAST=" + facts.mezzo_autocast +
           ": autocast is off in the amp rows, which compute what fp32 does.";
  }
  const bool is_fast =
      facts.recommended.enabled && dtype_of(facts.recommended) == dtype_of(facts.amp);
  const std::string rows = "The amp rows compute in " + dtype;
  const std::string cause = facts.mezzo_autocast.empty()
                                ? " (MEZZO_AUTOCAST is not set)"
                                : " (MEZZO_AUTOCAST=" + facts.mezzo_autocast + ")";
  if (is_fast) return rows + cause + ", for which this machine has instructions.";
  if (facts.amp.device == torch::kCUDA && facts.recommended.enabled) {
    return rows + cause + "; this machine would also be fast in " + describe(facts.recommended) +
           ".";
  }
  return rows + cause +
         ", which this machine emulates: their speed says nothing of mixed precision, "
         "their scores and memory do. " +
         (facts.recommended.enabled ? facts.amp.reason : facts.recommended.reason) + ".";
}

}  // namespace

MachineFacts machine_facts(const RunOptions& options) {
  const auto device = find_device(options.device);
  return {.threads = at::get_num_threads(),
          .cores = cores_of_this_process(),
          .chose_threads = options.threads > 0,
          .omp_num_threads = environment("OMP_NUM_THREADS"),
          .mezzo_autocast = environment("MEZZO_AUTOCAST"),
          .amp = setting_for(Precision::amp, device),
          .recommended = mezzo::recommended(device)};
}

std::vector<std::string> machine_notes(const MachineFacts& facts) {
  return {note_on_threads(facts), note_on_autocast(facts)};
}

std::optional<std::string> busy_note(std::span<const RunResult> runs) {
  constexpr double kNoticeable = 0.05;
  const auto worst = std::ranges::max_element(runs, {}, &RunResult::waited_part);
  if (worst == runs.end() || worst->waited_part < kNoticeable) return std::nullopt;
  return formatted(
      "The machine was busy: threads of \"%s\" waited for a core %.0f%% of the time that they had "
      "work. Speeds are too low, and not by the same factor in all rows; run it again when other "
      "programs are done.",
      worst->name.c_str(), 100 * worst->waited_part);
}

}  // namespace bert_ner
