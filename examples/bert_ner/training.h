/// \file
/// The training loop in mixed precision: the page to copy.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "batches.h"
#include "bert.h"
#include "options.h"

namespace bert_ner {

/// The progress of a run.
struct TrainingPosition {
  int64_t epoch = 0;  ///< epochs that are complete
  int64_t group = 0;  ///< steps of the present epoch that are complete
  int64_t steps = 0;  ///< steps since the start, skipped ones too
};

/// The outcome of one step.
struct StepReport {
  torch::Tensor loss;        ///< mean of the batches' means, on the device, without a gradient
  int64_t tokens = 0;        ///< without padding
  double learning_rate = 0;  ///< of this step
  mezzo::StepResult result;  ///< reading it waits for the device
};

/// A model and everything that changes while it is trained.
class Trainer {
 public:
  /// Casts the model if `options.precision` stores it in bfloat16.
  /// \param steps_per_epoch scales the schedule
  Trainer(BertForTokenClassification model, const TrainingOptions& options,
          mezzo::AutocastSetting precision, int64_t steps_per_epoch);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Trains from `position` to the end of its epoch. \param batches all of the epoch, in order
  /// \param on_step called after each step; returns whether to go on
  void train_epoch(std::span<const Example> examples, const BatchList& batches, Padding padding,
                   int64_t max_length, const std::function<bool(const StepReport&)>& on_step);

  /// Returns the bytes of parameters, gradients and the optimizer's state, for each parameter.
  double bytes_a_parameter() const;

  BertForTokenClassification model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;  ///< AdamW or AdamW8bit
  mezzo::LinearSchedule schedule;
  mezzo::GradScaler scaler;
  TrainingPosition position;

 private:
  StepReport train_step(std::span<const Batch> micro_batches);

  TrainingOptions options_;
  mezzo::AutocastSetting precision_;
  torch::nn::CrossEntropyLoss criterion_;
  torch::Device device_;
};

/// Steps of an epoch: groups of `accumulate` batches, the last one perhaps smaller.
int64_t steps_per_epoch(std::size_t batches, int64_t accumulate);

}  // namespace bert_ner
