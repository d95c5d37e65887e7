#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "../support/temp_dir.h"
#include "targets.h"

namespace fuzz {
namespace {

/// A training state with an object of each kind.
struct Run {
  torch::nn::Linear model{3, 2};
  mezzo::optim::AdamW optimizer{model->parameters(), 0.1};
  mezzo::LinearSchedule schedule{optimizer, {.warmup_steps = 2, .total_steps = 9}};
  mezzo::GradScaler scaler;
  std::int64_t epoch = 3;
  double best = 0.5;
  std::string note = "first";
  at::Tensor order = at::arange(5);
  std::vector<at::Tensor> tensors{at::arange(3), at::arange(4).to(at::kFloat)};
  mezzo::TrainingState state;

  Run() {
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
    optimizer.step();
    schedule.step();  // the saved learning rates are those of this step
    state.add("model", model).add("optimizer", optimizer).add("schedule", schedule);
    state.add("scaler", scaler).add("epoch", epoch).add("best", best).add("note", note);
    state.add("order", order).add("tensors", tensors).add_rng_state();
  }
};

std::string bytes_of(Run& run, const std::filesystem::path& directory) {
  mezzo::CheckpointManager checkpoints(directory, {.max_to_keep = 1});
  const auto saved = checkpoints.save(run.state, 7);
  std::string bytes = test_support::read_file(saved.path);
  std::filesystem::remove(saved.path);
  return bytes;
}

/// Recomputes the CRC at the end of a file.
std::string with_valid_crc(std::string file) {
  if (file.size() < mezzo::detail::kCrcDigits) return file;
  file.resize(file.size() - mezzo::detail::kCrcDigits);
  return file + mezzo::detail::crc_to_hex(mezzo::detail::crc32c(file.data(), file.size(), 0));
}

}  // namespace

/// Loads the bytes of a file, or an edited valid checkpoint. Loading must throw and change nothing,
/// unless the file is the valid one, or its CRC-32C was recomputed: it may then load other values.
void checkpoint(std::string_view bytes) {
  static const test_support::TempDir temp_dir;
  static auto run = std::make_unique<Run>();
  static const std::string whole = bytes_of(*run, temp_dir.path());
  const unsigned char mode = take_byte(bytes);
  const bool has_valid_crc = mode / 2 % 2 == 1;
  std::string file = mode % 2 == 0 ? apply_edits(whole, bytes) : std::string(bytes);
  if (has_valid_crc) file = with_valid_crc(file);
  const auto path = temp_dir.path() / "checkpoint.pt";
  test_support::write_file(path, file);
  try {
    mezzo::load_checkpoint(path, run->state);
    require(file == whole || has_valid_crc, "a changed file does not load");
  } catch (const c10::Error&) {
  }
  if (has_valid_crc) {  // it was loaded, at least in part
    run = std::make_unique<Run>();
    test_support::write_file(path, whole);
    mezzo::load_checkpoint(path, run->state);
  }
  require(bytes_of(*run, temp_dir.path()) == whole, "a file that does not load changes nothing");
}

}  // namespace fuzz
