#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <sstream>
#include <thread>
#include <type_traits>

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

// Checks of values. Each returns an empty text, or the value and what to write in its place, which
// stands behind the flag's name: "--epochs 0: give a whole number from 1 to 1000000000". They are
// stricter than CLI11's own, which take "nan" for a number and "-3" for an unsigned one.

template <class Number>
CLI::Validator between(Number low, Number high) {
  const auto check = [low, high](const std::string& text) -> std::string {
    Number value{};
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && stop == end && value >= low && value <= high) return {};
    std::ostringstream message;
    message << text << ": give a " << (std::is_integral_v<Number> ? "whole " : "") << "number from "
            << low << " to " << high;
    return message.str();
  };
  return {check, "", "between"};
}

CLI::Validator at_least_1() { return between<int64_t>(1, 1'000'000'000); }

/// Far more threads than cores only wait for each other.
CLI::Validator some_threads() {
  constexpr unsigned kPerCore = 4, kAlwaysFine = 16;
  return between<unsigned>(1,
                           std::max(kAlwaysFine, kPerCore * std::thread::hardware_concurrency()));
}

/// An empty path is a variable that a script forgot to set.
CLI::Validator a_path() {
  const auto check = [](const std::string& text) -> std::string {
    return text.empty() ? "\"\": name a file or a folder" : "";
  };
  return {check, "", "a_path"};
}

CLI::Validator one_of(const std::vector<std::string>& choices) {
  const auto check = [choices](const std::string& text) -> std::string {
    if (std::ranges::find(choices, text) != choices.end()) return {};
    return text + ": choose " + joined(choices);
  };
  return {check, "", "one_of"};
}

CLI::Validator a_device() { return one_of({"cpu", "cuda"}); }

/// Flags that say where and how a run goes, and may be given with --resume.
void add_run_flags(CLI::App& app, RunOptions& run) {
  app.add_option("--device", run.device, "cpu or cuda")->check(a_device());
  app.add_option("--threads", run.threads, "CPU threads (default: libtorch's choice)")
      ->check(some_threads());
  app.add_option("--max-steps", run.max_steps, "stop after so many steps; the schedule stays")
      ->check(at_least_1())
      ->take_last();
  app.add_option("--save", run.save, "folder for checkpoints, written at the end")->check(a_path());
  app.add_option("--save-every", run.save_every, "steps between checkpoints")
      ->check(at_least_1())
      ->needs("--save");
  app.add_option("--resume", run.resume, "go on with the run whose checkpoints are in this folder")
      ->check(a_path());
  app.add_option("--json", run.json, "write the results to this file (-: standard output)")
      ->check(a_path())
      ->take_last();
  app.add_option("--report", run.report, "write the run as an HTML page")->check(a_path());
  app.add_flag("--quiet", run.quiet, "no progress on standard error");
}

/// Flags that decide a run's outcome; a resumed run has them from its checkpoint.
void add_outcome_flags(CLI::App& app, RunOptions& run, Precision& precision) {
  auto& data = run.data;
  auto& training = run.training;
  app.add_option("--model", run.model, "Hugging Face BERT folder")->check(a_path());
  app.add_option("--data", data.data, "one CoNLL file, split by --held-out and --seed")
      ->check(a_path());
  app.add_option("--train", data.train, "or a CoNLL file for each part")
      ->check(a_path())
      ->excludes("--data");
  app.add_option("--valid", data.valid, "scored after each epoch")
      ->check(a_path())
      ->excludes("--data");
  app.add_option("--test", data.test, "scored at the end, in place of the validation part")
      ->check(a_path());
  app.add_option("--held-out", data.held_out, "part of --data that is kept for the scores")
      ->check(between(0.0, 1.0))
      ->needs("--data");
  app.add_option_function<std::string>(
         "--precision",
         [&](const std::string& flag) { precision = nlohmann::json(flag).get<Precision>(); },
         "one run only: " + joined(precision_flags()))
      ->check(one_of(precision_flags()))
      ->take_last();
  app.add_option("--seed", training.seed, "of split, order, classifier and dropout")
      ->check(between<uint64_t>(0, UINT64_MAX))
      ->take_last();
  app.add_option("--seeds", run.seeds, "runs of each row, with this many seeds from --seed on")
      ->check(between(1, 1000))
      ->take_last();
  app.add_option("--epochs", training.epochs)->check(at_least_1());
  app.add_option("--batch-size", training.batch_size)->check(at_least_1());
  app.add_option("--accumulate", training.accumulate, "batches a step")->check(at_least_1());
  app.add_option("--learning-rate", training.learning_rate, "at its highest")
      ->check(between(0.0, 10.0));
  app.add_option("--warmup", training.warmup, "part of the steps over which the rate rises")
      ->check(between(0.0, 1.0));
  app.add_option("--class-weights", training.class_weights,
                 "weights in the loss: B-person=2,O=0.5");
  app.add_option("--dropout", training.dropout, "between layers and in attention")
      ->check(between(0.0, 0.99));
  app.add_option("--max-grad-norm", training.max_grad_norm, "gradients are clipped to it")
      ->check(between(1e-9, 1e9));
  app.add_option("--weight-decay", training.weight_decay)->check(between(0.0, 1.0));
}

CLI::App* add_predict(CLI::App& app, PredictOptions& predict) {
  auto* command = app.add_subcommand("predict", "label text with a saved model");
  command->add_option("--saved", predict.saved, "folder that --save wrote")
      ->check(a_path())
      ->required();
  auto* text = command->add_option("TEXT", predict.text, "a sentence");
  command->add_option("--file", predict.file, "a file with a sentence on each line")
      ->check(a_path())
      ->excludes(text);
  command->add_option("--device", predict.device)->check(a_device());
  command->add_option("--threads", predict.threads)->check(some_threads());
  return command;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw UsageError(message);
}

/// Paths go into JSON files, which are UTF-8.
void check_encoding(const std::vector<std::string>& arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    require(!first_invalid_utf8(arguments[i]),
            "argument " + std::to_string(i + 1) + (i > 0 ? ", after " + arguments[i - 1] : "") +
                ", is not UTF-8; rename the file, or write the text as UTF-8");
  }
}

/// Checks combinations of flags that CLI11 cannot express.
void check_run(const CLI::App& app, const CLI::App& outcome, const RunOptions& run) {
  if (!run.resume.empty()) {
    for (const auto* option : outcome.get_options()) {
      require(option->count() == 0 || option->get_name() == "--help",
              option->get_name() + ": a resumed run keeps what it began with; leave the flag out");
    }
    return;
  }
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

Request parse_command_line(const std::vector<std::string>& arguments) {
  check_encoding(arguments);
  RunOptions run;
  PredictOptions predict;
  CLI::App app(
      "Fine-tunes BERT for named entities in several precisions and prints how they compare;\n"
      "with --precision, in one.",
      "bert_ner");
  app.option_defaults()->always_capture_default();
  app.get_formatter()->column_width(34);
  auto* outcome = app.add_option_group("what decides the outcome");
  add_outcome_flags(*outcome, run, run.training.precision);
  add_run_flags(app, run);
  const auto* predict_command = add_predict(app, predict);
  try {
    auto reversed = arguments;
    std::reverse(reversed.begin(), reversed.end());  // as CLI11 wants it
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    return HelpRequest{(predict_command->parsed() ? predict_command : &app)->help()};
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what(), flag = text.substr(0, text.find(':'));
    if (error.get_name() == "ArgumentMismatch") throw UsageError(flag + ": give a value");
    if (error.get_name() != "ValidationError") throw UsageError(text);
    throw UsageError(flag + text.substr(flag.size() + 1));  // "--flag: value: what to write"
  }
  if (predict_command->parsed()) {
    require(predict.text.empty() != predict.file.empty(),
            "predict: give a sentence, or a file of them with --file");
    return predict;
  }
  check_run(app, *outcome, run);
  if (run.resume.empty() && app.count("--precision") == 0) return TableRequest{run, arguments};
  return run;
}

}  // namespace bert_ner
