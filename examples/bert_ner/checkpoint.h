/// \file
/// Checkpoints: everything a run needs to go on bit for bit, in a folder that is also a model.
///
///     DIR/latest -> step-000240             a symbolic link, renamed into place: never half a
///     change DIR/step-000240/config.json, vocab.txt, model.safetensors, ...   as Hugging Face has
///     them DIR/step-000240/training_state.json, training_state.safetensors  everything else
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "atomic_file.h"
#include "labels.h"
#include "model_files.h"
#include "options.h"
#include "training.h"

namespace bert_ner {

/// What a checkpoint holds besides tensors.
struct RunRecord {
  DataOptions data;  ///< with absolute paths
  TrainingOptions training;
  std::string device;     ///< cpu or cuda
  std::string precision;  ///< what autocast does: "bfloat16", or "off"
  uint64_t data_fingerprint = 0;
  TrainingPosition position;
};

/// `dir/latest` if there is one, else `dir` itself.
std::filesystem::path latest_checkpoint(const std::filesystem::path& dir);

/// Puts the folder `name`, as `write` fills it, into `dir` and points `latest` to it. What was
/// there before is removed only when the new folder is on the disk and in its place, so that a
/// crash, a kill or a full disk at any moment leaves the previous checkpoint or the new one.
/// \returns `unknown` if all is in place and only the last flush of `dir` failed
/// \throws InputError if the system refuses (a full disk); `dir/latest` is then what it was
[[nodiscard]] AtomicFile::Durability replace_checkpoint(
    const std::filesystem::path& dir, const std::string& name,
    const std::function<void(const std::filesystem::path&)>& write);

/// Writes the model, optimizer, scaler, schedule, random state and `record` into `dir`, as above.
[[nodiscard]] AtomicFile::Durability save_checkpoint(const std::filesystem::path& dir,
                                                     const Trainer& trainer,
                                                     const ModelFiles& files, const Labels& labels,
                                                     RunRecord record);

/// Reads the record of a checkpoint. \throws InputError if `folder` holds a model and no run.
RunRecord read_run_record(const std::filesystem::path& folder);

/// Restores everything but the model's weights, which load_weights reads, into a trainer that was
/// made with the record's options. The random state comes last: draw nothing before this.
/// \throws InputError naming what is missing or does not fit
void load_training_state(const std::filesystem::path& folder, const RunRecord& record,
                         Trainer& trainer);

}  // namespace bert_ner
