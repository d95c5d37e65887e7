/// \file
/// The options of a run, as values, and their flags.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "dataset.h"

namespace bert_ner {

/// The rows of the table.
enum class Precision {
  fp32,
  amp_no_scale,       ///< autocast, the loss as it is
  amp,                ///< autocast and a dynamic loss scale
  amp_8bit,           ///< autocast, with moments of 8 bits but for embeddings
  bf16_split_master,  ///< parameters of bfloat16, completed to floats in the optimizer
  bf16_stochastic,    ///< parameters and moments of bfloat16, rounded at random
  fp16                ///< autocast to float16 and a dynamic loss scale
};

/// All precisions, in the table's order.
std::span<const Precision> all_precisions();
/// The value of --precision: "fp32", "amp-no-scale", "bf16-split-master", ...
const std::string& flag_of(Precision precision);
/// The name in the table: "fp32", "amp no scale", "bf16 + split master", ...
const std::string& title_of(Precision precision);
/// Whether the loss is multiplied by a dynamic loss scale.
bool scales_loss(Precision precision);
/// Whether the model's parameters are of bfloat16; autocast is then off.
bool stores_bfloat16(Precision precision);

struct TrainingOptions {
  Precision precision = Precision::amp;
  double learning_rate = 4e-4;
  int64_t epochs = 1;
  int64_t batch_size = 8;
  int64_t accumulate = 1;  ///< batches a step
  double warmup = 0.0;     ///< the part of all steps over which the learning rate rises
  double max_grad_norm = 1.0;
  double weight_decay = 0.01;
  double dropout = 0.0;  ///< in place of the model's own: one epoch leaves nothing to overfit
  uint64_t seed = 1;     ///< of the split, the batches' order, the classifier and dropout
};

/// All options of a run. Those outside of `data` and `training` may change when it is resumed.
struct RunOptions {
  std::string model;
  DataOptions data;
  TrainingOptions training;
  std::string device = "cpu";  ///< cpu or cuda
  int threads = 0;             ///< 0: as set_threads chooses
  int64_t max_steps = 0;       ///< stop early, the schedule unchanged; 0: run to the end
  std::string save;            ///< folder of model and checkpoints
  bool resume = false;         ///< go on with the run that is saved there
  int64_t save_every = 0;      ///< steps; 0: only at the end
  std::string json;            ///< a file for the results
  std::string report;          ///< a file for the run as an HTML page
  int seeds = 1;               ///< runs of each row, with `training.seed` and those after it
  bool quiet = false;          ///< no progress
};

struct PredictOptions {
  std::string saved;  ///< a folder that --save wrote, or a model folder
  std::string text;   ///< one sentence
  std::string file;   ///< or a file with one a line
  std::string device = "cpu";
  int threads = 0;
};

/// A precision as its flag. \throws InputError for an unknown flag
void to_json(nlohmann::json& json, Precision precision);
void from_json(const nlohmann::json& json, Precision& precision);

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TrainingOptions, precision, learning_rate, epochs, batch_size,
                                   accumulate, warmup, max_grad_norm, weight_decay, dropout, seed)

/// What the arguments ask for.
struct Command {
  enum class Kind { help, predict, run, table };
  Kind kind = Kind::help;
  std::string help;  ///< the text that `--help` prints
  PredictOptions predict;
  RunOptions run;  ///< of one precision, or of each row
};

/// A flag that does not exist, lacks its value, is out of range or contradicts another. what() is
/// one line.
struct UsageError : std::runtime_error {
  using runtime_error::runtime_error;
};

/// Parses the arguments (without the program's name). \throws UsageError
Command parse_command_line(const std::vector<std::string>& arguments);

}  // namespace bert_ner
