/// \file
/// What --save writes: a model folder in Hugging Face's form, and in its folder `checkpoints` files
/// of mezzo::CheckpointManager with everything that a run needs to go on bit for bit.
#pragma once

#include <mezzo/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "model_files.h"
#include "options.h"
#include "ranks.h"
#include "training.h"

namespace bert_ner {

/// What a checkpoint holds besides the trainer.
struct RunRecord {
  std::string model;  ///< the folder that the run began with, as an absolute path
  DataOptions data;   ///< with absolute paths
  TrainingOptions training;
  std::string device;             ///< cpu or cuda
  std::string autocast;           ///< "bfloat16", "float16" or "off"
  std::string data_fingerprint;   ///< of all sentences
  std::string model_fingerprint;  ///< of the model folder's small files
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunRecord, model, data, training, device, autocast,
                                   data_fingerprint, model_fingerprint)

/// A run as far as it can be known before its model is made.
struct SavedRun {
  RunRecord record;
  TrainingPosition position;
};

/// Reads the newest checkpoint of `dir` that is whole.
/// \throws InputError if `dir` holds none, or none that is whole
SavedRun read_saved_run(const std::filesystem::path& dir);

/// Restores a trainer that was made with the record's options, random states of all ranks included:
/// draw nothing before this. On another number of ranks dropout begins anew. All ranks call it.
/// \throws InputError naming what does not fit; RanksFailed where there are several ranks
void load_checkpoint(const std::filesystem::path& dir, Trainer& trainer, const Ranks& ranks = {});

/// Writes the model folder (rank 0), then the checkpoint. All ranks call it.
/// \returns whether the checkpoint survives a power failure, as far as is known
/// \throws InputError if the system refuses (a full disk), RanksFailed where there are several
///   ranks; the model and the checkpoint are then whole, and of this save or the one before
[[nodiscard]] bool save_checkpoint(const std::filesystem::path& dir, Trainer& trainer,
                                   const ModelFiles& files, const Labels& labels,
                                   const RunRecord& record, const Ranks& ranks = {});

/// Creates the folders if need be and tries them out. \throws InputError if nothing can be written
void prepare_checkpoints(const std::filesystem::path& dir);

}  // namespace bert_ner
