#include "run.h"

#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/run_report.h>
#include <mezzo/diagnose/telemetry.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <random>
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

constexpr int64_t kScoringBatchSize = 32;

/// Lengths of batches are rounded up to it. Tensor cores want 8; on a CPU oneDNN compiles and keeps
/// kernels for each length: of the README's tweets 10 in place of 54, for 11 % more padding.
constexpr int64_t kLengthMultiple = 8;

/// Where a run starts from: a model, or a checkpoint of its own.
struct RunOrigin {
  std::filesystem::path folder;   ///< of the model: --model, or --resume
  std::optional<SavedRun> saved;  ///< the run to resume
  RunOptions options;  ///< paths are absolute; a resumed run's own where they decide its outcome
};

/// Tells whether a text is still the same, on one machine and for one build.
std::string fingerprint(const std::string& text) {
  return std::to_string(std::hash<std::string>()(text));
}

/// Everything that is read from files.
struct RunInputs {
  /// \param gpu which of them, where the run is on CUDA
  /// \throws InputError for files that cannot be used, also for those of another run than the
  /// record's
  RunInputs(const RunOrigin& origin, int gpu);

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
  std::string data_fingerprint() const { return fingerprint(data.text()); }
  std::string model_fingerprint() const { return fingerprint(text_of(files, data.labels)); }
};

std::string absolute(const std::string& path) {
  return path.empty() ? path : fs::absolute(path).lexically_normal().string();
}

BertConfig config_with_dropout(const ModelFiles& files, const TrainingOptions& training) {
  auto config = bert_config_of(files);
  config.hidden_dropout = config.attention_dropout = training.dropout;
  return config;
}

/// Whether the run can go on here exactly as it would have gone on there.
void check_record(const RunOrigin& origin, const RunInputs& inputs) {
  const auto& [record, position] = *origin.saved;
  const auto autocast = describe(inputs.precision);
  const auto require = [&](bool condition, const std::string& what) {
    if (!condition) throw InputError(origin.folder.string() + ": the run " + what);
  };
  require(record.data_fingerprint == inputs.data_fingerprint() &&
              labels_of(inputs.files) == inputs.data.labels,
          "had other sentences; put back the data it began with");
  require(record.model_fingerprint == inputs.model_fingerprint(),
          "had another config.json, vocab.txt or tokenizer; put back the files that it saved");
  require(position.group <= inputs.epoch_steps &&
              position.steps == position.epoch * inputs.epoch_steps + position.group,
          "cannot have been at this place: its epoch, group and steps do not fit together; resume "
          "from a folder that --save wrote");
  require(record.device == origin.options.device,
          "was on " + record.device + "; pass --device " + record.device);
  require(record.autocast == autocast, "had autocast " + record.autocast + ", here it would be " +
                                           autocast + "; set MEZZO_AUTOCAST as it was");
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

RunInputs::RunInputs(const RunOrigin& origin, int gpu)
    : device(find_device(origin.options.device, gpu)),
      precision(setting_for(origin.options.training.precision, device)),
      files(read_model_files(origin.folder)),
      config(config_with_dropout(files, origin.options.training)),
      tokenizer(load_tokenizer(files, config)),
      data(load_dataset(origin.options.data, origin.options.training.seed)) {
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
  return formatted("F1 %.3f  P %.3f  R %.3f  (%lld entities, %lld found, %lld right)", score.f1,
                   score.precision, score.recall, static_cast<long long>(score.support),
                   static_cast<long long>(score.predicted), static_cast<long long>(score.correct));
}

/// The labels of --data are those of the whole file; by chance, training may see none of one.
std::vector<std::string> labels_to_guess(const Dataset& data) {
  const auto seen = Labels::of(data.train);
  std::vector<std::string> names;
  for (const auto& name : data.labels.names()) {
    if (!seen.id(name)) names.push_back(name);
  }
  return names;
}

/// Seeds the generators of a rank other than the first, so that each draws other dropout.
void seed_rank(uint64_t seed, int rank) {
  constexpr int kHalf = 32;
  std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> kHalf),
                      static_cast<uint32_t>(rank)};
  torch::manual_seed(std::mt19937_64(words)());
}

/// What a person watching a run sees: a line on standard error every few seconds, from what
/// mezzo's Telemetry tells of each step.
class Progress {
 public:
  Progress(bool quiet, int64_t epochs, int64_t epoch_steps, int64_t steps, int64_t skipped)
      : quiet_(quiet), epochs_(epochs), epoch_steps_(epoch_steps), end_(steps), skipped_(skipped) {}

  void operator()(const mezzo::TelemetryRecord& record) {
    ++steps_;
    skipped_ += record.skipped ? 1 : 0;
    seconds_ += record.seconds;
    tokens_ += record.tokens_per_second.value_or(0) * record.seconds;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_shown_ < std::chrono::seconds(5) && record.step != end_) return;
    last_shown_ = now;
    const auto left = std::llround(seconds_ / static_cast<double>(steps_) *
                                   static_cast<double>(end_ - record.step));
    say(c10::str("epoch ", (record.step - 1) / epoch_steps_ + 1, "/", epochs_, "  step ",
                 record.step, "/", end_) +
        formatted("  loss %.4f  scale %g  skipped %lld  %.0f tokens/s  %lld:%02lld left",
                  record.loss.value_or(0), record.scale, static_cast<long long>(skipped_),
                  tokens_per_second(), left / 60, left % 60));
  }

  void say(const std::string& line) const {
    if (!quiet_) std::cerr << line << std::endl;
  }
  double seconds() const { return seconds_; }
  double tokens_per_second() const { return seconds_ > 0 ? tokens_ / seconds_ : 0.0; }

 private:
  bool quiet_;
  int64_t epochs_, epoch_steps_, end_, skipped_, steps_ = 0;
  double seconds_ = 0, tokens_ = 0;
  std::chrono::steady_clock::time_point last_shown_ = std::chrono::steady_clock::now();
};

/// The run as an HTML page: mezzo's RunReport, with the overflows that its OverflowReport finds.
struct RunPage {
  RunPage(const std::string& title, const torch::nn::Module& model)
      : report(title),
        overflows(model, {.stream = nullptr, .callback = [this](const mezzo::Overflow& found) {
                            report.add(found);
                          }}) {}

  mezzo::RunReport report;
  mezzo::OverflowReport overflows;
};

/// While it lives, SIGTERM and Ctrl-C let the step under way end; the second one ends the process.
class SignalWatch {
 public:
  SignalWatch() {
    struct sigaction action {};
    action.sa_handler = [](int signal) { seen_ = signal; };
    action.sa_flags = SA_RESETHAND | SA_RESTART;
    for (const int signal : {SIGTERM, SIGINT}) sigaction(signal, &action, nullptr);
  }
  ~SignalWatch() {
    for (const int signal : {SIGTERM, SIGINT}) std::signal(signal, SIG_DFL);
    seen_ = 0;
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// Its number; 0 if none came.
  static int seen() { return seen_; }

 private:
  inline static volatile std::sig_atomic_t seen_ = 0;
};

/// A run under way.
class Run {
 public:
  Run(const RunOptions& options, const Ranks& ranks);
  RunResult execute();

 private:
  BertForTokenClassification load_model();
  void check_alike() const;
  void introduce() const;
  void train();
  bool after_step(const StepReport& report);
  void save();
  void score(const std::vector<Sentence>& sentences, const std::vector<Example>& examples);
  void describe_on_page(const RunResult& result, const std::string& ended);
  RunResult result() const;

  const RunOptions& options() const { return origin_.options; }
  /// Waits for the steps that are under way.
  int64_t skipped_steps() const {
    return trainer_.position.steps - trainer_.schedule.applied_steps();
  }
  bool stopped_early() const {
    return SignalWatch::seen() != 0 ||
           (options().max_steps > 0 && trainer_.position.steps >= options().max_steps);
  }

  Ranks ranks_;
  RunOrigin origin_;
  RunInputs inputs_;
  std::vector<double> class_weights_;
  std::vector<std::string> passed_over_;  ///< in the model, and not needed
  Trainer trainer_;
  int64_t saved_at_ = -1, scored_at_ = -1;  ///< steps
  std::optional<RunPage> page_;             ///< of the first rank, if it was asked for
  std::optional<Progress> progress_;
  std::optional<mezzo::Telemetry> telemetry_;  ///< tells progress and page of each step
  Score score_;                                ///< the last one
  std::map<std::string, Score> scores_by_type_;
};

/// What `make` returns, on all ranks or on none.
template <class Make>
auto made_together(const Ranks& ranks, Make make) {
  std::optional<decltype(make())> made;
  ranks.together([&] { made.emplace(make()); });
  return *std::move(made);
}

Run::Run(const RunOptions& options, const Ranks& ranks)
    : ranks_(ranks),
      origin_(made_together(ranks, [&] { return origin_of(options); })),
      inputs_(
          made_together(ranks, [&] { return RunInputs(origin_, ranks.place_on_this_machine()); })),
      class_weights_(made_together(
          ranks,
          [&] {
            return parse_class_weights(origin_.options.training.class_weights, inputs_.data.labels);
          })),
      trainer_(load_model(), origin_.options.training, inputs_.precision, class_weights_,
               inputs_.epoch_steps, ranks) {
  if (origin_.saved) load_checkpoint(origin_.folder, trainer_, ranks_);
}

BertForTokenClassification Run::load_model() {
  check_alike();
  return made_together(ranks_, [&] {
    check_sizes(inputs_.config, origin_.folder);
    torch::manual_seed(options().training.seed);
    BertForTokenClassification model(inputs_.config,
                                     static_cast<int64_t>(inputs_.data.labels.size()));
    passed_over_ =
        load_weights(model, origin_.folder, origin_.saved ? Head::from_file : Head::fresh);
    model->to(inputs_.device);
    if (!ranks_.is_first()) seed_rank(options().training.seed, ranks_.rank());
    return model;
  });
}

/// Ranks that were started differently would wait for one another, or train on other sentences.
void Run::check_alike() const {
  const nlohmann::json own{{"training", options().training},
                           {"sentences", inputs_.data_fingerprint()},
                           {"labels", inputs_.data.labels.names()},
                           {"class_weights", class_weights_},
                           {"autocast", describe(inputs_.precision)},
                           {"max_steps", options().max_steps},
                           {"save_every", options().save_every},
                           {"saves", !options().save.empty()},
                           {"resumes", origin_.saved ? origin_.saved->position.steps : -1}};
  const auto texts = ranks_.texts_of_all(own.dump());
  ranks_.together([&] {
    for (const auto& text : texts) {
      const auto other = nlohmann::json::parse(text), first = nlohmann::json::parse(texts.front());
      for (const auto& [key, value] : first.items()) {
        if (value == other.at(key)) continue;
        throw InputError("--distributed: rank " + std::to_string(&text - texts.data()) +
                         " differs from rank 0 in \"" + key +
                         "\"; give all the same flags, files and environment");
      }
    }
  });
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
  const auto to_guess = labels_to_guess(data);
  if (!to_guess.empty()) {
    progress_->say("note: no sentence to learn from has " + joined(to_guess));
  }
}

RunResult Run::execute() {
  const int64_t schedule_steps = options().training.epochs * inputs_.epoch_steps;
  const int64_t steps =
      options().max_steps > 0 ? std::min(options().max_steps, schedule_steps) : schedule_steps;
  progress_.emplace(options().quiet || !ranks_.is_first(), options().training.epochs,
                    inputs_.epoch_steps, steps, skipped_steps());
  telemetry_.emplace(trainer_.position.steps + 1);
  telemetry_->write_to(std::ref(*progress_));
  trainer_.scaler.on_skip([&](const mezzo::SkippedStep& skipped) {
    progress_->say(skipped.message());
    if (page_) page_->overflows(skipped);
  });
  introduce();
  ranks_.together([&] {
    if (!options().save.empty() && ranks_.is_first()) prepare_checkpoints(options().save);
    if (!options().report.empty() && ranks_.is_first()) {
      check_writable(options().report);
      page_.emplace("BERT, " + title_of(options().training.precision) + " (autocast " +
                        describe(inputs_.precision) + ")",
                    *trainer_.model);
      telemetry_->write_to(std::ref(page_->report));
    }
  });
  std::optional<SignalWatch> signals;  // several ranks would end in different steps
  if (!ranks_.is_distributed()) signals.emplace();
  train();
  telemetry_->flush();
  if (!options().save.empty() && saved_at_ != trainer_.position.steps) save();
  trainer_.scaler.on_skip(nullptr);
  if (const int signal = SignalWatch::seen(); signal != 0) {
    const std::string cause = signal == SIGINT ? "Ctrl-C" : "SIGTERM";
    describe_on_page(result(), "stopped by " + cause);
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
  describe_on_page(measured, options().max_steps > 0 ? "at --max-steps" : "with its schedule");
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
                     {.max_norm = options().training.max_grad_norm,
                      .tokens = report.tokens,
                      .learning_rate = report.learning_rate});
  if (options().save_every > 0 && trainer_.position.steps % options().save_every == 0) {
    save();
    telemetry_->restart_clock();
  }
  return !stopped_early();
}

/// What the curves do not show, and puts the page in its place.
void Run::describe_on_page(const RunResult& result, const std::string& ended) {
  if (!page_) return;
  auto& report = page_->report;
  if (scored_at_ >= 0) {
    report.score("F1", result.f1);
    report.score("precision", result.precision);
    report.score("recall", result.recall);
  }
  report.fact("peak memory", formatted("%.0f MiB", static_cast<double>(result.peak_memory_bytes) /
                                                       (1024.0 * 1024.0)));
  report.fact("seed", std::to_string(result.seed));
  report.fact("ended", ended);
  const nlohmann::json training = options().training;
  for (const auto& [name, value] : training.items()) {
    report.option(name, value.is_string() ? value.get<std::string>() : value.dump());
  }
  report.option("model", options().model);
  report.option("data", options().data.data.empty() ? options().data.train : options().data.data);
  report.option("device", options().device);
  report.option("threads", std::to_string(at::get_num_threads()));
  report.option("processes", std::to_string(ranks_.size()));
  write_file(options().report, {report.html()});
}

void Run::save() {
  const RunRecord record{.model = options().model,
                         .data = options().data,
                         .training = options().training,
                         .device = options().device,
                         .autocast = describe(inputs_.precision),
                         .data_fingerprint = inputs_.data_fingerprint(),
                         .model_fingerprint = inputs_.model_fingerprint()};
  const bool is_durable =
      save_checkpoint(options().save, trainer_, inputs_.files, inputs_.data.labels, record, ranks_);
  saved_at_ = trainer_.position.steps;
  progress_->say(
      "saved step " + std::to_string(saved_at_) + " in " + options().save +
      (is_durable ? "" : " (not known to survive a power failure: no flush to the disk)"));
}

void Run::score(const std::vector<Sentence>& sentences, const std::vector<Example>& examples) {
  const auto answers = tag_sentences(
      trainer_.model, examples, sentences.size(), inputs_.data.labels, inputs_.padding(),
      inputs_.config.max_position_embeddings, kScoringBatchSize, inputs_.precision, ranks_);
  const auto truth = tags_of(sentences);
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
          .peak_memory_bytes = ranks_.largest(peak_memory_bytes(inputs_.device)),
          .bytes_a_parameter = trainer_.bytes_a_parameter(),
          .tokens_per_second = progress_->tokens_per_second(),
          .train_seconds = progress_->seconds(),
          .steps = trainer_.position.steps,
          .skipped_steps = skipped_steps(),
          .loss_scale = trainer_.scaler.get_scale()};
}

}  // namespace

RunOptions options_in_effect(const RunOptions& options) { return origin_of(options).options; }

RunResult run_training(const RunOptions& options, const Ranks& ranks) {
  ranks.together([&] { ranks.check_device(options.device); });
  set_threads(options.threads, ranks.on_this_machine());
  return Run(options, ranks).execute();
}

}  // namespace bert_ner
