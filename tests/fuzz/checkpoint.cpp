#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "../support/temp_dir.h"
#include "targets.h"

namespace fuzz {
namespace {

/// A run with one object of each kind.
struct Run {
  torch::nn::Linear model{3, 2};
  mezzo::optim::AdamW optimizer{model->parameters(), 0.1};
  mezzo::LinearSchedule schedule{optimizer, {.warmup_steps = 2, .total_steps = 9}};
  mezzo::GradScaler scaler;
  std::int64_t epoch = 3;
  double best = 0.5;
  std::string note = "first";
  at::Tensor order = at::arange(5);
  std::vector<at::Tensor> kept{at::arange(3), at::arange(4).to(at::kFloat)};
  mezzo::TrainingState state;

  Run() {
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
    optimizer.step();
    schedule.step();  // the rates that a file shows are those of its step
    state.add("model", model).add("optimizer", optimizer).add("schedule", schedule);
    state.add("scaler", scaler).add("epoch", epoch).add("best", best).add("note", note);
    state.add("order", order).add("kept", kept).add_rng_state();
  }
};

std::string bytes_of(Run& run, const std::filesystem::path& folder) {
  mezzo::CheckpointManager checkpoints(folder, {.max_to_keep = 1});
  const auto saved = checkpoints.save(run.state, 7);
  std::string bytes = test_support::read_file(saved.path);
  std::filesystem::remove(saved.path);
  return bytes;
}

/// The bytes of a whole file with those changes that `edits` says: at an offset of two bytes, so
/// many bytes of the file are replaced by so many that follow.
std::string edited(std::string file, std::string_view edits) {
  while (!edits.empty()) {
    const std::size_t high = take_byte(edits), low = take_byte(edits);
    const std::size_t offset = (high * 256 + low) % (file.size() + 1);
    const std::size_t removed = take_byte(edits), added = take_byte(edits);
    file.replace(offset, removed == 255 ? file.size() : removed, edits.substr(0, added));
    edits.remove_prefix(std::min(added, edits.size()));
  }
  return file;
}

std::string with_crc(std::string file) {
  if (file.size() < mezzo::detail::kCrcDigits) return file;
  file.resize(file.size() - mezzo::detail::kCrcDigits);
  return file + mezzo::detail::crc_to_hex(mezzo::detail::crc32c(file.data(), file.size(), 0));
}

}  // namespace

/// Damage to a checkpoint: whole bytes of a file, or edits to one that is whole. It loads, or it is
/// refused and nothing has changed. With a new CRC-32C it is a forgery, which may load other
/// values.
void checkpoint(std::string_view bytes) {
  static const test_support::TempDir temp_dir;
  static auto run = std::make_unique<Run>();
  static const std::string whole = bytes_of(*run, temp_dir.path());
  const unsigned char way = take_byte(bytes);
  const bool is_forged = way / 2 % 2 == 1;
  std::string file = way % 2 == 0 ? edited(whole, bytes) : std::string(bytes);
  if (is_forged) file = with_crc(file);
  const auto path = temp_dir.path() / "checkpoint.pt";
  test_support::write_file(path, file);
  try {
    mezzo::load_checkpoint(path, run->state);
    require(file == whole || is_forged, "every change is noticed");
  } catch (const c10::Error&) {
  }
  if (is_forged) {  // it was loaded, or an object refused what had passed the checks
    run = std::make_unique<Run>();
    test_support::write_file(path, whole);
    mezzo::load_checkpoint(path, run->state);
  }
  require(bytes_of(*run, temp_dir.path()) == whole, "a file that is refused changes nothing");
}

}  // namespace fuzz
