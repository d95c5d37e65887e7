#include "run.h"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint.h"
#include "dataset.h"
#include "input_error.h"
#include "machine.h"
#include "model_files.h"
#include "progress.h"
#include "tagging.h"
#include "training.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kScoringBatchSize = 32;
constexpr int64_t kTensorCoreMultiple = 8;

std::string absolute(const std::string& path) {
  return path.empty() ? path : fs::absolute(path).lexically_normal().string();
}

/// A resumed run goes on as it began: what decides its outcome comes from its record.
RunOptions with_saved_choices(RunOptions options, const std::optional<RunRecord>& record) {
  if (record) {
    options.data = record->data;
    options.training = record->training;
  } else {
    auto& data = options.data;
    for (auto* path : {&data.data, &data.train, &data.valid, &data.test}) *path = absolute(*path);
  }
  return options;
}

BertConfig config_with_dropout(const ModelFiles& files, const TrainingOptions& training) {
  auto config = bert_config_of(files);
  config.hidden_dropout = config.attention_dropout = training.dropout;
  return config;
}

std::string score_text(const Score& score) {
  std::ostringstream text;
  text.precision(3);
  text << std::fixed << "F1 " << score.f1 << "  P " << score.precision << "  R " << score.recall
       << "  (" << score.support << " entities, " << score.predicted << " found, " << score.correct
       << " right)";
  return text.str();
}

/// A run in the making: its members in the order in which they need each other.
class Run {
 public:
  explicit Run(const RunOptions& options);
  RunResult execute();

 private:
  BertForTokenClassification load_model();
  void check_record() const;
  bool after_step(const StepReport& report, Progress& progress);
  void train(Progress& progress);
  void save(Progress& progress);
  Score score(const std::vector<Sentence>& sentences, const std::vector<Example>& examples);
  void report_types(Progress& progress) const;
  RunResult result(const Score& score, const Progress& progress) const;

  bool stopped_early() const {
    return options_.max_steps > 0 && trainer_.position.steps >= options_.max_steps;
  }
  std::vector<Example> examples_of(const std::vector<Sentence>& sentences) const {
    return make_examples(sentences, tokenizer_, data_.labels, config_.max_position_embeddings);
  }
  Padding padding() const {
    return {tokenizer_.pad_id(), device_.is_cuda() ? kTensorCoreMultiple : 1};
  }

  fs::path folder_;  ///< of the model: --model, or the checkpoint to resume
  std::optional<RunRecord> record_;
  RunOptions options_;
  torch::Device device_;
  mezzo::AutocastSetting precision_;
  ModelFiles files_;
  BertConfig config_;
  WordPiece tokenizer_;
  Dataset data_;
  std::vector<Example> train_, valid_, test_;
  BatchList batches_;
  int64_t epoch_steps_;
  std::vector<std::string> log_;  ///< what is to be said before the first step
  Trainer trainer_;
  int64_t saved_at_ = -1, scored_at_ = -1;  ///< steps
  Score valid_score_;
  std::map<std::string, Score> scores_by_type_;
};

Run::Run(const RunOptions& options)
    : folder_(options.resume.empty() ? fs::path(options.model) : latest_checkpoint(options.resume)),
      record_(options.resume.empty() ? std::nullopt : std::optional(read_run_record(folder_))),
      options_(with_saved_choices(options, record_)),
      device_(find_device(options_.device)),
      precision_(setting_for(options_.training.precision, device_)),
      files_(read_model_files(folder_)),
      config_(config_with_dropout(files_, options_.training)),
      tokenizer_(load_tokenizer(files_, config_)),
      data_(load_dataset(options_.data, options_.training.seed)),
      train_(examples_of(data_.train)),
      valid_(examples_of(data_.valid)),
      test_(examples_of(data_.test)),
      batches_(length_sorted_batches(train_, options_.training.batch_size)),
      epoch_steps_(steps_per_epoch(batches_.size(), options_.training.accumulate)),
      trainer_(load_model(), options_.training, precision_,
               parse_class_weights(options_.training.class_weights, data_.labels), epoch_steps_) {
  if (record_) {
    check_record();
    load_training_state(folder_, *record_, trainer_);
  }
}

BertForTokenClassification Run::load_model() {
  torch::manual_seed(options_.training.seed);
  BertForTokenClassification model(config_, static_cast<int64_t>(data_.labels.size()));
  const auto left_alone = load_weights(model, folder_, record_ ? Head::from_file : Head::fresh);
  if (!left_alone.empty()) {
    std::string names;
    for (const auto& name : left_alone) names += (names.empty() ? "" : ", ") + name;
    log_.push_back("not needed from the model: " + names);
  }
  model->to(device_);
  return model;
}

/// Whether the run can go on here exactly as it would have gone on there.
void Run::check_record() const {
  const std::string origin = folder_.string() + ": the run ";
  if (record_->data_fingerprint != data_.fingerprint() || labels_of(files_) != data_.labels) {
    throw InputError(origin + "had other sentences; put back the data it began with");
  }
  if (record_->device != options_.device) {
    throw InputError(origin + "was on " + record_->device + "; pass --device " + record_->device);
  }
  if (record_->precision != describe(precision_)) {
    throw InputError(origin + "had autocast " + record_->precision + ", here it would be " +
                     describe(precision_) + "; set MEZZO_AUTOCAST as it was");
  }
}

RunResult Run::execute() {
  const auto& training = options_.training;
  const int64_t schedule_steps = training.epochs * epoch_steps_;
  const int64_t steps =
      options_.max_steps > 0 ? std::min(options_.max_steps, schedule_steps) : schedule_steps;
  Progress progress(std::cerr, Progress::style_for_stderr(options_.quiet), training.epochs, steps,
                    trainer_.position.steps);
  trainer_.scaler.on_skip([&](const auto& skipped) { progress.say(skipped.message()); });
  progress.say(title_of(training.precision) + ": autocast " + describe(precision_) + ", " +
               std::to_string(data_.train.size()) + " sentences to learn, " +
               std::to_string(data_.valid.size()) + " to be scored on, " +
               std::to_string(data_.labels.size()) + " labels");
  for (const auto& line : log_) progress.say(line);
  train(progress);
  if (!options_.save.empty() && saved_at_ != trainer_.position.steps) save(progress);
  Score final_score = valid_score_;
  if (!test_.empty()) {
    final_score = score(data_.test, test_);
  } else if (scored_at_ != trainer_.position.steps) {
    final_score = score(data_.valid, valid_);
  }
  report_types(progress);
  trainer_.scaler.on_skip(nullptr);
  return result(final_score, progress);
}

void Run::train(Progress& progress) {
  while (trainer_.position.epoch < options_.training.epochs && !stopped_early()) {
    const auto epoch = trainer_.position.epoch;
    progress.restart_clock();
    trainer_.train_epoch(train_, shuffled(batches_, options_.training.seed, epoch), padding(),
                         config_.max_position_embeddings,
                         [&](const StepReport& report) { return after_step(report, progress); });
    if (trainer_.position.epoch == epoch) return;  // stopped within the epoch
    valid_score_ = score(data_.valid, valid_);
    scored_at_ = trainer_.position.steps;
    progress.say("epoch " + std::to_string(trainer_.position.epoch) + ": " +
                 score_text(valid_score_));
  }
}

bool Run::after_step(const StepReport& report, Progress& progress) {
  progress.on_step(report, trainer_.position);
  if (options_.save_every > 0 && trainer_.position.steps % options_.save_every == 0) {
    save(progress);
    progress.restart_clock();
  }
  return !stopped_early();
}

void Run::save(Progress& progress) {
  const RunRecord record{.data = options_.data,
                         .training = options_.training,
                         .device = options_.device,
                         .precision = describe(precision_),
                         .data_fingerprint = data_.fingerprint(),
                         .position = {}};
  const auto durability = save_checkpoint(options_.save, trainer_, files_, data_.labels, record);
  saved_at_ = trainer_.position.steps;
  progress.say(
      "saved step " + std::to_string(saved_at_) + " in " + options_.save +
      (durability == AtomicFile::Durability::durable
           ? ""
           : " (whether it would survive a power failure is unknown: the folder could not be "
             "flushed to the disk)"));
}

Score Run::score(const std::vector<Sentence>& sentences, const std::vector<Example>& examples) {
  const auto answers =
      tag_sentences(trainer_.model, examples, sentences.size(), data_.labels, padding(),
                    config_.max_position_embeddings, kScoringBatchSize, precision_);
  const auto truth = tags_of(sentences);
  scores_by_type_ = entity_scores_by_type(truth, answers);
  return entity_scores(truth, answers);
}

void Run::report_types(Progress& progress) const {
  for (const auto& [type, type_score] : scores_by_type_) {
    progress.say("  " + type + ": " + score_text(type_score));
  }
}

RunResult Run::result(const Score& score, const Progress& progress) const {
  const double seconds = progress.seconds();
  return {.name = title_of(options_.training.precision),
          .autocast = describe(precision_),
          .learning_rate = options_.training.learning_rate,
          .f1 = score.f1,
          .precision = score.precision,
          .recall = score.recall,
          .peak_memory_bytes = peak_memory_bytes(device_),
          .tokens_per_second = seconds > 0 ? static_cast<double>(progress.tokens()) / seconds : 0.0,
          .train_seconds = seconds,
          .steps = trainer_.position.steps,
          .skipped_steps = trainer_.position.skipped,
          .loss_scale = trainer_.scaler.get_scale()};
}

}  // namespace

void to_json(nlohmann::json& json, const RunResult& result) {
  json = {{"name", result.name},
          {"autocast", result.autocast},
          {"learning_rate", result.learning_rate},
          {"f1", result.f1},
          {"precision", result.precision},
          {"recall", result.recall},
          {"peak_memory_bytes", result.peak_memory_bytes},
          {"tokens_per_second", result.tokens_per_second},
          {"train_seconds", result.train_seconds},
          {"steps", result.steps},
          {"skipped_steps", result.skipped_steps},
          {"loss_scale", result.loss_scale}};
}

void from_json(const nlohmann::json& json, RunResult& result) {
  json.at("name").get_to(result.name);
  json.at("autocast").get_to(result.autocast);
  json.at("learning_rate").get_to(result.learning_rate);
  json.at("f1").get_to(result.f1);
  json.at("precision").get_to(result.precision);
  json.at("recall").get_to(result.recall);
  json.at("peak_memory_bytes").get_to(result.peak_memory_bytes);
  json.at("tokens_per_second").get_to(result.tokens_per_second);
  json.at("train_seconds").get_to(result.train_seconds);
  json.at("steps").get_to(result.steps);
  json.at("skipped_steps").get_to(result.skipped_steps);
  json.at("loss_scale").get_to(result.loss_scale);
}

RunResult run_training(const RunOptions& options) {
  set_threads(options.threads);
  return Run(options).execute();
}

}  // namespace bert_ner
