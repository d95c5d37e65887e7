#include "run.h"

#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/run_report.h>
#include <mezzo/diagnose/telemetry.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <iostream>
#include <map>
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

namespace fs = std::filesystem;

/// Lengths of batches are rounded up to a multiple of this (benchmarks/results/bert_ner.md).
constexpr int64_t kLengthMultiple = 8;

/// The start of a run: a model, or a checkpoint.
struct RunOrigin {
  std::filesystem::path folder;   ///< of the model: --model, or --resume
  std::optional<SavedRun> saved;  ///< the run to resume
  RunOptions options;  ///< paths are absolute; a resumed run's own where they decide its outcome
};

/// A hash that tells whether a text is still the same, on one machine and in one build.
std::string fingerprint(const std::string& text) {
  return std::to_string(std::hash<std::string>()(text));
}

/// Everything that is read from files.
struct RunInputs {
  /// \throws InputError for unusable files, and for others than those of the run to resume
  RunInputs(const RunOrigin& origin, torch::Device device);

  torch::Device device;
  mezzo::AutocastSetting precision;
  ModelFiles files;
  BertConfig config;  ///< with the dropout of the options
  WordPiece tokenizer;
  Dataset data;
  std::vector<Example> train, valid, test;  ///< of `data`
  BatchList batches;                        ///< of `train`
  int64_t epoch_steps;

  Padding padding() const { return {tokenizer.pad_id(), kLengthMultiple}; }
};

std::string absolute(const std::string& path) {
  return path.empty() ? path : fs::absolute(path).lexically_normal().string();
}

/// The properties that must be equal when a run is resumed, by name.
nlohmann::json identity_of(const RunOptions& options, const RunInputs& inputs) {
  return {{"sentences", fingerprint(inputs.data.text())},
          {"labels", inputs.data.labels.names()},
          {"config.json, vocab.txt or tokenizer",
           fingerprint(text_of(inputs.files, inputs.data.labels))},
          {"device (--device)", options.device},
          {"autocast (MEZZO_AUTOCAST)", describe(inputs.precision)},
          {"options", options.training}};
}

/// The name of the first property that differs; empty if none does.
std::string first_difference(const nlohmann::json& one, const nlohmann::json& other) {
  for (const auto& [word, value] : one.items()) {
    if (other.value(word, nlohmann::json()) != value) return word;
  }
  return {};
}

/// Checks that the run can go on here exactly as it would have gone on there.
void check_record(const RunOrigin& origin, const RunInputs& inputs) {
  const auto& [record, position] = *origin.saved;
  const auto other = first_difference(record.identity, identity_of(origin.options, inputs));
  if (!other.empty()) {
    throw InputError(origin.folder.string() + ": the run had other " + other +
                     "; put back what it began with");
  }
  if (position.group <= inputs.epoch_steps &&
      position.steps == position.epoch * inputs.epoch_steps + position.group) {
    return;
  }
  throw InputError(origin.folder.string() +
                   ": the run's epoch, group and steps do not fit together; resume from a folder "
                   "that --save wrote");
}

RunOrigin origin_of(const RunOptions& options) {
  RunOrigin origin{options.model, std::nullopt, options};
  if (!options.resume.empty()) {
    origin.folder = options.resume;
    origin.saved = read_saved_run(origin.folder);
    origin.options.model = origin.saved->record.model;
    origin.options.data = origin.saved->record.data;
    origin.options.training = origin.saved->record.training;
    return origin;
  }
  auto& data = origin.options.data;
  for (auto* path : {&origin.options.model, &data.data, &data.train, &data.valid, &data.test}) {
    *path = absolute(*path);
  }
  return origin;
}

RunInputs::RunInputs(const RunOrigin& origin, torch::Device run_device)
    : device(run_device),
      precision(setting_for(origin.options.training.precision, device)),
      files(read_model_files(origin.folder)),
      config(bert_config_of(files)),
      tokenizer(load_tokenizer(files, config)),
      data(load_dataset(origin.options.data, origin.options.training.seed)) {
  config.hidden_dropout = config.attention_dropout = origin.options.training.dropout;
  const auto examples_of = [&](const std::vector<Sentence>& sentences) {
    return make_examples(sentences, tokenizer, data.labels, config.max_position_embeddings);
  };
  train = examples_of(data.train);
  valid = examples_of(data.valid);
  test = examples_of(data.test);
  batches = length_sorted_batches(train, origin.options.training.batch_size);
  epoch_steps = steps_per_epoch(batches.size(), origin.options.training.accumulate);
  if (origin.saved) check_record(origin, *this);
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
  void score(const std::vector<Sentence>& sentences, const std::vector<Example>& examples);
  void save_page(const RunResult& result, const std::string& ended);
  RunResult result() const;

  const RunOptions& options() const { return origin_.options; }
  /// Waits for the steps that are under way.
  int64_t skipped_steps() const {
    return trainer_.position.steps - trainer_.schedule.applied_steps();
  }
  bool stopped_early() const {
    return stop_signal != 0 ||
           (options().max_steps > 0 && trainer_.position.steps >= options().max_steps);
  }

  RunOrigin origin_;
  RunInputs inputs_;
  std::vector<double> class_weights_;
  std::vector<std::string> passed_over_;  ///< in the model, and not needed
  Trainer trainer_;
  int64_t saved_at_ = -1, scored_at_ = -1;          ///< steps
  std::optional<mezzo::RunReport> page_;            ///< if it was asked for
  std::optional<mezzo::OverflowReport> overflows_;  ///< of the page
  std::string overflow_lines_;
  std::optional<Progress> progress_;
  std::optional<mezzo::Telemetry> telemetry_;  ///< tells progress and page of each step
  Score score_;                                ///< the last one
  std::map<std::string, Score> scores_by_type_;
};

Run::Run(const RunOptions& options)
    : origin_(origin_of(options)),
      inputs_(origin_, find_device(options.device)),
      class_weights_(
          parse_class_weights(origin_.options.training.class_weights, inputs_.data.labels)),
      trainer_(load_model(), origin_.options.training, inputs_.precision, class_weights_,
               inputs_.epoch_steps) {
  if (origin_.saved) load_checkpoint(origin_.folder, trainer_);
}

BertForTokenClassification Run::load_model() {
  check_sizes(inputs_.config, origin_.folder);
  torch::manual_seed(options().training.seed);
  BertForTokenClassification model(inputs_.config,
                                   static_cast<int64_t>(inputs_.data.labels.size()));
  passed_over_ = load_weights(model, origin_.folder, origin_.saved ? Head::from_file : Head::fresh);
  model->to(inputs_.device);
  return model;
}

void Run::introduce() const {
  const auto& data = inputs_.data;
  progress_->say(title_of(options().training.precision) + ": autocast " +
                 describe(inputs_.precision) + ", " + std::to_string(data.train.size()) +
                 " sentences to learn, " + std::to_string(data.valid.size()) +
                 " to be scored on, " + std::to_string(data.labels.size()) + " labels");
  if (!passed_over_.empty()) {
    progress_->say("not needed from the model: " + joined(passed_over_));
  }
  // The labels of --data are those of the whole file; by chance, training may see none of one.
  const auto seen = Labels::of(data.train);
  for (const auto& name : data.labels.names()) {
    if (!seen.id(name)) progress_->say("note: no sentence to learn from has " + name);
  }
}

RunResult Run::execute() {
  const int64_t schedule_steps = options().training.epochs * inputs_.epoch_steps;
  const int64_t steps =
      options().max_steps > 0 ? std::min(options().max_steps, schedule_steps) : schedule_steps;
  progress_.emplace(options().quiet, options().training.epochs, inputs_.epoch_steps, steps,
                    skipped_steps());
  telemetry_.emplace(trainer_.position.steps + 1);
  telemetry_->write_to(std::ref(*progress_));
  trainer_.scaler.on_skip([&](const mezzo::SkippedStep& skipped) {
    progress_->say(skipped.message());
    if (overflows_) (*overflows_)(skipped);
  });
  introduce();
  if (!options().save.empty()) prepare_checkpoints(options().save);
  if (!options().report.empty()) {
    check_writable(options().report);
    page_.emplace("BERT, " + title_of(options().training.precision) + " (autocast " +
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
  if (!options().save.empty() && saved_at_ != trainer_.position.steps) save();
  trainer_.scaler.on_skip(nullptr);
  if (const int signal = stop_signal; signal != 0) {
    const std::string cause = signal == SIGINT ? "Ctrl-C" : "SIGTERM";
    save_page(result(), "stopped by " + cause);
    progress_->say("stopped by " + cause + " after step " +
                   std::to_string(trainer_.position.steps));
    throw Interrupted{signal};
  }
  if (!inputs_.test.empty()) {
    score(inputs_.data.test, inputs_.test);
  } else if (scored_at_ != trainer_.position.steps) {
    score(inputs_.data.valid, inputs_.valid);
  }
  for (const auto& [type, type_score] : scores_by_type_) {
    progress_->say("  " + type + ": " + score_text(type_score));
  }
  const auto measured = result();
  save_page(measured, options().max_steps > 0 ? "at --max-steps" : "with its schedule");
  return measured;
}

void Run::train() {
  const auto& training = options().training;
  while (trainer_.position.epoch < training.epochs && !stopped_early()) {
    const auto epoch = trainer_.position.epoch;
    telemetry_->restart_clock();
    trainer_.train_epoch(inputs_.train, shuffled(inputs_.batches, training.seed, epoch),
                         inputs_.padding(), inputs_.config.max_position_embeddings,
                         [&](const StepReport& report) { return after_step(report); });
    if (trainer_.position.epoch == epoch) return;  // stopped within the epoch
    score(inputs_.data.valid, inputs_.valid);
    progress_->say("epoch " + std::to_string(trainer_.position.epoch) + ": " + score_text(score_));
  }
}

bool Run::after_step(const StepReport& report) {
  telemetry_->record(report.result, report.loss,
                     {.tokens = report.tokens, .learning_rate = report.learning_rate});
  if (options().save_every > 0 && trainer_.position.steps % options().save_every == 0) {
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
  const nlohmann::json training = options().training;
  for (const auto& [name, value] : training.items()) report.option(name, value.dump());
  report.option("model", options().model);
  report.option("device", options().device);
  report.option("threads", std::to_string(at::get_num_threads()));
  if (!overflow_lines_.empty()) report.add("Overflows", overflow_lines_);
  report.save(options().report);
}

void Run::save() {
  const RunRecord record{.model = options().model,
                         .data = options().data,
                         .training = options().training,
                         .identity = identity_of(options(), inputs_)};
  save_checkpoint(options().save, trainer_, inputs_.files, inputs_.data.labels, record);
  saved_at_ = trainer_.position.steps;
  progress_->say("saved step " + std::to_string(saved_at_) + " in " + options().save);
}

void Run::score(const std::vector<Sentence>& sentences, const std::vector<Example>& examples) {
  const auto answers =
      tag_sentences(trainer_.model, examples, sentences.size(), inputs_.data.labels,
                    inputs_.padding(), inputs_.config.max_position_embeddings, inputs_.precision);
  TagSequences truth;
  for (const auto& sentence : sentences) truth.push_back(sentence.tags);
  score_ = entity_scores(truth, answers);
  scores_by_type_ = entity_scores_by_type(truth, answers);
  scored_at_ = trainer_.position.steps;
}

RunResult Run::result() const {
  return {.name = title_of(options().training.precision),
          .seed = options().training.seed,
          .autocast = describe(inputs_.precision),
          .learning_rate = options().training.learning_rate,
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

RunOptions options_in_effect(const RunOptions& options) { return origin_of(options).options; }

RunResult run_training(const RunOptions& options) {
  set_threads(options.threads);
  return Run(options).execute();
}

}  // namespace bert_ner
