#include "training.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "machine.h"

namespace bert_ner {
namespace {

mezzo::optim::WeightStorage weight_storage_of(Precision precision) {
  using mezzo::optim::WeightStorage;
  if (precision == Precision::bf16_split_master) return WeightStorage::split_master;
  if (stores_bfloat16(precision)) return WeightStorage::stochastic;
  return WeightStorage::plain;
}

BertForTokenClassification stored_as(Precision precision, BertForTokenClassification model) {
  if (stores_bfloat16(precision)) model->to(torch::kBFloat16);
  return model;
}

/// Weights are decayed, biases and layer norms are not. In 8 bits embeddings keep float moments: a
/// rare word's would be lost beside a frequent word's.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const BertForTokenClassification& model,
                                                        const TrainingOptions& options) {
  std::vector<torch::Tensor> decayed, embeddings, others;
  for (const auto& item : model->named_parameters()) {
    const bool is_embedding = item.key().find("_embeddings.") != std::string::npos;
    (item.value().dim() < 2 ? others : is_embedding ? embeddings : decayed).push_back(item.value());
  }
  const torch::optim::AdamWOptions adamw(options.learning_rate);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto* const parameters : {&embeddings, &decayed, &others}) {
    auto own = std::make_unique<torch::optim::AdamWOptions>(adamw);
    own->weight_decay(parameters == &others ? 0 : options.weight_decay);
    groups.emplace_back(*parameters, std::move(own));
  }
  if (options.precision == Precision::amp_8bit) {
    return std::make_unique<mezzo::optim::AdamW8bit>(
        groups, adamw,
        mezzo::optim::AdamW8bitOptions{.float_moments = embeddings, .seed = options.seed});
  }
  return std::make_unique<mezzo::optim::AdamW>(
      groups, adamw,
      mezzo::optim::WeightOptions{.weight_storage = weight_storage_of(options.precision),
                                  .seed = options.seed});
}

mezzo::LinearCurve learning_rate_curve(const TrainingOptions& options, int64_t epoch_steps) {
  const int64_t total = options.epochs * epoch_steps;
  const int64_t warmup = std::llround(options.warmup * static_cast<double>(total));
  return {.warmup_steps = warmup,
          .total_steps = total,
          .initial_factor = 1.0 / static_cast<double>(warmup + 1)};  // no step at a rate of 0
}

}  // namespace

int64_t steps_per_epoch(std::size_t batches, int64_t accumulate) {
  return (static_cast<int64_t>(batches) + accumulate - 1) / accumulate;
}

Trainer::Trainer(BertForTokenClassification trained_model, const TrainingOptions& options,
                 mezzo::AutocastSetting precision, int64_t epoch_steps)
    : model(stored_as(options.precision, std::move(trained_model))),
      optimizer(make_optimizer(model, options)),
      schedule(*optimizer, learning_rate_curve(options, epoch_steps)),
      scaler({.enabled = scales_loss(options.precision)}),
      options_(options),
      precision_(std::move(precision)),
      criterion_(torch::nn::CrossEntropyLossOptions().ignore_index(kIgnoredLabel)),
      device_(model->parameters().front().device()) {}

double Trainer::bytes_a_parameter() const {
  double bytes = 0;
  double parameters = 0;
  const auto add = [&](const torch::Tensor& tensor) {
    if (tensor.defined()) bytes += static_cast<double>(tensor.nbytes());
  };
  const auto& states = optimizer->state();
  for (const auto& parameter : model->parameters()) {
    parameters += static_cast<double>(parameter.numel());
    bytes += 2 * static_cast<double>(parameter.nbytes());  // a gradient has the same dtype
    const auto found = states.find(parameter.unsafeGetTensorImpl());
    if (found == states.end()) continue;
    if (auto* state = dynamic_cast<mezzo::optim::AdamWParamState*>(found->second.get())) {
      for (const auto& kept : {state->exp_avg(), state->exp_avg_sq(), state->lower_half()})
        add(kept);
    } else if (auto* own = dynamic_cast<mezzo::optim::AdamW8bitParamState*>(found->second.get())) {
      for (const auto& kept :
           {own->exp_avg(), own->exp_avg_sq(), own->exp_avg_scales(), own->exp_avg_sq_scales()}) {
        add(kept);
      }
    }
  }
  return bytes / parameters;
}

StepReport Trainer::train_step(std::span<const Batch> micro_batches) {
  const auto parts = static_cast<double>(micro_batches.size());  // gradients add up to a mean
  torch::Tensor loss_sum = torch::zeros({}, device_);
  int64_t tokens = 0;
  for (const auto& batch : micro_batches) {
    torch::Tensor loss;
    {
      mezzo::AutocastGuard autocast(precision_);  // forward and loss in low precision
      const auto logits = model(batch.ids, batch.mask);
      loss = criterion_(logits.flatten(0, 1).to(torch::kFloat32), batch.labels.flatten());
    }
    scaler.scale(loss / parts).backward();
    loss_sum += loss.detach();
    tokens += batch.tokens;
  }
  const double learning_rate = optimizer->param_groups().front().options().get_lr();
  // Unscales, clips and steps, unless there is an inf or a NaN.
  auto result = scaler.step(*optimizer, {.max_norm = options_.max_grad_norm});
  scaler.update();
  schedule.step(result);  // a skipped step spends no learning rate
  optimizer->zero_grad();
  return {.loss = loss_sum / parts,
          .tokens = tokens,
          .learning_rate = learning_rate,
          .result = std::move(result)};
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
