// Interrupts a run inside an epoch, and resumes it from its latest checkpoint. The result is
// bitwise identical to an uninterrupted run, since the checkpoint has weights, optimizer state,
// loss scale, schedule, RNG state and the position in the epoch. Exits with 1 if the weights
// differ.
#include <mezzo/checkpoint.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kEpochs = 4, kExamples = 640, kBatchSize = 64;
constexpr int64_t kSteps = kEpochs * kExamples / kBatchSize;

/// Trains from the latest checkpoint in `directory`, or from the start, until `last_step`. Returns
/// the weights.
std::vector<torch::Tensor> train(const std::filesystem::path& directory, int64_t last_step) {
  torch::manual_seed(0);
  const auto inputs = torch::randn({kExamples, 16});
  const auto targets = inputs.mm(torch::randn({16, 4})).argmax(1);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(), torch::nn::Dropout(0.1),
                              torch::nn::Linear(64, 4));
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 5, .total_steps = kSteps});
  mezzo::GradScaler scaler;
  mezzo::ResumableSampler sampler{torch::data::samplers::RandomSampler(kExamples)};
  const auto loader = torch::data::make_data_loader(
      torch::data::datasets::TensorDataset(torch::arange(kExamples))
          .map(torch::data::transforms::Stack<torch::data::TensorExample>()),
      sampler, torch::data::DataLoaderOptions(kBatchSize).workers(2));

  int64_t step = 0, epoch = 0;
  mezzo::TrainingState state;  // an optimizer must be added before its schedule
  state.add("model", model).add("optimizer", optimizer).add("schedule", schedule);
  state.add("scaler", scaler).add("sampler", sampler).add("step", step).add("epoch", epoch);
  state.add_rng_state();
  mezzo::CheckpointManager checkpoints(directory, {.max_to_keep = 2});
  if (const auto resumed = checkpoints.load_latest(state)) {
    std::printf("resumed at step %lld from %s\n", static_cast<long long>(resumed->step),
                resumed->path.filename().c_str());
  }

  for (; epoch < kEpochs; ++epoch) {
    for (auto& batch : sampler.batches(*loader)) {  // after loading, the rest of the epoch
      const auto input = inputs.index_select(0, batch.data);
      const auto target = targets.index_select(0, batch.data);
      optimizer.zero_grad();
      const auto loss = mezzo::autocast({.device_type = torch::kCPU}, [&] {
        return torch::nn::functional::cross_entropy(model->forward(input), target);
      });
      scaler.scale(loss).backward();
      schedule.step(scaler.step(optimizer, {.max_norm = 1.0}));
      scaler.update();
      ++step;
      if (step % 6 == 0)
        checkpoints.save_async(state, step);  // at the end of an iteration, after update()
      if (step == last_step) return model->parameters();
    }
  }
  return model->parameters();
}

}  // namespace

int main() {
  const auto directory = std::filesystem::temp_directory_path() /
                         ("mezzo_resume_" + std::to_string(std::random_device()()));
  const auto uninterrupted = train(directory / "a", kSteps);
  train(directory / "b", 27);  // interrupted; the latest checkpoint is of step 24, inside an epoch
  const auto resumed = train(directory / "b", kSteps);
  std::filesystem::remove_all(directory);

  bool is_equal = true;
  for (std::size_t i = 0; i < resumed.size(); ++i) {
    is_equal = is_equal && torch::equal(resumed[i], uninterrupted[i]);
  }
  std::printf("%s\n", is_equal ? "bitwise identical" : "different weights");
  return is_equal ? 0 : 1;
}
