/// \file
/// The training loop in mixed precision: the page to copy.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "batches.h"
#include "bert.h"
#include "options.h"
#include "ranks.h"

namespace bert_ner {

/// How far a run has come.
struct TrainingPosition {
  int64_t epoch = 0;  ///< epochs that are complete
  int64_t group = 0;  ///< steps of the present epoch that are complete
  int64_t steps = 0;  ///< steps since the start, skipped ones too
};

/// A batch of a step, or this rank's part of it.
struct MicroBatch {
  Batch batch;
  double label_weight;  ///< of the whole batch: its labels' weights in the loss, added up
};

/// What one step did, on all ranks together.
struct StepReport {
  torch::Tensor loss;        ///< mean of the batches' means, on the device, without a gradient
  int64_t tokens = 0;        ///< that were read
  double learning_rate = 0;  ///< that the step had
  mezzo::StepResult result;  ///< whether it ran and with what loss scale, for those who wait
};

/// A model and everything that changes while it is trained. Each of several ranks has one, and they
/// train as one process would: every batch is shared among them.
class Trainer {
 public:
  /// \param model is cast where `options.precision` stores it in bfloat16; \param class_weights one
  /// a label; \param steps_per_epoch scales the schedule; \param ranks all of them make their
  /// Trainers together, with the model's weights of the first
  Trainer(BertForTokenClassification model, const TrainingOptions& options,
          mezzo::AutocastSetting precision, std::vector<double> class_weights,
          int64_t steps_per_epoch, const Ranks& ranks = {});
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Goes on from `position` to the end of its epoch. `batches` are the epoch's, in their order.
  /// \param on_step is called after each step and answers whether to go on.
  void train_epoch(std::span<const Example> examples, const BatchList& batches, Padding padding,
                   int64_t max_length, const std::function<bool(const StepReport&)>& on_step);

  /// Bytes of what lives on between steps (parameters, the optimizer's state, and the copies of
  /// weights that autocast reads) and of a gradient, for one parameter, of all in the mean.
  double bytes_a_parameter() const;

  BertForTokenClassification model;

 private:
  struct AllRanks;
  std::unique_ptr<AllRanks> all_ranks_;  ///< trains the model on all ranks; null for one alone

 public:
  mezzo::optim::AdamW optimizer;
  mezzo::LinearSchedule schedule;
  mezzo::GradScaler scaler;
  TrainingPosition position;

 private:
  StepReport train_step(std::span<const MicroBatch> micro_batches);
  torch::Tensor loss_of(const MicroBatch& micro_batch);

  TrainingOptions options_;
  mezzo::AutocastSetting precision_;
  /// Copies of the weights that autocast reads, written by the optimizer.
  mezzo::WeightCache weights_ = mezzo::install_op_overrides(mezzo::WeightCache());
  Ranks ranks_;
  std::vector<double> class_weights_;
  torch::nn::CrossEntropyLoss criterion_;
  torch::Device device_;
};

/// Steps of an epoch: groups of `accumulate` batches, the last one perhaps smaller.
int64_t steps_per_epoch(std::size_t batches, int64_t accumulate);

}  // namespace bert_ner
