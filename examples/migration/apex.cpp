// Apex: initialize, scale_loss and step; here at O2 in bfloat16, which needs no loss scale, with
// float32 batch norms and master weights. Exits with 1 if the loss does not decrease.
#include <mezzo/mezzo.h>
#include <mezzo/opt_levels.h>

#include <torch/torch.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 4));
  model->to(device);
  const torch::Tensor teacher = torch::randn({16, 4}, device);  // defines the classes

  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  auto amp = mezzo::initialize(model, optimizer, mezzo::OptLevel::O2_bf16());  // O2() for float16

  torch::Tensor first_loss, loss;  // on the device, without synchronization
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor input = torch::randn({64, 16}, device);
    const torch::Tensor target = input.mm(teacher).argmax(1);

    optimizer.zero_grad();
    // amp.forward(model, ...) casts what comes in and out; a bare model->forward(...) would not.
    loss = torch::nn::functional::cross_entropy(amp.forward(model, input), target);
    amp.backward(loss, optimizer);  // with amp.scale_loss(...): backward()
    torch::nn::utils::clip_grad_norm_(amp.master_params(optimizer), 1.0);
    amp.step(optimizer);  // optimizer.step()

    if (step == 0) first_loss = loss.detach();
  }
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("loss %.3f -> %.3f, scale %g\n", before, after, amp.scaler().get_scale());
  return after < before / 2 ? 0 : 1;
}
