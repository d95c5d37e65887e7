/// \file
/// Checkpoints of a run: a model folder in Hugging Face's form, and in its folder `checkpoints` the
/// files of mezzo::CheckpointManager, from which a run goes on bit for bit.
#pragma once

#include <mezzo/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "model_files.h"
#include "options.h"
#include "training.h"

namespace bert_ner {

/// Facts about a run, saved beside the trainer.
struct RunRecord {
  std::string model;  ///< the folder that the run began with, as an absolute path
  DataOptions data;   ///< with absolute paths
  TrainingOptions training;
  nlohmann::json identity;  ///< what must be the same when the run goes on
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunRecord, model, data, training, identity)

/// The part of a checkpoint that is read before its model is made.
struct SavedRun {
  RunRecord record;
  TrainingPosition position;
};

/// Reads the newest checkpoint of `dir` that is whole.
/// \throws InputError if `dir` holds none, or none that is whole
SavedRun read_saved_run(const std::filesystem::path& dir);

/// Restores a trainer that was made with the record's options, and the random state.
/// \throws InputError naming what does not fit
void load_checkpoint(const std::filesystem::path& dir, Trainer& trainer);

/// Writes the model folder, then the checkpoint.
/// \throws InputError if the system refuses (a full disk); the model and the checkpoint are then
///   whole, and of this save or the one before
void save_checkpoint(const std::filesystem::path& dir, Trainer& trainer, const ModelFiles& files,
                     const Labels& labels, const RunRecord& record);

/// Creates the folders and checks that they can be written to. \throws InputError
void prepare_checkpoints(const std::filesystem::path& dir);

}  // namespace bert_ner
