// Continues training in C++ from Python, and back. Reads a file that Python wrote with
//
//     torch.save({"adamw_model": model.state_dict(), "adamw_optimizer": optimizer.state_dict()}, path)
//
// for the model below, and writes one for torch.load. Exits with 1 if the loss does not decrease.
#include <mezzo/checkpoint.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

int main(int count, char** arguments) try {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s FILE NEW_FILE\n", arguments[0]);
    return 2;
  }
  torch::nn::Linear first(3, 2), last(2, 1);
  torch::nn::Sequential model(first, torch::nn::BatchNorm1d(2), last);
  const auto all = model->parameters();
  mezzo::optim::AdamW optimizer({{{all[0], all[1], all[2], all[3]}}, {{all[4], all[5]}}}, {});

  mezzo::TrainingState state;
  state.add("adamw_model", model).add("adamw_optimizer", optimizer);
  mezzo::load_checkpoint(arguments[1], state, {.ignore_unexpected = true});

  torch::manual_seed(0);
  const auto input = torch::rand({16, 3});
  double before = 0, loss = 0;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    const auto step_loss = model->forward(input).square().sum();
    step_loss.backward();
    optimizer.step();
    loss = step_loss.item<double>();
    if (step == 0) before = loss;
  }
  std::printf("%lld steps, lr %g and %g, loss %.4f to %.4f\n",
              static_cast<long long>(optimizer.applied_steps()),
              optimizer.param_groups()[0].options().get_lr(),
              optimizer.param_groups()[1].options().get_lr(), before, loss);
  mezzo::save_checkpoint(arguments[2], state, optimizer.applied_steps());
  return loss < before ? 0 : 1;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "python_checkpoint: %s\n", error.what_without_backtrace());
  return 2;
}
