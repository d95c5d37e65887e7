// Averaged weights: written by the optimizer in the pass of its step, or kept beside one of
// libtorch's, and put into the model for an evaluation.
// Exits with 1 if averages are no better than the noisy weights that they are of.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>
#include <optional>

namespace {

const auto kPrecision = mezzo::AutocastSetting{.device = torch::kCPU};

/// Mean square error on data without noise.
double evaluate(torch::nn::Linear& model, const torch::Tensor& teacher) {
  const torch::NoGradGuard no_grad;
  const auto input = torch::randn({1000, 16});
  const auto output = mezzo::autocast(kPrecision, [&] { return model(input); });
  return (output - input.mm(teacher)).square().mean().item<double>();
}

/// Trains with a rate that is too high to settle; `step` steps, and averages if it is to.
template <class Step>
void train(torch::nn::Linear& model, const torch::Tensor& teacher, const Step& step) {
  for (int i = 0; i < 300; ++i) {
    const auto input = torch::randn({32, 16});
    const auto target = input.mm(teacher) + torch::randn({32, 4});
    model->zero_grad();
    const auto loss =
        mezzo::autocast(kPrecision, [&] { return torch::mse_loss(model(input), target); });
    step(loss);
  }
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const auto teacher = torch::randn({16, 4});
  bool is_better = true;

  {
    torch::nn::Linear model(16, 4);
    mezzo::optim::AdamW optimizer(model->parameters(),
                                  mezzo::optim::AdamWOptions(3e-2).ema_decay(0.98));
    mezzo::GradScaler scaler;
    train(model, teacher, [&](const torch::Tensor& loss) {
      scaler.scale(loss).backward();
      scaler.step(optimizer);  // and averages, in the same pass
      scaler.update();
    });
    const double last = evaluate(model, teacher);
    const mezzo::EmaScope averaged(optimizer);  // until the scope ends
    const double average = evaluate(model, teacher);
    std::printf("mezzo's AdamW:     error %.4f, of the average %.4f\n", last, average);
    is_better = is_better && average < last;
  }
  {
    torch::nn::Linear model(16, 4);
    torch::optim::AdamW optimizer(model->parameters(), 3e-2);
    mezzo::Ema ema(model->parameters(), {.decay = 0.98});
    mezzo::GradScaler scaler;
    train(model, teacher, [&](const torch::Tensor& loss) {
      scaler.scale(loss).backward();
      ema.update(scaler.step(optimizer));  // a skipped step is not averaged
      scaler.update();
    });
    const double last = evaluate(model, teacher);
    const mezzo::EmaScope averaged(ema);
    const double average = evaluate(model, teacher);
    std::printf("libtorch's AdamW:  error %.4f, of the average %.4f\n", last, average);
    is_better = is_better && average < last;
  }
  return is_better ? 0 : 1;
}
