/// \file
/// The mixed-precision training step.
#pragma once

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "batches.h"
#include "bert.h"
#include "options.h"

namespace bert_ner {

/// The learning rate of the classifier relative to that of the pretrained layers: it starts from
/// random weights.
inline constexpr double kClassifierLearningRateFactor = 20;

/// Creates AdamW, with weight decay for weights but not for biases, layer norms and the classifier.
/// With 8-bit moments, embeddings have float32 moments: rows of rare words would underflow in a
/// block with frequent words.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const BertForTokenClassification& model, const TrainingOptions& options) {
  std::vector<torch::Tensor> decayed, embeddings, others, classifier;
  for (const auto& item : model->named_parameters()) {
    const bool is_embedding = item.key().find("_embeddings.") != std::string::npos;
    (item.key().starts_with("classifier.") ? classifier
     : item.value().dim() < 2              ? others
     : is_embedding                        ? embeddings
                                           : decayed)
        .push_back(item.value());
  }
  const torch::optim::AdamWOptions adamw(options.learning_rate);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto* const parameters : {&embeddings, &decayed, &others, &classifier}) {
    auto group_options = std::make_unique<torch::optim::AdamWOptions>(adamw);
    group_options->weight_decay(parameters == &embeddings || parameters == &decayed ? 0.01 : 0);
    if (parameters == &classifier) {
      group_options->lr(options.learning_rate * kClassifierLearningRateFactor);
    }
    groups.emplace_back(*parameters, std::move(group_options));
  }
  const auto& precision = find_precision(options.precision);
  if (precision.has_8bit_moments) {
    return std::make_unique<mezzo::optim::AdamW8bit>(
        groups, adamw,
        mezzo::optim::AdamW8bitStateOptions{.params_with_fp32_state = embeddings,
                                            .seed = options.seed});
  }
  return std::make_unique<mezzo::optim::AdamW>(
      groups, adamw,
      mezzo::optim::WeightStorageOptions{.weight_storage = precision.storage,
                                         .seed = options.seed});
}

/// Returns a linear warmup followed by a linear decay to 0 at step `total`.
inline mezzo::LinearCurve learning_rate_curve(double warmup_part, int64_t total) {
  const int64_t warmup = std::llround(warmup_part * static_cast<double>(total));
  return {.warmup_steps = warmup,
          .total_steps = total,
          .initial_factor =
              1.0 / static_cast<double>(warmup + 1)};  // so that no step has a learning rate of 0
}

/// The outcome of one step.
struct StepReport {
  torch::Tensor loss;        ///< on the device, without a gradient
  double learning_rate = 0;  ///< of this step
  mezzo::StepResult result;  ///< reading it synchronizes with the device
};

/// A model with optimizer, schedule and scaler.
class Trainer {
 public:
  /// \param trained_model in bfloat16 if the precision has 16-bit weights
  /// \param total_steps the length of the schedule
  Trainer(BertForTokenClassification trained_model, const TrainingOptions& options,
          mezzo::AutocastOptions precision, int64_t total_steps)
      : model(std::move(trained_model)),
        optimizer(make_optimizer(model, options)),
        schedule(*optimizer, learning_rate_curve(options.warmup, total_steps)),
        scaler({.enabled = find_precision(options.precision).scales_loss}),
        precision_(std::move(precision)) {}
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  StepReport step(const Batch& batch) {
    torch::Tensor loss;
    {
      mezzo::AutocastGuard autocast(precision_);  // forward and loss in low precision
      const auto logits = model(batch.ids, batch.mask);
      loss = criterion_(logits.flatten(0, 1).to(torch::kFloat32), batch.labels.flatten());
    }
    scaler.scale(loss).backward();
    const double learning_rate = optimizer->param_groups().front().options().get_lr();
    // Unscales, clips and steps; skips the step for inf or NaN.
    auto result = scaler.step(*optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);  // does not advance after a skipped step
    optimizer->zero_grad();
    ++steps;
    return {loss.detach(), learning_rate, std::move(result)};
  }

  /// Returns the bytes of parameters, gradients and optimizer state per parameter.
  double bytes_per_parameter() const {
    double bytes = 0, parameters = 0;
    const auto add = [&](const std::vector<torch::Tensor>& tensors) {
      for (const auto& tensor : tensors) {
        if (tensor.defined()) bytes += static_cast<double>(tensor.nbytes());
      }
    };
    for (const auto& parameter : model->parameters()) {
      parameters += static_cast<double>(parameter.numel());
      add({parameter, parameter});  // a gradient has the same dtype
      const auto found = optimizer->state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer->state().end()) continue;
      if (auto* state = dynamic_cast<mezzo::optim::AdamWParamState*>(found->second.get())) {
        add({state->exp_avg(), state->exp_avg_sq(), state->low_bits()});
      } else if (auto* state8 =
                     dynamic_cast<mezzo::optim::AdamW8bitParamState*>(found->second.get())) {
        add({state8->exp_avg(), state8->exp_avg_sq(), state8->exp_avg_absmax(),
             state8->exp_avg_sq_absmax()});
      }
    }
    return bytes / parameters;
  }

  BertForTokenClassification model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;  ///< AdamW or AdamW8bit
  mezzo::LinearSchedule schedule;
  mezzo::GradScaler scaler;
  int64_t steps = 0;  ///< including skipped steps

 private:
  mezzo::AutocastOptions precision_;
  nn::CrossEntropyLoss criterion_{nn::CrossEntropyLossOptions().ignore_index(kIgnoredLabel)};
};

}  // namespace bert_ner
