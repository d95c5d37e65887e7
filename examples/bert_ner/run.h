/// \file
/// A run in one precision: loading, training, evaluation, checkpoints.
#pragma once

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/run_report.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batches.h"
#include "machine.h"
#include "model_folder.h"
#include "tagging.h"
#include "training.h"

namespace bert_ner {

/// The measurements of a run.
struct RunResult {
  std::string name;  ///< "fp32", "amp no scale", "bf16 + split master", ...
  uint64_t seed = 0;
  std::string autocast;  ///< "off", "bfloat16" or "float16"
  double f1 = 0, precision = 0, recall = 0;
  int64_t peak_memory_bytes = 0;
  double bytes_per_parameter = 0;      ///< see Trainer::bytes_per_parameter
  double tokens_per_second = 0;        ///< during training, without padding
  double first_tokens_per_second = 0;  ///< in steps 2 to kFirstSteps; step 1 compiles kernels
  int64_t steps = 0, skipped_steps = 0;
  double loss_scale = 1;  ///< at the end
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunResult, name, seed, autocast, f1, precision, recall,
                                   peak_memory_bytes, bytes_per_parameter, tokens_per_second,
                                   first_tokens_per_second, steps, skipped_steps, loss_scale)

/// The steps in which the speeds of rows are compared.
inline constexpr int64_t kFirstSteps = 10;

/// The signal that stops the run, or 0.
inline volatile std::sig_atomic_t stop_signal = 0;

/// Tokens per second over several steps.
class Speed {
 public:
  void add(const mezzo::StepMetrics& step) {
    seconds_ += step.step_seconds;
    tokens_ += step.tokens_per_second.value_or(0) * step.step_seconds;
  }
  double value() const { return seconds_ > 0 ? tokens_ / seconds_ : 0.0; }

 private:
  double seconds_ = 0, tokens_ = 0;
};

/// SIGTERM and Ctrl-C stop the run after the current step. A second signal ends the process.
inline void stop_at_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { stop_signal = signal; };
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  for (const int signal : {SIGTERM, SIGINT}) sigaction(signal, &action, nullptr);
}

/// A training run. Uses torch's default generators, and prints progress to standard error.
class Run {
 public:
  /// With --resume, continues from the latest valid checkpoint. \throws InputError for invalid files, and if
  /// there is no checkpoint or it is of a different run
  explicit Run(const Options& options)
      : options_(options),
        training_(options.training),
        device_(find_device(options.device)),
        precision_(make_autocast_options(find_precision(training_.precision), device_)),
        files_(options.model),
        max_length_(files_.config.at("max_position_embeddings")),
        tokenizer_(load_tokenizer(files_)),
        data_(load_dataset(options.data, training_.held_out, training_.seed)),
        train_(make_examples(data_.train, tokenizer_, data_.labels, max_length_)),
        batches_(length_sorted_batches(train_, static_cast<std::size_t>(training_.batch_size))),
        epoch_steps_(static_cast<int64_t>(batches_.size())),
        trainer_(load_model(), training_, precision_, training_.epochs * epoch_steps_) {
    set_labels(files_, data_.labels);
    record_ = training_;
    record_["sentences"] = std::hash<std::string>()(data_.text);
    record_["model files"] = std::hash<std::string>()(json(files_.texts).dump());
    record_["device (--device)"] = options.device;
    record_["autocast (MEZZO_MIXED_PRECISION)"] = describe(precision_);
    if (options.resume) load_checkpoint();
  }

  /// Trains, saves and evaluates. If stop_signal stops the run, it is saved and not evaluated.
  /// \throws InputError for files that cannot be written
  RunResult execute() {
    const bool has_report = !options_.report.empty(), is_saved = !options_.save.empty();
    if (has_report) write_file(options_.report, nullptr);  // fails before the training
    if (is_saved) fs::create_directories(fs::path(options_.save) / "checkpoints");
    if (is_saved) write_file(fs::path(options_.save) / "config.json", nullptr);
    const auto title = find_precision(training_.precision).title;
    mezzo::RunReport report("BERT, " + title + " (autocast " + describe(precision_) + ")");
    mezzo::MetricsLogger logger(trainer_.steps + 1);
    logger.add_callback([&](const mezzo::StepMetrics& record) { print_progress(record); });
    logger.add_callback(std::ref(report));
    trainer_.scaler.on_skip([&](const auto& skipped) { log(skipped.message()); });
    log(c10::str(title, ": autocast ", describe(precision_), ", ", data_.train.size(),
                 " training sentences, ", data_.valid.size(), " validation sentences"));
    stop_at_signals();
    train(logger);
    if (is_saved) save();
    trainer_.scaler.on_skip(nullptr);
    std::string ended = options_.max_steps > 0 ? "at --max-steps" : "with its schedule";
    if (stop_signal != 0) ended = stop_signal == SIGINT ? "by Ctrl-C" : "by SIGTERM";
    const auto measured = make_result(stop_signal == 0 ? evaluate() : Score());
    if (has_report) save_report(report, measured, ended);
    log("ended " + ended);
    return measured;
  }

 private:
  void log(const std::string& line) const {
    if (!options_.quiet) std::cerr << line << std::endl;
  }

  /// Prints progress every few seconds.
  void print_progress(const mezzo::StepMetrics& record) {
    training_speed_.add(record);
    if (record.step > 1 && record.step <= kFirstSteps) first_speed_.add(record);
    const auto now = std::chrono::steady_clock::now();
    if (now - last_printed_ < std::chrono::seconds(5) && record.step != last_step()) return;
    last_printed_ = now;
    log(c10::str("step ", record.step, "/", last_step()) +
        format("  loss %.4f  scale %g  %.0f tokens/s", record.loss.value_or(0), record.scale,
               training_speed_.value()));
  }

  int64_t last_step() const {
    const int64_t scheduled = training_.epochs * epoch_steps_;
    return options_.max_steps > 0 ? std::min(options_.max_steps, scheduled) : scheduled;
  }

  BertForTokenClassification load_model() const {
    torch::manual_seed(training_.seed);
    BertForTokenClassification model(files_.config, data_.labels.size(), training_.dropout);
    load_weights(model, options_.model, Head::initialized);
    const auto storage = find_precision(training_.precision).storage;
    model->to(device_, storage == Precision::Storage::plain ? torch::kFloat32 : torch::kBFloat16);
    return model;
  }

  mezzo::CheckpointManager checkpoints() const {
    const auto note = [](const std::string& text) { std::cerr << "note: " << text << std::endl; };
    return mezzo::CheckpointManager(fs::path(options_.save) / "checkpoints", {.on_warning = note});
  }

  /// The state of the run. Objects are loaded in this order.
  mezzo::TrainingState state(std::string& record) {
    mezzo::TrainingState state;
    state.add("record", record).add("steps", trainer_.steps).add("model", trainer_.model);
    state.add("optimizer", *trainer_.optimizer).add("schedule", trainer_.schedule);
    if (trainer_.scaler.is_enabled()) state.add("scaler", trainer_.scaler);
    return std::move(state.add_rng_state());
  }

  void load_checkpoint() {
    std::string record;
    mezzo::TrainingState record_state;
    record_state.add("record", record);
    if (!checkpoints().load_latest(record_state, {.ignore_unexpected = true})) {
      throw InputError(options_.save +
                       "/checkpoints: has no checkpoint; remove --resume to start a run");
    }
    const auto saved = json::parse(record);
    for (const auto& [name, value] : record_.items()) {
      if (saved.value(name, json()) == value) continue;
      throw InputError(options_.save + ": the saved run had other " + name +
                       "; use the same as in the saved run");
    }
    checkpoints().load_latest(state(record));
  }

  void save() {
    std::string record = record_.dump();
    write_model_folder(options_.save, files_, trainer_.model);
    checkpoints().save(state(record), trainer_.steps);
  }

  void train(mezzo::MetricsLogger& logger) {
    trainer_.model->train();
    logger.restart_clock();
    BatchList order;
    while (trainer_.steps < last_step() && stop_signal == 0) {
      const auto batch_of_epoch = static_cast<std::size_t>(trainer_.steps % epoch_steps_);
      if (order.empty() || batch_of_epoch == 0) {
        order = shuffle_batches(batches_, training_.seed, trainer_.steps / epoch_steps_);
      }
      const auto batch =
          collate(train_, order[batch_of_epoch], tokenizer_.pad, max_length_, device_);
      const auto report = trainer_.step(batch);
      logger.record(report.result, report.loss,
                    {.tokens = batch.tokens, .learning_rate = report.learning_rate});
      const bool is_due = options_.save_every > 0 && trainer_.steps % options_.save_every == 0;
      if (is_due && trainer_.steps < last_step()) {  // the last step is saved after the loop
        save();
        logger.restart_clock();
      }
    }
    logger.flush();
  }

  Score evaluate() {
    const auto examples = make_examples(data_.valid, tokenizer_, data_.labels, max_length_);
    TagSequences truth;
    for (const auto& sentence : data_.valid) truth.push_back(sentence.tags);
    const auto predicted = tag_sentences(trainer_.model, examples, truth.size(), data_.labels,
                                         tokenizer_.pad, precision_);
    const auto score = entity_scores(truth, predicted);
    log(format("F1 %.3f  P %.3f  R %.3f", score.f1, score.precision, score.recall));
    return score;
  }

  RunResult make_result(const Score& score) const {
    return {.name = find_precision(training_.precision).title,
            .seed = training_.seed,
            .autocast = describe(precision_),
            .f1 = score.f1,
            .precision = score.precision,
            .recall = score.recall,
            .peak_memory_bytes = peak_memory_bytes(device_),
            .bytes_per_parameter = trainer_.bytes_per_parameter(),
            .tokens_per_second = training_speed_.value(),
            .first_tokens_per_second = first_speed_.value(),
            .steps = trainer_.steps,
            .skipped_steps = trainer_.steps - trainer_.schedule.applied_steps(),
            .loss_scale = trainer_.scaler.get_scale()};
  }

  /// Adds scores and options to the report, and writes it.
  void save_report(mezzo::RunReport& report, const RunResult& result,
                   const std::string& ended) const {
    if (stop_signal == 0) {
      report.set_score("F1", result.f1);
      report.set_score("precision", result.precision);
      report.set_score("recall", result.recall);
    }
    report.set_hparam("peak memory", std::to_string(result.peak_memory_bytes >> 20) + " MiB");
    report.set_hparam("ended", ended);
    const json training = training_;
    for (const auto& [name, value] : training.items()) report.set_hparam(name, value.dump());
    report.set_hparam("model", options_.model);
    report.set_hparam("device", options_.device);
    report.set_hparam("threads", std::to_string(at::get_num_threads()));
    report.save(options_.report);
  }

  const Options& options_;
  const TrainingOptions& training_;
  torch::Device device_;
  mezzo::AutocastOptions precision_;
  ModelFiles files_;
  int64_t max_length_;
  WordPiece tokenizer_;
  Dataset data_;
  std::vector<Example> train_;
  BatchList batches_;
  int64_t epoch_steps_;
  Trainer trainer_;
  json record_;  ///< what must be equal when the run is resumed
  Speed training_speed_, first_speed_;
  std::chrono::steady_clock::time_point last_printed_ = std::chrono::steady_clock::now();
};

}  // namespace bert_ner
