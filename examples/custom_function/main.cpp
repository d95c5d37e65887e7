// A custom autograd function under autocast, as with custom_fwd and custom_bwd in Python. It always
// computes in float32, since its sums overflow in float16.
// Exits with 1 if the loss does not decrease, or if the function is called with another dtype.
#include <mezzo/autocast/autocast_autograd_function.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

namespace {

/// x / sqrt(mean(x^2) + eps) over the last dimension: RMS norm without a weight.
struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x) {
    TORCH_CHECK(x.scalar_type() == torch::kFloat, "RmsNorm: expected float32, got ",
                x.scalar_type());
    const auto inverse = (x.square().mean(-1, /*keepdim=*/true) + 1e-6).rsqrt();
    ctx->save_for_backward({x, inverse});
    return x * inverse;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto& x = saved[0];
    const auto& inverse = saved[1];
    const auto mean = (gradients[0] * x).mean(-1, /*keepdim=*/true);
    return {inverse * (gradients[0] - x * mean * inverse.square())};
  }
};

/// Casts floating-point arguments to float32 under autocast, and disables autocast inside.
using Float32RmsNorm = mezzo::AutocastAutogradFunction<RmsNorm, torch::kFloat>;

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Linear first(16, 64), last(64, 4);
  first->to(device);
  last->to(device);
  const auto teacher = torch::randn({16, 4}, device);  // defines the classes

  auto parameters = first->parameters();
  for (const auto& parameter : last->parameters()) parameters.push_back(parameter);
  mezzo::optim::AdamW optimizer(parameters, 1e-2);
  mezzo::GradScaler scaler;
  const mezzo::AutocastOptions precision{.device_type = device.type()};

  torch::Tensor first_loss, loss;
  for (int step = 0; step < 60; ++step) {
    const auto input = torch::randn({64, 16}, device);
    const auto target = input.mm(teacher).argmax(1);
    optimizer.zero_grad();
    loss = mezzo::autocast(precision, [&] {
      const auto hidden = Float32RmsNorm::apply(first(input));  // first(input) is 16-bit
      return torch::nn::functional::cross_entropy(last(hidden.relu()), target);
    });
    if (step == 0) first_loss = loss.detach();
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
  }
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("loss %.3f -> %.3f\n", before, after);
  return after < before / 2 ? 0 : 1;
}
