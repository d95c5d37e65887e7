/// \file
/// A whole run in one precision, from files to scores.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "options.h"
#include "training.h"

namespace bert_ner {

/// The measurements of a run.
struct RunResult {
  std::string name;  ///< "fp32", "amp no scale", "bf16 + split master", ...
  uint64_t seed = 0;
  std::string autocast;      ///< "off", "bfloat16" or "float16"
  double learning_rate = 0;  ///< the schedule's highest
  double f1 = 0, precision = 0, recall = 0;
  int64_t peak_memory_bytes = 0;
  double bytes_a_parameter = 0;  ///< Trainer::bytes_a_parameter
  double tokens_per_second = 0;  ///< in training, without padding
  int64_t steps = 0, skipped_steps = 0;
  double loss_scale = 1;  ///< at the end
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunResult, name, seed, autocast, learning_rate, f1, precision,
                                   recall, peak_memory_bytes, bytes_a_parameter, tokens_per_second,
                                   steps, skipped_steps, loss_scale)

/// Thrown if SIGTERM or Ctrl-C ended the run, after its step, its page and its checkpoint.
struct Interrupted {
  int signal;
};

/// Trains as the options say, or resumes the run in `options.save`, and scores what was held out.
/// Sets the number of threads and draws from torch's default generators. Progress and scores by
/// type go to standard error.
/// \throws InputError for files and values that cannot be used; Interrupted
RunResult run_training(const RunOptions& options);

}  // namespace bert_ner
