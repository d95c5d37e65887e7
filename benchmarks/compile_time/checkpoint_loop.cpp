// README's loop, with checkpoints.
#include <mezzo/checkpoint.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

void train() {
  torch::nn::Linear model(8, 1);
  const torch::Tensor data = torch::randn({16, 8});
  const torch::Tensor target = torch::randn({16, 1});

  mezzo::GradScaler scaler;
  mezzo::optim::AdamW optimizer(model->parameters(), 2e-5);
  mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 2, .total_steps = 10});
  int64_t step = 0;
  mezzo::TrainingState state;
  state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
  state.add("schedule", schedule).add("step", step).add_rng_state();
  mezzo::CheckpointManager checkpoints("runs/ner", {.max_to_keep = 2});
  checkpoints.load_latest(state);
  for (; step < 10; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      mezzo::AutocastGuard<torch::kCPU> autocast;
      loss = torch::mse_loss(model->forward(data), target);
    }
    scaler.scale(loss).backward();
    auto result = scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);
    if (step % 1000 == 0) checkpoints.save(state, step);
  }
}
