// A small network in C++, and the same network in TorchScript, built without Python.
#pragma once

#include <torch/script.h>
#include <torch/torch.h>

#include <cstdint>
#include <sstream>

namespace test_support {

/// A convolution, a batch norm, matrix products, and ops of the allow and deny lists.
struct TwinImpl : torch::nn::Module {
  TwinImpl() {
    conv =
        register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    out = register_module("out", torch::nn::Linear(8, 4));
  }
  torch::Tensor forward(const torch::Tensor& image) {
    auto x = torch::relu(norm->forward(conv->forward(image))).mean({2, 3});
    x = torch::matmul(torch::softmax(torch::matmul(x, x.t()), -1), x) * x;
    return out->forward(x);
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(Twin);

/// Returns a network with the weights of `seed`.
inline Twin twin(std::uint64_t seed = 0) {
  torch::manual_seed(seed);
  return Twin();
}

/// Returns the TorchScript network with the weights of `seed`, as torch::jit::load does.
inline torch::jit::Module script_model(std::uint64_t seed = 0) {
  const Twin weights = twin(seed);
  const auto add = [](torch::jit::Module& to, const torch::nn::Module& from) {
    for (const auto& item : from.named_parameters())
      to.register_parameter(item.key(), item.value(), /*is_buffer=*/false);
    for (const auto& item : from.named_buffers()) to.register_buffer(item.key(), item.value());
  };
  torch::jit::Module conv("Filter"), norm("Whitening"), out("Head"), model("Net");
  add(conv, *weights->conv);
  conv.define("def forward(self, x):\n  return torch.conv2d(x, self.weight)\n");
  add(norm, *weights->norm);
  norm.register_attribute("training", c10::BoolType::get(), true);
  norm.define(R"(
    def forward(self, x):
        if self.training:
            self.num_batches_tracked += 1
        return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var,
                                self.training, 0.1, 1e-5, False)
  )");
  add(out, *weights->out);
  out.define("def forward(self, x):\n  return torch.linear(x, self.weight, self.bias)\n");
  model.register_module("conv", conv);
  model.register_module("norm", norm);
  model.register_module("out", out);
  model.register_attribute("training", c10::BoolType::get(), true);
  model.define(R"(
    def forward(self, image):
        x = torch.relu(self.norm.forward(self.conv.forward(image))).mean([2, 3])
        x = torch.matmul(torch.softmax(torch.matmul(x, x.t()), -1), x) * x
        return self.out.forward(x)
  )");
  std::stringstream file;
  model.save(file);
  return torch::jit::load(file);
}

}  // namespace test_support
