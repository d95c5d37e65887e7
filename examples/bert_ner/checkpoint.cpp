#include "checkpoint.h"

#include <mezzo/checkpoint/checkpoint.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <iostream>
#include <string>
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

void load_checkpoint(const fs::path& dir, Trainer& trainer, const nlohmann::json& record) {
  std::string text;
  mezzo::TrainingState alone;
  alone.add("record", text);
  const auto loaded = with_checkpoints(
      dir, [&](auto&& checkpoints) { return checkpoints.load_newest(alone, {.subset = true}); });
  if (!loaded) {
    throw InputError(checkpoints_of(dir).string() +
                     ": holds no checkpoint; leave --resume out to begin a run");
  }
  const auto saved = parse_json(text, loaded->file.string());
  for (const auto& [word, value] : record.items()) {
    if (saved.value(word, nlohmann::json()) == value) continue;
    throw InputError(dir.string() + ": the run had other " + word +
                     "; put back what it began with");
  }
  const auto state = state_of(trainer, text);
  with_checkpoints(dir, [&](auto&& checkpoints) { checkpoints.load_newest(state); });
}

void save_checkpoint(const fs::path& dir, Trainer& trainer, const nlohmann::json& record) {
  std::string text = record.dump();
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
