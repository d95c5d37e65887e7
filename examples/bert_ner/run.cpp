#include "run.h"

#include <algorithm>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint.h"
#include "doctor.h"
#include "formatted.h"
#include "input_error.h"
#include "machine.h"
#include "memory_map.h"
#include "model_files.h"
#include "progress.h"
#include "run_inputs.h"
#include "run_page.h"
#include "step_profile.h"
#include "tagging.h"
#include "training.h"

namespace bert_ner {
namespace {

constexpr int64_t kScoringBatchSize = 32;
constexpr int64_t kStepsBeforeProfile = 20;  // the first ones compile kernels and make state

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

/// A run under way.
class Run {
 public:
  Run(const RunOptions& options, const Ranks& ranks);
  RunResult execute();

 private:
  BertForTokenClassification load_model();
  void check_alike() const;
  void introduce(Progress& progress);
  void train(Progress& progress);
  bool after_step(const StepReport& report, Progress& progress);
  void save(Progress& progress);
  void begin_profile();
  void show_profile();
  void score(const std::vector<Sentence>& sentences, const std::vector<Example>& examples);
  RunResult result(const Progress& progress) const;

  const RunOptions& options() const { return origin_.options; }
  /// Waits for the steps that are under way.
  int64_t skipped_steps() const {
    return trainer_.position.steps - trainer_.schedule.applied_steps();
  }
  bool stopped_early() const {
    return options().max_steps > 0 && trainer_.position.steps >= options().max_steps;
  }

  Ranks ranks_;
  RunOrigin origin_;
  RunInputs inputs_;
  std::vector<double> class_weights_;
  std::vector<std::string> passed_over_;  ///< in the model, and not needed
  Trainer trainer_;
  int64_t saved_at_ = -1, scored_at_ = -1;  ///< steps
  CoreTime trained_;                        ///< by the cores that this process has
  std::optional<RunPage> page_;             ///< of the first rank, if it was asked for
  std::optional<StepProfile> profile_;
  int64_t profiled_from_ = 0;  ///< steps
  Score score_;                ///< the last one
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
                           {"sentences", inputs_.data.fingerprint()},
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

void Run::introduce(Progress& progress) {
  const auto& data = inputs_.data;
  progress.say(title_of(options().training.precision) + ": autocast " +
               describe(inputs_.precision) + ", " + std::to_string(data.train.size()) +
               " sentences to learn, " + std::to_string(data.valid.size()) + " to be scored on, " +
               std::to_string(data.labels.size()) + " labels");
  if (!passed_over_.empty()) {
    progress.say("not needed from the model: " + joined(passed_over_));
  }
  const auto to_guess = labels_to_guess(data);
  if (!to_guess.empty()) {
    progress.say("note: no sentence to learn from has " + joined(to_guess));
  }
  const bool is_row = options().json == "-";  // of a table, whose memory is measured
  if (options().quiet || is_row || !ranks_.is_first()) return;
  const auto batch = collate(inputs_.train, inputs_.batches.back(), inputs_.padding(),
                             inputs_.config.max_position_embeddings, inputs_.device);
  for (const auto& warning : doctors_warnings(trainer_, batch)) progress.say("doctor: " + warning);
}

RunResult Run::execute() {
  const int64_t schedule_steps = options().training.epochs * inputs_.epoch_steps;
  const int64_t steps =
      options().max_steps > 0 ? std::min(options().max_steps, schedule_steps) : schedule_steps;
  Progress progress(std::cerr, Progress::style_for_stderr(options().quiet || !ranks_.is_first()),
                    options().training.epochs, steps, trainer_.position.steps, skipped_steps());
  trainer_.scaler.on_skip([&](const auto& skipped) {
    progress.on_skip(skipped);
    if (page_) page_->on_skip(skipped);
  });
  introduce(progress);
  ranks_.together([&] {
    if (!options().save.empty() && ranks_.is_first()) prepare_checkpoints(options().save);
    if (!options().report.empty() && ranks_.is_first()) {
      page_.emplace(options().report,
                    "BERT, " + title_of(options().training.precision) + " (autocast " +
                        describe(inputs_.precision) + ")",
                    *trainer_.model, trainer_.position.steps + 1);
    }
  });
  train(progress);
  if (options().profile && profiled_from_ == 0) {
    std::cerr << "note: nothing to profile: --profile begins after " << kStepsBeforeProfile
              << " steps, and this run has no more" << std::endl;
  }
  if (!options().save.empty() && saved_at_ != trainer_.position.steps) save(progress);
  if (!inputs_.test.empty()) {
    score(inputs_.data.test, inputs_.test);
  } else if (scored_at_ != trainer_.position.steps) {
    score(inputs_.data.valid, inputs_.valid);
  }
  for (const auto& [type, type_score] : scores_by_type_) {
    progress.say("  " + type + ": " + score_text(type_score));
  }
  trainer_.scaler.on_skip(nullptr);
  if (page_) page_->write();
  return result(progress);
}

void Run::train(Progress& progress) {
  const auto& training = options().training;
  while (trainer_.position.epoch < training.epochs && !stopped_early()) {
    const auto epoch = trainer_.position.epoch;
    const auto before = core_time();
    progress.restart_clock();
    trainer_.train_epoch(inputs_.train, shuffled(inputs_.batches, training.seed, epoch),
                         inputs_.padding(), inputs_.config.max_position_embeddings,
                         [&](const StepReport& report) { return after_step(report, progress); });
    trained_ = trained_.plus(core_time().since(before));
    if (profile_) show_profile();
    if (trainer_.position.epoch == epoch) return;  // stopped within the epoch
    score(inputs_.data.valid, inputs_.valid);
    progress.say("epoch " + std::to_string(trainer_.position.epoch) + ": " + score_text(score_));
  }
}

bool Run::after_step(const StepReport& report, Progress& progress) {
  progress.on_step(report, trainer_.position);
  if (page_) page_->on_step(report, options().training.max_grad_norm);
  const bool more_follow = trainer_.position.group < inputs_.epoch_steps && !stopped_early();
  if (options().profile && profiled_from_ == 0 && more_follow &&
      trainer_.position.steps >= kStepsBeforeProfile) {
    begin_profile();
  }
  if (options().save_every > 0 && trainer_.position.steps % options().save_every == 0) {
    save(progress);
    progress.restart_clock();
  }
  return !stopped_early();
}

void Run::begin_profile() {
  profiled_from_ = trainer_.position.steps;
  profile_.emplace();
}

/// On standard error, also of a quiet run: it was asked for.
void Run::show_profile() {
  const auto times = profile_->stop();
  profile_.reset();
  const auto steps = trainer_.position.steps - profiled_from_;
  const auto map = memory_map();  // before the products that are timed below add to it
  const auto peak = peak_memory_bytes(inputs_.device);
  std::cerr << title_of(options().training.precision) << ", " << steps << " steps, "
            << at::get_num_threads() << " threads\n"
            << format_step_times(times, steps)
            << format_memory_map(map, trainer_.bytes_held(), peak) << std::flush;
}

void Run::save(Progress& progress) {
  const RunRecord record{.model = options().model,
                         .data = options().data,
                         .training = options().training,
                         .device = options().device,
                         .autocast = describe(inputs_.precision),
                         .data_fingerprint = inputs_.data.fingerprint(),
                         .model_fingerprint = fingerprint_of(inputs_.files, inputs_.data.labels)};
  const bool is_durable =
      save_checkpoint(options().save, trainer_, inputs_.files, inputs_.data.labels, record, ranks_);
  saved_at_ = trainer_.position.steps;
  progress.say(
      "saved step " + std::to_string(saved_at_) + " in " + options().save +
      (is_durable
           ? ""
           : " (whether it would survive a power failure is unknown: the folder could not be "
             "flushed to the disk)"));
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

RunResult Run::result(const Progress& progress) const {
  const double seconds = progress.seconds();
  return {.name = title_of(options().training.precision),
          .seed = options().training.seed,
          .autocast = describe(inputs_.precision),
          .learning_rate = options().training.learning_rate,
          .f1 = score_.f1,
          .precision = score_.precision,
          .recall = score_.recall,
          .peak_memory_bytes = ranks_.largest(peak_memory_bytes(inputs_.device)),
          .bytes_a_parameter = trainer_.bytes_a_parameter(),
          .tokens_per_second = seconds > 0 ? static_cast<double>(progress.tokens()) / seconds : 0.0,
          .train_seconds = seconds,
          .steps = trainer_.position.steps,
          .skipped_steps = skipped_steps(),
          .loss_scale = trainer_.scaler.get_scale(),
          .waited_part = trained_.waited_part()};
}

}  // namespace

RunOptions options_in_effect(const RunOptions& options) { return origin_of(options).options; }

RunResult run_training(const RunOptions& options, const Ranks& ranks) {
  ranks.together([&] { ranks.check_device(options.device); });
  set_threads(options.threads, ranks.on_this_machine());
  return Run(options, ranks).execute();
}

}  // namespace bert_ner
