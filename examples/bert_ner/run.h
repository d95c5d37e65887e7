/// \file
/// A whole run in one precision, from files to scores.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "options.h"
#include "ranks.h"
#include "training.h"

namespace bert_ner {

/// What a run measured.
struct RunResult {
  std::string name;  ///< "fp32", "amp no scale", "bf16 + split master", ...
  uint64_t seed = 0;
  std::string autocast;      ///< "off", "bfloat16" or "float16"
  double learning_rate = 0;  ///< the schedule's highest
  double f1 = 0, precision = 0, recall = 0;
  int64_t peak_memory_bytes = 0;  ///< of the rank that had most
  double bytes_a_parameter = 0;   ///< see Trainer
  double tokens_per_second = 0;   ///< of training alone; padding does not count
  double train_seconds = 0;
  int64_t steps = 0, skipped_steps = 0;
  double loss_scale = 1;  ///< at the end
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunResult, name, seed, autocast, learning_rate, f1, precision,
                                   recall, peak_memory_bytes, bytes_a_parameter, tokens_per_second,
                                   train_seconds, steps, skipped_steps, loss_scale)

/// The run was ended by SIGTERM or Ctrl-C, after its step, its page and its checkpoint.
struct Interrupted {
  int signal;
};

/// The options as the run will have them: paths to the model and the data are absolute, and what
/// decides the outcome of a resumed run comes from its checkpoint. \throws InputError
RunOptions options_in_effect(const RunOptions& options);

/// Trains as the options say, or goes on with the run that `options.resume` holds, and scores the
/// test part, or the validation part where there is none. Sets the number of threads and draws from
/// torch's default generators; progress and scores by type go to standard error. All of `ranks`
/// call it together and get the same result; the first of them says how it goes, and saves.
/// \throws InputError for files and values that cannot be used; RanksFailed where one of several
///   ranks finds such; Interrupted
RunResult run_training(const RunOptions& options, const Ranks& ranks = {});

}  // namespace bert_ner
