/// \file
/// Checkpoints: everything a run needs to go on bit for bit, in a folder that is also a model. It
/// has config.json, vocab.txt, model.safetensors, ... as Hugging Face has them, and beside them
/// training_state.safetensors (moments, scaler, schedule, random state) and training_state.json (a
/// RunRecord).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "atomic_file.h"
#include "checkpoint_folder.h"
#include "labels.h"
#include "model_files.h"
#include "options.h"
#include "ranks.h"
#include "training.h"

namespace bert_ner {

/// What a checkpoint holds besides tensors.
struct RunRecord {
  std::string model;  ///< the folder that the run began with, as an absolute path
  DataOptions data;   ///< with absolute paths
  TrainingOptions training;
  std::string device;    ///< cpu or cuda
  std::string autocast;  ///< "bfloat16", "float16" or "off"
  uint64_t data_fingerprint = 0;
  TrainingPosition position;
  std::map<std::string, uint64_t> files;  ///< fingerprints of the checkpoint's other files, by name
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TrainingPosition, epoch, group, steps)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunRecord, model, data, training, device, autocast,
                                   data_fingerprint, position, files)

/// Random states by the names that a checkpoint has for them: those of torch's generators for the
/// CPU and for `device`, on every rank. All ranks call it together.
using RandomStates = std::map<std::string, torch::Tensor>;
RandomStates random_states(torch::Device device, const Ranks& ranks = {});

/// Seeds the generators of a rank that begins, or goes on from `steps` without a random state of
/// its own, so that each draws other dropout.
void seed_rank(uint64_t seed, int64_t steps, int rank);

/// Writes the model, optimizer, scaler, schedule, random states and `record`, whose position and
/// files are found here, as the checkpoint of `dir`; see replace_checkpoint.
[[nodiscard]] AtomicFile::Durability save_checkpoint(const std::filesystem::path& dir,
                                                     const Trainer& trainer,
                                                     const ModelFiles& files, const Labels& labels,
                                                     const RandomStates& random, RunRecord record);

/// Reads the record of a checkpoint. \throws InputError if `folder` holds a model and no run.
RunRecord read_run_record(const std::filesystem::path& folder);

/// \throws InputError for a file that is not the one that was saved together with `record`: an
/// older one, a damaged one, one that someone changed
void check_files(const std::filesystem::path& folder, const RunRecord& record);

/// Restores everything but the model's weights, which load_weights reads, into a trainer that was
/// made with the record's options. The random state comes last: draw nothing before this. Where
/// there are other ranks than the run had, `seed_rank` takes its place.
/// \throws InputError naming what is missing or does not fit
void load_training_state(const std::filesystem::path& folder, const RunRecord& record,
                         Trainer& trainer, const Ranks& ranks = {});

}  // namespace bert_ner
