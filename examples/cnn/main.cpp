// A convolutional network at O2: 16-bit weights, float32 batch norms and master weights. Uses
// float16 with a dynamic loss scale on CUDA, and bfloat16 on the CPU. Exits with 1 if the loss does
// not decrease, or if a layer has the wrong dtype.
#include <mezzo/mezzo.h>
#include <mezzo/opt_levels.h>

#include <torch/torch.h>

#include <cstdio>

namespace {

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(norm1(conv1(x)).relu(), 2);
    x = torch::max_pool2d(norm2(conv2(x)).relu(), 2);
    return head(x.mean({2, 3}));
  }

  torch::nn::Conv2d conv1 = register_module(
      "conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1).bias(false)));
  torch::nn::BatchNorm2d norm1 = register_module("norm1", torch::nn::BatchNorm2d(16));
  torch::nn::Conv2d conv2 = register_module(
      "conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1).bias(false)));
  torch::nn::BatchNorm2d norm2 = register_module("norm2", torch::nn::BatchNorm2d(32));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(32, 4));
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  Net model;
  model->to(device);
  mezzo::optim::SGD optimizer(model->parameters(), mezzo::optim::SGDOptions(0.05).momentum(0.9));
  auto amp = mezzo::initialize(
      model, optimizer, device.is_cuda() ? mezzo::OptLevel::O2() : mezzo::OptLevel::O2_bf16());
  const bool is_cast = model->conv1->weight.scalar_type() != torch::kFloat &&
                       model->norm1->weight.scalar_type() == torch::kFloat;

  torch::Tensor first_loss, loss;
  for (int step = 0; step < 40; ++step) {
    // Stripes whose direction is the class, with noise.
    const auto target = torch::randint(4, {32}, torch::TensorOptions(torch::kLong).device(device));
    const auto position = torch::arange(16, device).to(torch::kFloat);
    const auto angle = target.to(torch::kFloat).view({-1, 1, 1}) * 0.785F;
    auto images =
        (angle.cos() * position.view({1, 1, -1}) + angle.sin() * position.view({1, -1, 1})).sin();
    images = (images + 0.3 * torch::randn({32, 16, 16}, device)).unsqueeze(1);

    optimizer.zero_grad();
    loss = torch::nn::functional::cross_entropy(amp.forward(model, images),
                                                target);  // the output is float32
    if (step == 0) first_loss = loss.detach();
    amp.backward(loss, optimizer);           // .grad then has unscaled float32 gradients
    amp.step(optimizer, {.max_norm = 5.0});  // or skips the step, and updates the scale
  }
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("loss %.3f -> %.3f\n", before, after);
  return is_cast && after < before / 2 ? 0 : 1;
}
