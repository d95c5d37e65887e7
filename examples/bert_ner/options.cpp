#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>

#include "text.h"

namespace bert_ner {
namespace {

struct Name {
  std::string flag, title;
};

using enum Precision;
constexpr std::array kPrecisions = {
    fp32, amp_no_scale, amp, amp_8bit, bf16_split_master, bf16_stochastic, fp16};

const Name& name_of(Precision precision) {
  static const std::array<Name, kPrecisions.size()> names{
      {{"fp32", "fp32"},
       {"amp-no-scale", "amp no scale"},
       {"amp", "amp dynamic scale"},
       {"amp-8bit", "amp + 8-bit moments"},
       {"bf16-split-master", "bf16 + split master"},
       {"bf16-stochastic", "bf16 + stochastic rounding"},
       {"fp16", "fp16 dynamic scale"}}};
  return names.at(static_cast<std::size_t>(precision));
}

std::vector<std::string> precision_flags() {
  std::vector<std::string> flags;
  for (const auto precision : kPrecisions) flags.push_back(flag_of(precision));
  return flags;
}

CLI::Range at_least_1() { return {int64_t{1}, int64_t{1'000'000'000}}; }
CLI::IsMember a_device() { return CLI::IsMember(std::vector<std::string>{"cpu", "cuda"}); }

/// Flags that say where and how a run goes, and may be others with --resume.
void add_run_flags(CLI::App& app, RunOptions& run) {
  app.add_option("--device", run.device, "cpu or cuda")->check(a_device());
  app.add_option("--threads", run.threads, "CPU threads (default: libtorch's choice)")
      ->check(at_least_1());
  app.add_option("--max-steps", run.max_steps, "stop after so many steps; the schedule stays")
      ->check(at_least_1())
      ->take_last();
  app.add_option("--save", run.save, "folder for checkpoints, written at the end");
  app.add_option("--save-every", run.save_every, "steps between checkpoints")
      ->check(at_least_1())
      ->needs("--save");
  app.add_flag("--resume", run.resume, "go on with the run that --save has kept")->needs("--save");
  app.add_option("--json", run.json, "write the results to this file (-: standard output)")
      ->take_last();
  app.add_option("--report", run.report, "write the run as an HTML page");
  app.add_flag("--quiet", run.quiet, "no progress on standard error");
}

/// Flags that decide a run's outcome, the same when it is resumed.
void add_outcome_flags(CLI::App& app, RunOptions& run) {
  auto& data = run.data;
  auto& training = run.training;
  app.add_option("--model", run.model, "Hugging Face BERT folder");
  app.add_option("--data", data.data, "one CoNLL file, split by --held-out and --seed");
  app.add_option("--train", data.train, "or a CoNLL file for each part")->excludes("--data");
  app.add_option("--valid", data.valid, "scored after each epoch")->excludes("--data");
  app.add_option("--held-out", data.held_out, "part of --data that is kept for the scores")
      ->check(CLI::Range(0.0, 1.0))
      ->needs("--data");
  app.add_option_function<std::string>(
         "--precision", [&](const std::string& flag) { training.precision = nlohmann::json(flag); },
         "one run only: " + joined(precision_flags()))
      ->check(CLI::IsMember(precision_flags()))
      ->take_last();
  app.add_option("--seed", training.seed, "of split, order, classifier and dropout")->take_last();
  app.add_option("--seeds", run.seeds, "runs of each row, with this many seeds from --seed on")
      ->check(CLI::Range(1, 1000))
      ->take_last();
  app.add_option("--epochs", training.epochs)->check(at_least_1());
  app.add_option("--batch-size", training.batch_size)->check(at_least_1());
  app.add_option("--accumulate", training.accumulate, "batches a step")->check(at_least_1());
  app.add_option("--learning-rate", training.learning_rate, "at its highest")
      ->check(CLI::Range(0.0, 10.0));
  app.add_option("--warmup", training.warmup, "part of the steps over which the rate rises")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--dropout", training.dropout, "between layers and in attention")
      ->check(CLI::Range(0.0, 0.99));
  app.add_option("--max-grad-norm", training.max_grad_norm, "gradients are clipped to it")
      ->check(CLI::Range(1e-9, 1e9));
  app.add_option("--weight-decay", training.weight_decay)->check(CLI::Range(0.0, 1.0));
}

CLI::App* add_predict(CLI::App& app, PredictOptions& predict) {
  auto* command = app.add_subcommand("predict", "label text with a saved model");
  command->add_option("--saved", predict.saved, "folder that --save wrote")->required();
  auto* text = command->add_option("TEXT", predict.text, "a sentence");
  command->add_option("--file", predict.file, "a file with a sentence on each line")
      ->excludes(text);
  command->add_option("--device", predict.device)->check(a_device());
  command->add_option("--threads", predict.threads)->check(at_least_1());
  return command;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw UsageError(message);
}

/// Checks combinations of flags that CLI11 cannot express.
void check_run(const CLI::App& app, const RunOptions& run) {
  require(!run.model.empty(), "--model: name the folder of a BERT model");
  const bool parts = !run.data.train.empty() && !run.data.valid.empty();
  require(!run.data.data.empty() || parts,
          "--data: name a CoNLL file, or give --train and --valid");
  for (const char* flag : {"--save", "--report"}) {
    require(app.count("--precision") > 0 || app.count(flag) == 0,
            std::string(flag) + ": is for one run; choose it with --precision, such as amp");
  }
  require(app.count("--precision") == 0 || run.seeds == 1,
          "--seeds: compares rows; leave --precision out, or give one --seed");
}

}  // namespace

std::span<const Precision> all_precisions() { return kPrecisions; }

const std::string& flag_of(Precision precision) { return name_of(precision).flag; }
const std::string& title_of(Precision precision) { return name_of(precision).title; }

bool scales_loss(Precision precision) { return precision == amp || precision == fp16; }

bool stores_bfloat16(Precision precision) {
  return bf16_split_master <= precision && precision <= bf16_stochastic;
}

void to_json(nlohmann::json& json, Precision precision) { json = flag_of(precision); }

void from_json(const nlohmann::json& json, Precision& precision) {
  const auto flag = json.get<std::string>();
  const auto* const found = std::ranges::find(kPrecisions, flag, flag_of);
  if (found == kPrecisions.end()) {
    throw InputError("the precision \"" + flag + "\" is none of " + joined(precision_flags()));
  }
  precision = *found;
}

Command parse_command_line(const std::vector<std::string>& arguments) {
  Command command;
  CLI::App app(
      "Fine-tunes BERT for named entities in several precisions and prints how they compare;\n"
      "with --precision, in one.",
      "bert_ner");
  app.option_defaults()->always_capture_default();
  app.get_formatter()->column_width(34);
  auto& run = command.run;
  add_outcome_flags(*app.add_option_group("what decides the outcome"), run);
  add_run_flags(app, run);
  const auto* predict = add_predict(app, command.predict);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // as CLI11 wants it
  } catch (const CLI::CallForHelp&) {
    command.help = (predict->parsed() ? predict : &app)->help();
    return command;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (predict->parsed()) {
    require(command.predict.text.empty() != command.predict.file.empty(),
            "predict: give a sentence, or a file of them with --file");
    command.kind = Command::Kind::predict;
    return command;
  }
  check_run(app, run);
  command.kind = app.count("--precision") > 0 ? Command::Kind::run : Command::Kind::table;
  return command;
}

}  // namespace bert_ner
