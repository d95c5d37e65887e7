// Interrupts a run, and resumes it from its latest checkpoint. The result is bitwise identical to
// an uninterrupted run, since the checkpoint has weights, optimizer state, loss scale, schedule and
// RNG state. Exits with 1 if the weights differ.
#include <mezzo/checkpoint.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kSteps = 40;

/// Trains from the latest checkpoint in `directory`, or from the start, until `last_step`. Returns
/// the weights.
std::vector<torch::Tensor> train(const std::filesystem::path& directory, int64_t last_step) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(), torch::nn::Dropout(0.1),
                              torch::nn::Linear(64, 4));
  const auto teacher = torch::randn({16, 4});
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 5, .total_steps = kSteps});
  mezzo::GradScaler scaler;

  int64_t step = 0;
  mezzo::TrainingState state;  // an optimizer must be added before its schedule
  state.add("model", model).add("optimizer", optimizer).add("schedule", schedule);
  state.add("scaler", scaler).add("step", step).add_rng_state();
  mezzo::CheckpointManager checkpoints(directory, {.max_to_keep = 2});
  if (const auto resumed = checkpoints.load_latest(state)) {
    std::printf("resumed at step %lld from %s\n", static_cast<long long>(resumed->step),
                resumed->path.filename().c_str());
  }

  while (step < last_step) {
    const auto input = torch::randn({64, 16});
    const auto target = input.mm(teacher).argmax(1);
    optimizer.zero_grad();
    const auto loss = mezzo::autocast({.device_type = torch::kCPU}, [&] {
      return torch::nn::functional::cross_entropy(model->forward(input), target);
    });
    scaler.scale(loss).backward();
    schedule.step(scaler.step(optimizer, {.max_norm = 1.0}));
    scaler.update();
    ++step;
    if (step % 10 == 0)
      checkpoints.save(state, step);  // at the end of an iteration, after update()
  }
  return model->parameters();
}

}  // namespace

int main() {
  const auto directory = std::filesystem::temp_directory_path() /
                         ("mezzo_resume_" + std::to_string(std::random_device()()));
  const auto uninterrupted = train(directory / "a", kSteps);
  train(directory / "b", 25);  // interrupted; the latest checkpoint is of step 20
  const auto resumed = train(directory / "b", kSteps);
  std::filesystem::remove_all(directory);

  bool is_equal = true;
  for (std::size_t i = 0; i < resumed.size(); ++i) {
    is_equal = is_equal && torch::equal(resumed[i], uninterrupted[i]);
  }
  std::printf("%s\n", is_equal ? "bitwise identical" : "different weights");
  return is_equal ? 0 : 1;
}
