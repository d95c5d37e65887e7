// Two losses of very different magnitude, each with its own loss scale, and one optimizer. One head
// classifies. The other predicts values of several hundred, whose squared error overflows float16
// at the scale that the first loss needs. Exits with 1 if a loss does not decrease to half, or if
// the scales of the two losses are equal.
#include <mezzo/mezzo.h>
#include <mezzo/opt_levels.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace {

struct NetImpl : torch::nn::Module {
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    const auto hidden = torch::gelu(body(x));
    return {classes(hidden), values(hidden)};
  }

  torch::nn::Linear body = register_module("body", torch::nn::Linear(16, 64));
  torch::nn::Linear classes = register_module("classes", torch::nn::Linear(64, 4));
  torch::nn::Linear values = register_module("values", torch::nn::Linear(64, 1));
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const auto teacher = torch::randn({16, 4}, device);
  Net model;
  model->to(device);
  mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(1e-2));
  // O1 uses float16, which a CPU may have to emulate: this small model takes a second.
  auto amp =
      mezzo::initialize(model, optimizer, mezzo::OptLevel::O1(), {.num_losses = 2, .verbosity = 0});

  double first[2], last[2];
  for (int step = 0; step < 300; ++step) {
    const auto input = torch::randn({64, 16}, device);
    const auto scores = input.mm(teacher);
    optimizer.zero_grad();
    const auto [logits, value] = amp.forward(model, input);
    const auto class_loss =
        torch::nn::functional::cross_entropy(logits.to(torch::kFloat), scores.argmax(1));
    const auto value_loss =
        torch::mse_loss(value.to(torch::kFloat), 50 * scores.sum(1, /*keepdim=*/true));
    amp.scale_loss(class_loss, optimizer, {.loss_id = 0}, [](const torch::Tensor& scaled) {
      scaled.backward({}, /*retain_graph=*/true);  // the second loss uses the graph too
    });
    amp.backward(value_loss, optimizer, {.loss_id = 1});
    amp.step(
        optimizer);  // skipped if a gradient is inf or NaN; reduces the scale of that loss only
    last[0] = class_loss.item<double>();
    last[1] = value_loss.item<double>();
    if (step == 0) std::copy(last, last + 2, first);
  }
  const double scales[2] = {amp.scaler(0).get_scale(), amp.scaler(1).get_scale()};
  const char* const names[2] = {"classes", "values"};
  for (int i = 0; i < 2; ++i)
    std::printf("%-8s loss %9.3f -> %9.3f, scale %g\n", names[i], first[i], last[i], scales[i]);
  return last[0] < first[0] / 2 && last[1] < first[1] / 2 && scales[0] != scales[1] ? 0 : 1;
}
