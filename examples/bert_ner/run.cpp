#include "run.h"

#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/run_report.h>
#include <mezzo/diagnose/telemetry.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <iostream>
#include <optional>
#include <utility>
#include <vector>

#include "batches.h"
#include "checkpoint.h"
#include "entity_scores.h"
#include "machine.h"
#include "model_files.h"
#include "tagging.h"
#include "text.h"

namespace bert_ner {
namespace {

/// Lengths of batches are rounded up to a multiple of this (benchmarks/results/bert_ner.md).
constexpr int64_t kLengthMultiple = 8;

/// A hash that tells whether a text is still the same, on one machine and in one build.
std::string fingerprint(const std::string& text) {
  return std::to_string(std::hash<std::string>()(text));
}

/// Everything that is read from files.
struct RunInputs {
  /// \throws InputError for unusable files
  RunInputs(const RunOptions& options, torch::Device device);

  torch::Device device;
  mezzo::AutocastSetting precision;
  ModelFiles files;
  BertConfig config;  ///< with the dropout of the options
  WordPiece tokenizer;
  Dataset data;
  std::vector<Example> train, valid;  ///< of `data`
  BatchList batches;                  ///< of `train`
  int64_t epoch_steps;

  Padding padding() const { return {tokenizer.pad_id(), kLengthMultiple}; }
};

RunInputs::RunInputs(const RunOptions& options, torch::Device run_device)
    : device(run_device),
      precision(setting_for(options.training.precision, device)),
      files(read_model_files(options.model)),
      config(bert_config_of(files)),
      tokenizer(load_tokenizer(files, config)),
      data(load_dataset(options.data, options.training.seed)) {
  config.dropout = options.training.dropout;
  const auto examples_of = [&](const std::vector<Sentence>& sentences) {
    return make_examples(sentences, tokenizer, data.labels, config.max_position_embeddings);
  };
  train = examples_of(data.train);
  valid = examples_of(data.valid);
  batches = length_sorted_batches(train, options.training.batch_size);
  epoch_steps = steps_per_epoch(batches.size(), options.training.accumulate);
}

/// What must be the same when a run is resumed, by name.
nlohmann::json record_of(const RunOptions& options, const RunInputs& inputs) {
  nlohmann::json record = options.training;
  record["sentences"] = fingerprint(inputs.data.text());
  record["model files"] = fingerprint(text_of(inputs.files, inputs.data.labels));
  record["device (--device)"] = options.device;
  record["autocast (MEZZO_AUTOCAST)"] = describe(inputs.precision);
  return record;
}

std::string score_text(const Score& score) {
  return formatted("F1 %.3f  P %.3f  R %.3f", score.f1, score.precision, score.recall) +
         c10::str("  (", score.support, " entities, ", score.predicted, " found, ", score.correct,
                  " right)");
}

/// Writes a line to standard error every few seconds. A writer for mezzo::Telemetry.
class Progress {
 public:
  Progress(bool quiet, int64_t epochs, int64_t epoch_steps, int64_t steps, int64_t skipped)
      : quiet_(quiet), epochs_(epochs), epoch_steps_(epoch_steps), end_(steps), skipped_(skipped) {}

  void operator()(const mezzo::TelemetryRecord& record) {
    skipped_ += record.skipped ? 1 : 0;
    seconds_ += record.seconds;
    tokens_ += record.tokens_per_second.value_or(0) * record.seconds;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_shown_ < std::chrono::seconds(5) && record.step != end_) return;
    last_shown_ = now;
    say(c10::str("epoch ", (record.step - 1) / epoch_steps_ + 1, "/", epochs_, "  step ",
                 record.step, "/", end_) +
        formatted("  loss %.4f  scale %g  skipped %lld  %.0f tokens/s", record.loss.value_or(0),
                  record.scale, static_cast<long long>(skipped_), tokens_per_second()));
  }

  void say(const std::string& line) const {
    if (!quiet_) std::cerr << line << std::endl;
  }
  double tokens_per_second() const { return seconds_ > 0 ? tokens_ / seconds_ : 0.0; }

 private:
  bool quiet_;
  int64_t epochs_, epoch_steps_, end_, skipped_;
  double seconds_ = 0, tokens_ = 0;
  std::chrono::steady_clock::time_point last_shown_ = std::chrono::steady_clock::now();
};

volatile std::sig_atomic_t stop_signal = 0;

/// SIGTERM and Ctrl-C let the step under way end; the second one ends the process.
void stop_at_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { stop_signal = signal; };
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  for (const int signal : {SIGTERM, SIGINT}) sigaction(signal, &action, nullptr);
}

/// A run under way.
class Run {
 public:
  explicit Run(const RunOptions& options);
  RunResult execute();

 private:
  BertForTokenClassification load_model();
  void introduce() const;
  void train();
  bool after_step(const StepReport& report);
  void save();
  void score();
  void save_page(const RunResult& result, const std::string& ended);
  RunResult result() const;

  /// Waits for the steps that are under way.
  int64_t skipped_steps() const {
    return trainer_.position.steps - trainer_.schedule.applied_steps();
  }
  bool stopped_early() const {
    return stop_signal != 0 ||
           (options_.max_steps > 0 && trainer_.position.steps >= options_.max_steps);
  }

  const RunOptions& options_;
  RunInputs inputs_;
  Trainer trainer_;
  int64_t saved_at_ = -1, scored_at_ = -1;          ///< steps
  std::optional<mezzo::RunReport> page_;            ///< if it was asked for
  std::optional<mezzo::OverflowReport> overflows_;  ///< of the page
  std::string overflow_lines_;
  std::optional<Progress> progress_;
  std::optional<mezzo::Telemetry> telemetry_;  ///< tells progress and page of each step
  Score score_;                                ///< the last one
};

Run::Run(const RunOptions& options)
    : options_(options),
      inputs_(options, find_device(options.device)),
      trainer_(load_model(), options.training, inputs_.precision, inputs_.epoch_steps) {
  if (options.resume) load_checkpoint(options.save, trainer_, record_of(options, inputs_));
}

BertForTokenClassification Run::load_model() {
  torch::manual_seed(options_.training.seed);
  BertForTokenClassification model(inputs_.config,
                                   static_cast<int64_t>(inputs_.data.labels.size()));
  load_weights(model, options_.model, Head::fresh);
  model->to(inputs_.device);
  return model;
}

void Run::introduce() const {
  const auto& data = inputs_.data;
  progress_->say(title_of(options_.training.precision) + ": autocast " +
                 describe(inputs_.precision) + ", " + std::to_string(data.train.size()) +
                 " sentences to learn, " + std::to_string(data.valid.size()) +
                 " to be scored on, " + std::to_string(data.labels.size()) + " labels");
}

RunResult Run::execute() {
  const int64_t schedule_steps = options_.training.epochs * inputs_.epoch_steps;
  const int64_t steps =
      options_.max_steps > 0 ? std::min(options_.max_steps, schedule_steps) : schedule_steps;
  progress_.emplace(options_.quiet, options_.training.epochs, inputs_.epoch_steps, steps,
                    skipped_steps());
  telemetry_.emplace(trainer_.position.steps + 1);
  telemetry_->write_to(std::ref(*progress_));
  trainer_.scaler.on_skip([&](const mezzo::SkippedStep& skipped) {
    progress_->say(skipped.message());
    if (overflows_) (*overflows_)(skipped);
  });
  introduce();
  if (!options_.save.empty()) prepare_checkpoints(options_.save);
  if (!options_.report.empty()) {
    check_writable(options_.report);
    page_.emplace("BERT, " + title_of(options_.training.precision) + " (autocast " +
                  describe(inputs_.precision) + ")");
    telemetry_->write_to(std::ref(*page_));
    overflows_.emplace(*trainer_.model,
                       mezzo::OverflowReportOptions{.stream = nullptr,
                                                    .callback = [&](const mezzo::Overflow& found) {
                                                      overflow_lines_ += found.cause() + "\n";
                                                    }});
  }
  stop_at_signals();
  train();
  telemetry_->flush();
  if (!options_.save.empty() && saved_at_ != trainer_.position.steps) save();
  trainer_.scaler.on_skip(nullptr);
  if (const int signal = stop_signal; signal != 0) {
    const std::string cause = signal == SIGINT ? "Ctrl-C" : "SIGTERM";
    save_page(result(), "stopped by " + cause);
    progress_->say("stopped by " + cause + " after step " +
                   std::to_string(trainer_.position.steps));
    throw Interrupted{signal};
  }
  if (scored_at_ != trainer_.position.steps) score();
  const auto measured = result();
  save_page(measured, options_.max_steps > 0 ? "at --max-steps" : "with its schedule");
  return measured;
}

void Run::train() {
  const auto& training = options_.training;
  while (trainer_.position.epoch < training.epochs && !stopped_early()) {
    const auto epoch = trainer_.position.epoch;
    telemetry_->restart_clock();
    trainer_.train_epoch(inputs_.train, shuffled(inputs_.batches, training.seed, epoch),
                         inputs_.padding(), inputs_.config.max_position_embeddings,
                         [&](const StepReport& report) { return after_step(report); });
    if (trainer_.position.epoch == epoch) return;  // stopped within the epoch
    score();
    progress_->say("epoch " + std::to_string(trainer_.position.epoch) + ": " + score_text(score_));
  }
}

bool Run::after_step(const StepReport& report) {
  telemetry_->record(report.result, report.loss,
                     {.tokens = report.tokens, .learning_rate = report.learning_rate});
  if (options_.save_every > 0 && trainer_.position.steps % options_.save_every == 0) {
    save();
    telemetry_->restart_clock();
  }
  return !stopped_early();
}

/// Adds what the curves do not show, and writes the page.
void Run::save_page(const RunResult& result, const std::string& ended) {
  if (!page_) return;
  auto& report = *page_;
  if (scored_at_ >= 0) {
    report.score("F1", result.f1);
    report.score("precision", result.precision);
    report.score("recall", result.recall);
  }
  report.option("peak memory", std::to_string(result.peak_memory_bytes >> 20) + " MiB");
  report.option("ended", ended);
  const nlohmann::json training = options_.training;
  for (const auto& [name, value] : training.items()) report.option(name, value.dump());
  report.option("model", options_.model);
  report.option("device", options_.device);
  report.option("threads", std::to_string(at::get_num_threads()));
  if (!overflow_lines_.empty()) report.add("Overflows", overflow_lines_);
  report.save(options_.report);
}

void Run::save() {
  write_model_folder(options_.save, inputs_.files, trainer_.model, inputs_.data.labels);
  save_checkpoint(options_.save, trainer_, record_of(options_, inputs_));
  saved_at_ = trainer_.position.steps;
  progress_->say("saved step " + std::to_string(saved_at_) + " in " + options_.save);
}

void Run::score() {
  const auto& sentences = inputs_.data.valid;
  const auto answers =
      tag_sentences(trainer_.model, inputs_.valid, sentences.size(), inputs_.data.labels,
                    inputs_.padding(), inputs_.config.max_position_embeddings, inputs_.precision);
  TagSequences truth;
  for (const auto& sentence : sentences) truth.push_back(sentence.tags);
  score_ = entity_scores(truth, answers);
  scored_at_ = trainer_.position.steps;
}

RunResult Run::result() const {
  return {.name = title_of(options_.training.precision),
          .seed = options_.training.seed,
          .autocast = describe(inputs_.precision),
          .learning_rate = options_.training.learning_rate,
          .f1 = score_.f1,
          .precision = score_.precision,
          .recall = score_.recall,
          .peak_memory_bytes = peak_memory_bytes(inputs_.device),
          .bytes_a_parameter = trainer_.bytes_a_parameter(),
          .tokens_per_second = progress_->tokens_per_second(),
          .steps = trainer_.position.steps,
          .skipped_steps = skipped_steps(),
          .loss_scale = trainer_.scaler.get_scale()};
}

}  // namespace

RunResult run_training(const RunOptions& options) {
  set_threads(options.threads);
  return Run(options).execute();
}

}  // namespace bert_ner
