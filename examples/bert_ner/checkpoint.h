/// \file
/// Checkpoints of a run: the files of mezzo::CheckpointManager in the folder `checkpoints`, from
/// which a run goes on bit for bit.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "training.h"

namespace bert_ner {

/// Restores a trainer and the random state from the newest checkpoint of `dir` that is whole.
/// \param record what must be the same when the run goes on, by name
/// \throws InputError if `dir` holds none that is whole, or for a run of another record
void load_checkpoint(const std::filesystem::path& dir, Trainer& trainer,
                     const nlohmann::json& record);

/// \throws InputError if the system refuses (a full disk); the checkpoint before stays whole
void save_checkpoint(const std::filesystem::path& dir, Trainer& trainer,
                     const nlohmann::json& record);

/// Creates the folders and checks that they can be written to. \throws InputError
void prepare_checkpoints(const std::filesystem::path& dir);

}  // namespace bert_ner
