// An LSTM under autocast. On a CPU without float16 instructions, oneDNN throws for an LSTM in float16,
// in Python too. An override runs the layer in float32, and all other ops in 16 bits.
// Exits with 1 if the loss does not decrease.
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

namespace {

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    const auto output = std::get<0>(lstm(x));
    return head(output.select(1, -1));
  }

  torch::nn::LSTM lstm =
      register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 32).batch_first(true)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(32, 2));
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  // Once, before other threads run ops. CUDA's LSTM is another op, which is not affected.
  const auto overrides =
      mezzo::install_op_overrides(mezzo::OpOverrides().deny("aten::mkldnn_rnn_layer"));
  const mezzo::AutocastOptions precision{.device_type = device.type(), .op_overrides = overrides};

  Net model;
  model->to(device);
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  mezzo::GradScaler scaler;

  torch::Tensor first_loss, loss;
  for (int step = 0; step < 120; ++step) {
    const auto input = torch::randn({64, 10, 4}, device);
    const auto target =
        input.select(2, 0).sum(1).gt(0).to(torch::kLong);  // whether the sum is positive
    optimizer.zero_grad();
    loss = mezzo::autocast(
        precision, [&] { return torch::nn::functional::cross_entropy(model(input), target); });
    if (step == 0) first_loss = loss.detach();
    scaler.scale(loss).backward();
    scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
  }
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("loss %.3f -> %.3f\n", before, after);
  return after < before / 2 ? 0 : 1;
}
