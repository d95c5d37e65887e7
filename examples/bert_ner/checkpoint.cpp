#include "checkpoint.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "text.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

fs::path checkpoints_of(const fs::path& dir) { return dir / "checkpoints"; }

mezzo::TrainingState state_of(Trainer& trainer, std::string& record) {
  mezzo::TrainingState state;
  auto& position = trainer.position;
  state.add("record", record).add("epoch", position.epoch).add("group", position.group);
  state.add("steps", position.steps).add("model", trainer.model);
  state.add("optimizer", *trainer.optimizer).add("schedule", trainer.schedule);
  if (trainer.scaler.is_enabled()) state.add("scaler", trainer.scaler);
  return std::move(state.with_random_state());
}

/// Calls `use` with the folder's manager. Errors of mezzo become InputErrors of one line.
template <class Use>
auto with_checkpoints(const fs::path& dir, const Use& use) {
  const mezzo::CheckpointManagerOptions options{
      .on_warning = [](const std::string& text) { std::cerr << "note: " << text << std::endl; }};
  try {
    return use(mezzo::CheckpointManager(checkpoints_of(dir), options));
  } catch (const c10::Error& error) {
    std::string text = error.what_without_backtrace();
    std::ranges::replace(text, '\n', ' ');
    throw InputError(text);
  }
}

}  // namespace

SavedRun read_saved_run(const fs::path& dir) {
  SavedRun saved;
  std::string record;
  mezzo::TrainingState state;
  state.add("record", record).add("epoch", saved.position.epoch);
  state.add("group", saved.position.group).add("steps", saved.position.steps);
  const auto loaded = with_checkpoints(
      dir, [&](auto&& checkpoints) { return checkpoints.load_newest(state, {.subset = true}); });
  if (!loaded) {
    throw InputError(checkpoints_of(dir).string() +
                     ": holds no checkpoint; --resume takes a folder that --save wrote, and "
                     "--model one that holds a model alone");
  }
  try {
    saved.record = nlohmann::json::parse(record).get<RunRecord>();
  } catch (const nlohmann::json::exception& error) {
    throw InputError(loaded->file.string() +
                     ": is of another program, or of another version of this one (" + error.what() +
                     "); resume it with that one, or start a run with --model");
  }
  return saved;
}

void load_checkpoint(const fs::path& dir, Trainer& trainer) {
  std::string record;
  const auto state = state_of(trainer, record);
  with_checkpoints(dir, [&](auto&& checkpoints) { checkpoints.load_newest(state); });
}

void save_checkpoint(const fs::path& dir, Trainer& trainer, const ModelFiles& files,
                     const Labels& labels, const RunRecord& record) {
  write_model_folder(dir, files, trainer.model, labels);
  std::string text = nlohmann::json(record).dump();
  const auto state = state_of(trainer, text);
  with_checkpoints(dir,
                   [&](auto&& checkpoints) { checkpoints.save(state, trainer.position.steps); });
}

void prepare_checkpoints(const fs::path& dir) {
  std::error_code error;
  fs::create_directories(checkpoints_of(dir), error);
  if (error)
    throw InputError(checkpoints_of(dir).string() + ": cannot be made: " + error.message());
  check_writable(dir / "config.json");
  check_writable(checkpoints_of(dir) / "probe");
}

}  // namespace bert_ner
