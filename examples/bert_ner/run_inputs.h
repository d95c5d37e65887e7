/// \file
/// What a run begins with: read and checked before the first step, and unchanged by training.
#pragma once

#include <mezzo/autocast/autocast_setting.h>

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "batches.h"
#include "bert.h"
#include "checkpoint.h"
#include "dataset.h"
#include "model_files.h"
#include "options.h"
#include "wordpiece.h"

namespace bert_ner {

/// Where a run starts from: a model, or a checkpoint of its own.
struct RunOrigin {
  std::filesystem::path folder;   ///< of the model: --model, or --resume
  std::optional<SavedRun> saved;  ///< the run to resume
  RunOptions options;  ///< paths are absolute; a resumed run's own where they decide its outcome
};

/// \throws InputError for a folder that holds no checkpoint to resume
RunOrigin origin_of(const RunOptions& options);

/// Everything that is read from files.
struct RunInputs {
  /// \param gpu which of them, where the run is on CUDA
  /// \throws InputError for files that cannot be used, also for those of another run than the
  /// record's
  explicit RunInputs(const RunOrigin& origin, int gpu = 0);

  torch::Device device;
  mezzo::AutocastSetting precision;
  ModelFiles files;
  BertConfig config;  ///< with the dropout of the options
  WordPiece tokenizer;
  Dataset data;
  std::vector<Example> train, valid, test;  ///< of `data`
  BatchList batches;                        ///< of `train`
  int64_t epoch_steps;

  Padding padding() const;
};

}  // namespace bert_ner
