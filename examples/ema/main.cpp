// An exponential moving average (EMA) of the weights, used for evaluation.
// Exits with 1 if the error of the averages exceeds 0.7 of the error of the weights.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

namespace {

constexpr double kMaxErrorRatio = 0.7;  // measured: 0.46 for both optimizers
const auto kPrecision = mezzo::AutocastOptions{.device_type = torch::kCPU};

/// Returns the mean squared error on data without noise.
double evaluate(torch::nn::Linear& model, const torch::Tensor& teacher) {
  const torch::NoGradGuard no_grad;
  const auto input = torch::randn({1000, 16});
  const auto output = mezzo::autocast(kPrecision, [&] { return model(input); });
  return (output - input.mm(teacher)).square().mean().item<double>();
}

/// Trains with a learning rate that is too high to converge. Returns whether the averages are
/// better.
template <class Optimizer>
bool train(const char* name, const torch::Tensor& teacher) {
  torch::nn::Linear model(16, 4);
  Optimizer optimizer(model->parameters(), 3e-2);
  mezzo::Ema ema(model->parameters(), {.decay = 0.98});
  mezzo::GradScaler scaler;
  for (int i = 0; i < 300; ++i) {
    const auto input = torch::randn({32, 16});
    const auto target = input.mm(teacher) + torch::randn({32, 4});
    optimizer.zero_grad();
    const auto loss =
        mezzo::autocast(kPrecision, [&] { return torch::mse_loss(model(input), target); });
    scaler.scale(loss).backward();
    ema.update(scaler.step(optimizer));  // does not update after a skipped step
    scaler.update();
  }
  const double last = evaluate(model, teacher);
  const mezzo::EmaGuard averaged(ema);  // uses the averages until the end of the scope
  const double average = evaluate(model, teacher);
  std::printf("%-18s error %.4f, with averages %.4f: ratio %.2f, at most %.2f\n", name, last,
              average, average / last, kMaxErrorRatio);
  return average < kMaxErrorRatio * last;
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const auto teacher = torch::randn({16, 4});
  const bool is_better = train<mezzo::optim::AdamW>("mezzo's AdamW:", teacher) &&
                         train<torch::optim::AdamW>("libtorch's AdamW:", teacher);
  return is_better ? 0 : 1;
}
