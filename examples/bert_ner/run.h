/// \file
/// A whole run in one precision, from files to scores.
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
  double bytes_a_parameter = 0;  ///< Trainer::bytes_a_parameter
  double tokens_per_second = 0;  ///< in training, without padding
  int64_t steps = 0, skipped_steps = 0;
  double loss_scale = 1;  ///< at the end
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunResult, name, seed, autocast, f1, precision, recall,
                                   peak_memory_bytes, bytes_a_parameter, tokens_per_second, steps,
                                   skipped_steps, loss_scale)

/// The signal that has asked the run to end, or 0.
inline volatile std::sig_atomic_t stop_signal = 0;

/// SIGTERM and Ctrl-C let the step under way end; the second one ends the process.
inline void stop_at_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { stop_signal = signal; };
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  for (const int signal : {SIGTERM, SIGINT}) sigaction(signal, &action, nullptr);
}

/// A run under way. Draws from torch's default generators, and tells standard error how it goes.
class Run {
 public:
  /// With --resume goes on from the newest checkpoint that is whole. \throws InputError for files
  /// that cannot be used, and if there is no such checkpoint or it is of another run
  explicit Run(const Options& options)
      : options_(options),
        training_(options.training),
        device_(find_device(options.device)),
        precision_(setting_for(precision_of(training_.precision), device_)),
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

  /// Trains, saves and scores. If stop_signal ends the run, it is saved and not scored.
  /// \throws InputError for files that cannot be written
  RunResult execute() {
    const bool has_page = !options_.report.empty(), is_saved = !options_.save.empty();
    if (has_page) write_file(options_.report, nullptr);  // now, not after hours of training
    if (is_saved) fs::create_directories(fs::path(options_.save) / "checkpoints");
    if (is_saved) write_file(fs::path(options_.save) / "config.json", nullptr);
    const auto title = precision_of(training_.precision).title;
    mezzo::RunReport page("BERT, " + title + " (autocast " + describe(precision_) + ")");
    mezzo::MetricsLogger logger(trainer_.steps + 1);
    logger.add_callback([&](const mezzo::StepMetrics& record) { show(record); });
    logger.add_callback(std::ref(page));
    trainer_.scaler.on_skip([&](const auto& skipped) { say(skipped.message()); });
    say(c10::str(title, ": autocast ", describe(precision_), ", ", data_.train.size(),
                 " sentences to learn, ", data_.valid.size(), " to be scored on"));
    stop_at_signals();
    train(logger);
    if (is_saved) save();
    trainer_.scaler.on_skip(nullptr);
    std::string ended = options_.max_steps > 0 ? "at --max-steps" : "with its schedule";
    if (stop_signal != 0) ended = stop_signal == SIGINT ? "by Ctrl-C" : "by SIGTERM";
    const auto measured = result(stop_signal == 0 ? scored() : Score());
    if (has_page) save_page(page, measured, ended);
    say("ended " + ended);
    return measured;
  }

 private:
  void say(const std::string& line) const {
    if (!options_.quiet) std::cerr << line << std::endl;
  }

  /// Says how the run goes, every few seconds.
  void show(const mezzo::StepMetrics& record) {
    seconds_ += record.seconds;
    tokens_ += record.tokens_per_second.value_or(0) * record.seconds;
    const auto now = std::chrono::steady_clock::now();
    if (now - shown_ < std::chrono::seconds(5) && record.step != last_step()) return;
    shown_ = now;
    say(c10::str("step ", record.step, "/", last_step()) +
        formatted("  loss %.4f  scale %g  %.0f tokens/s", record.loss.value_or(0), record.scale,
                  tokens_ / seconds_));
  }

  int64_t last_step() const {
    const int64_t scheduled = training_.epochs * epoch_steps_;
    return options_.max_steps > 0 ? std::min(options_.max_steps, scheduled) : scheduled;
  }

  BertForTokenClassification load_model() const {
    torch::manual_seed(training_.seed);
    BertForTokenClassification model(files_.config, data_.labels.size(), training_.dropout);
    load_weights(model, options_.model, Head::fresh);
    const auto storage = precision_of(training_.precision).storage;
    model->to(device_, storage == Precision::Storage::plain ? torch::kFloat32 : torch::kBFloat16);
    return model;
  }

  mezzo::CheckpointManager checkpoints() const {
    const auto note = [](const std::string& text) { std::cerr << "note: " << text << std::endl; };
    return mezzo::CheckpointManager(fs::path(options_.save) / "checkpoints", {.on_warning = note});
  }

  /// The whole state of the run. Objects are loaded in this order.
  mezzo::TrainingState state(std::string& record) {
    mezzo::TrainingState state;
    state.add("record", record).add("steps", trainer_.steps).add("model", trainer_.model);
    state.add("optimizer", *trainer_.optimizer).add("schedule", trainer_.schedule);
    if (trainer_.scaler.is_enabled()) state.add("scaler", trainer_.scaler);
    return std::move(state.add_rng_state());
  }

  void load_checkpoint() {
    std::string record;
    mezzo::TrainingState alone;
    alone.add("record", record);
    if (!checkpoints().load_latest(alone, {.ignore_unexpected = true})) {
      throw InputError(options_.save +
                       "/checkpoints: holds no checkpoint; leave --resume out to begin a run");
    }
    const auto saved = json::parse(record);
    for (const auto& [word, value] : record_.items()) {
      if (saved.value(word, json()) == value) continue;
      throw InputError(options_.save + ": the run had other " + word +
                       "; put back what it began with");
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
        order = shuffled(batches_, training_.seed, trainer_.steps / epoch_steps_);
      }
      const auto batch =
          collate(train_, order[batch_of_epoch], tokenizer_.pad, max_length_, device_);
      const auto report = trainer_.step(batch);
      logger.record(report.result, report.loss,
                    {.tokens = batch.tokens, .learning_rate = report.learning_rate});
      const bool is_due = options_.save_every > 0 && trainer_.steps % options_.save_every == 0;
      if (is_due && trainer_.steps < last_step()) {  // the last one is saved after the loop
        save();
        logger.restart_clock();
      }
    }
    logger.flush();
  }

  Score scored() {
    const auto examples = make_examples(data_.valid, tokenizer_, data_.labels, max_length_);
    TagSequences truth;
    for (const auto& sentence : data_.valid) truth.push_back(sentence.tags);
    const auto answers = tag_sentences(trainer_.model, examples, truth.size(), data_.labels,
                                       tokenizer_.pad, precision_);
    const auto score = entity_scores(truth, answers);
    say(formatted("F1 %.3f  P %.3f  R %.3f", score.f1, score.precision, score.recall));
    return score;
  }

  RunResult result(const Score& score) const {
    return {.name = precision_of(training_.precision).title,
            .seed = training_.seed,
            .autocast = describe(precision_),
            .f1 = score.f1,
            .precision = score.precision,
            .recall = score.recall,
            .peak_memory_bytes = peak_memory_bytes(device_),
            .bytes_a_parameter = trainer_.bytes_a_parameter(),
            .tokens_per_second = seconds_ > 0 ? tokens_ / seconds_ : 0.0,
            .steps = trainer_.steps,
            .skipped_steps = trainer_.steps - trainer_.schedule.applied_steps(),
            .loss_scale = trainer_.scaler.get_scale()};
  }

  /// Adds what the curves do not show, and writes the page.
  void save_page(mezzo::RunReport& page, const RunResult& result, const std::string& ended) const {
    if (stop_signal == 0) {
      page.set_score("F1", result.f1);
      page.set_score("precision", result.precision);
      page.set_score("recall", result.recall);
    }
    page.set_hparam("peak memory", std::to_string(result.peak_memory_bytes >> 20) + " MiB");
    page.set_hparam("ended", ended);
    const json training = training_;
    for (const auto& [name, value] : training.items()) page.set_hparam(name, value.dump());
    page.set_hparam("model", options_.model);
    page.set_hparam("device", options_.device);
    page.set_hparam("threads", std::to_string(at::get_num_threads()));
    page.save(options_.report);
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
  json record_;                      ///< what must be the same when the run is resumed, by name
  double seconds_ = 0, tokens_ = 0;  ///< in training
  std::chrono::steady_clock::time_point shown_ = std::chrono::steady_clock::now();
};

}  // namespace bert_ner
