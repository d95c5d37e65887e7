#include "training.h"

#include <algorithm>
#include <cmath>

namespace bert_ner {
namespace {

/// Weights are decayed, biases and layer norms are not.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(
    const BertForTokenClassification& model, const TrainingOptions& options) {
  std::vector<torch::Tensor> decayed, others;
  for (const auto& parameter : model->parameters()) {
    (parameter.dim() > 1 ? decayed : others).push_back(parameter);
  }
  const auto group = [&](std::vector<torch::Tensor> parameters, double weight_decay) {
    auto adamw = std::make_unique<mezzo::optim::AdamWOptions>(options.learning_rate);
    adamw->weight_decay(weight_decay);
    return torch::optim::OptimizerParamGroup(std::move(parameters), std::move(adamw));
  };
  return {group(std::move(decayed), options.weight_decay), group(std::move(others), 0.0)};
}

mezzo::LinearCurve learning_rate_curve(const TrainingOptions& options, int64_t epoch_steps) {
  const int64_t total = options.epochs * epoch_steps;
  const int64_t warmup = std::llround(options.warmup * static_cast<double>(total));
  return {.warmup_steps = warmup,
          .total_steps = total,
          .initial_factor = 1.0 / static_cast<double>(warmup + 1)};  // no step at a rate of 0
}

torch::nn::CrossEntropyLoss weighted_loss(const std::vector<double>& class_weights,
                                          torch::Device device) {
  const auto weights = torch::tensor(class_weights, torch::kFloat64).to(device, torch::kFloat32);
  return torch::nn::CrossEntropyLoss(
      torch::nn::CrossEntropyLossOptions().weight(weights).ignore_index(kIgnoredLabel));
}

}  // namespace

int64_t steps_per_epoch(std::size_t batches, int64_t accumulate) {
  return (static_cast<int64_t>(batches) + accumulate - 1) / accumulate;
}

Trainer::Trainer(BertForTokenClassification trained_model, const TrainingOptions& options,
                 mezzo::AutocastSetting precision, const std::vector<double>& class_weights,
                 int64_t epoch_steps)
    : model(std::move(trained_model)),
      optimizer(parameter_groups(model, options), options.learning_rate),
      schedule(optimizer, learning_rate_curve(options, epoch_steps)),
      scaler(mezzo::GradScalerOptions().enabled(options.precision == Precision::amp)),
      options_(options),
      precision_(std::move(precision)),
      criterion_(weighted_loss(class_weights, model->parameters().front().device())),
      device_(model->parameters().front().device()) {}

StepReport Trainer::train_step(std::span<const Batch> micro_batches) {
  torch::Tensor mean_loss = torch::zeros({}, device_);
  int64_t tokens = 0;
  for (const auto& batch : micro_batches) {
    torch::Tensor loss;
    {
      mezzo::AutocastGuard autocast(precision_);  // forward and loss in low precision where it pays
      const auto logits = model(batch.ids, batch.mask);
      loss = criterion_(logits.flatten(0, 1), batch.labels.flatten());
      loss = loss / static_cast<double>(micro_batches.size());  // gradients add up to a mean
    }
    scaler.scale(loss).backward();
    mean_loss += loss.detach();
    tokens += batch.tokens;
  }
  // Unscales, clips and steps, unless there is an inf or a NaN.
  auto result = scaler.step(optimizer, {.max_norm = options_.max_grad_norm});
  scaler.update();
  schedule.step(result);  // a skipped step spends no learning rate
  optimizer.zero_grad();
  return {.loss = mean_loss, .tokens = tokens, .result = std::move(result)};
}

void Trainer::train_epoch(std::span<const Example> examples, const BatchList& batches,
                          Padding padding, int64_t max_length,
                          const std::function<bool(const StepReport&)>& on_step) {
  model->train();
  const auto groups = steps_per_epoch(batches.size(), options_.accumulate);
  while (position.group < groups) {
    const auto begin = static_cast<std::size_t>(position.group * options_.accumulate);
    const auto end =
        std::min(begin + static_cast<std::size_t>(options_.accumulate), batches.size());
    std::vector<Batch> micro_batches;
    for (auto i = begin; i < end; ++i) {
      micro_batches.push_back(collate(examples, batches[i], padding, max_length, device_));
    }
    const auto report = train_step(micro_batches);
    ++position.group;
    ++position.steps;
    if (!on_step(report)) return;
  }
  position.group = 0;
  ++position.epoch;
}

}  // namespace bert_ner
