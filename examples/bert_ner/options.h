/// \file
/// Precisions (the rows of the table), and command-line options.
#pragma once

#include <mezzo/base/weight_storage.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace bert_ner {

/// A training precision, a row of the table.
struct Precision {
  enum class Autocast { off, on, float16 };  ///< on: MEZZO_MIXED_PRECISION, or the device's default
  using Storage = mezzo::optim::WeightStorage;

  std::string flag;   ///< the value of --precision
  std::string title;  ///< the name in the table
  Autocast autocast = Autocast::off;
  bool scales_loss = false;          ///< with a dynamic loss scale
  bool has_8bit_moments = false;     ///< except for embeddings
  Storage storage = Storage::plain;  ///< plain: float32 parameters; the others: bfloat16
};

/// Returns all rows, in the table's order.
inline const std::vector<Precision>& precisions() {
  using enum Precision::Autocast;
  static const std::vector<Precision> rows{{"fp32", "fp32"},
                                           {"amp-no-scale", "amp no scale", on},
                                           {"amp", "amp dynamic scale", on, true},
                                           {"amp-8bit", "amp + 8-bit moments", on, false, true},
                                           {"bf16-split-master", "bf16 + split master", off, false,
                                            false, Precision::Storage::split_master},
                                           {"bf16-stochastic", "bf16 + stochastic rounding", off,
                                            false, false, Precision::Storage::stochastic_rounding},
                                           {"fp16", "fp16 dynamic scale", float16, true}};
  return rows;
}

inline const Precision& find_precision(const std::string& flag) {
  return *std::ranges::find(precisions(), flag, &Precision::flag);
}

/// Options that determine the result of a run. A resumed run must have the same.
struct TrainingOptions {
  std::string precision = "amp";  ///< a row's flag
  double held_out = 0.2;          ///< fraction of the sentences for validation
  double learning_rate = 5e-4;    ///< maximum, of the pretrained layers
  int64_t epochs = 1;
  int64_t batch_size = 32;
  double warmup = 0.0;   ///< fraction of the steps for learning-rate warmup
  double dropout = 0.0;  ///< instead of the model's: one epoch does not overfit
  uint64_t seed = 1;     ///< of split, batch order, classifier initialization and dropout
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TrainingOptions, precision, held_out, learning_rate, epochs,
                                   batch_size, warmup, dropout, seed)

/// The command line. Options outside `training` may change when a run is resumed.
struct Options {
  enum class Kind { help, predict, run, table };
  Kind kind = Kind::help;
  std::string help;   ///< the text that `--help` prints
  std::string model;  ///< Hugging Face BERT directory
  std::string data;   ///< CoNLL file
  TrainingOptions training;
  std::string device = "cpu";  ///< cpu or cuda
  int threads = 0;             ///< 0: libtorch's choice
  int64_t max_steps = 0;       ///< stop early, with the same schedule; 0: no limit
  std::string save;            ///< directory for model and checkpoints
  bool resume = false;         ///< resume the run in `save`
  int64_t save_every = 0;      ///< steps; 0: only at the end
  std::string json;            ///< a file for the results
  std::string report;          ///< a file for the run as an HTML page
  int seeds = 1;               ///< runs of each row, with consecutive seeds from `training.seed` on
  bool quiet = false;          ///< no progress

  // Of `predict`:
  std::string saved;       ///< directory of --save, or a model directory
  std::string text, file;  ///< a sentence, or a file with a sentence per line
};

/// Parses the arguments (without the program's name). \throws CLI::ParseError for unknown flags, missing or
/// invalid values, and contradictory flags
inline Options parse_command_line(const std::vector<std::string>& arguments) {
  Options options;
  auto& training = options.training;
  CLI::App app(
      "Fine-tunes BERT for named-entity recognition in several precisions and compares them;\n"
      "with --precision, in one.",
      "bert_ner");
  app.option_defaults()->always_capture_default();
  app.get_formatter()->column_width(34);
  const CLI::Range at_least_1(int64_t{1}, int64_t{1'000'000'000}), fraction(0.0, 1.0);
  std::vector<std::string> flags;
  for (const auto& row : precisions()) flags.push_back(row.flag);

  // Options that determine the result. The table appends flags for each row, so the last one
  // counts.
  app.add_option("--model", options.model, "Hugging Face BERT directory");
  app.add_option("--data", options.data, "CoNLL file, split by --held-out and --seed");
  app.add_option("--held-out", training.held_out, "fraction of --data for validation")
      ->check(fraction);
  auto* precision = app.add_option("--precision", training.precision, "one run only")
                        ->check(CLI::IsMember(flags))
                        ->take_last();
  app.add_option("--seed", training.seed, "of split, batch order, classifier and dropout")
      ->take_last();
  app.add_option("--epochs", training.epochs)->check(at_least_1);
  app.add_option("--batch-size", training.batch_size)->check(at_least_1);
  app.add_option("--learning-rate", training.learning_rate, "maximum, of the pretrained layers")
      ->check(CLI::Range(0.0, 10.0));
  app.add_option("--warmup", training.warmup, "fraction of the steps for warmup")->check(fraction);
  app.add_option("--dropout", training.dropout, "between layers and in attention")
      ->check(CLI::Range(0.0, 0.99));

  // Other options.
  app.add_option("--seeds", options.seeds, "runs of each row, with this many seeds from --seed on")
      ->check(CLI::Range(1, 1000))
      ->take_last();
  app.add_option("--device", options.device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--threads", options.threads, "CPU threads (default: libtorch's choice)")
      ->check(at_least_1);
  app.add_option("--max-steps", options.max_steps,
                 "stop after this number of steps, with the same schedule")
      ->check(at_least_1)
      ->take_last();
  auto* saved = app.add_option("--save", options.save, "directory for model and checkpoints")
                    ->needs(precision);
  app.add_option("--save-every", options.save_every, "steps between saves")
      ->check(at_least_1)
      ->needs(saved);
  app.add_flag("--resume", options.resume, "resume the run in --save")->needs(saved);
  app.add_option("--json", options.json, "write the results to this file (-: standard output)")
      ->take_last();
  app.add_option("--report", options.report, "write the run as an HTML page")->needs(precision);
  app.add_flag("--quiet", options.quiet, "no progress on standard error");

  auto* predict = app.add_subcommand("predict", "label text with a saved model")->fallthrough();
  predict->add_option("--saved", options.saved, "directory of --save")->required();
  auto* text = predict->add_option("TEXT", options.text, "a sentence");
  predict->add_option("--file", options.file, "a file with a sentence per line")->excludes(text);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(),
                                       arguments.rend()));  // CLI11 expects reverse order
  } catch (const CLI::CallForHelp&) {
    options.help = (predict->parsed() ? predict : &app)->help();
    return options;
  }
  const bool is_run = precision->count() > 0;
  options.kind = predict->parsed() ? Options::Kind::predict
                 : is_run          ? Options::Kind::run
                                   : Options::Kind::table;
  const auto require = [](bool condition, const char* flag, const char* message) {
    if (!condition) throw CLI::ValidationError(flag, message);
  };
  if (predict->parsed()) {
    require(options.text.empty() != options.file.empty(), "predict",
            "pass a sentence, or a file with --file");
    return options;
  }
  require(!options.model.empty(), "--model", "pass the directory of a BERT model");
  require(!options.data.empty(), "--data", "pass a CoNLL file");
  require(!is_run || options.seeds == 1, "--seeds",
          "cannot be combined with --precision; use --seed");
  return options;
}

}  // namespace bert_ner
