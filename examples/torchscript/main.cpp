// TorchScript trained from C++: torch::jit::load, autocast, a loss scale, checkpoints.
// `torchscript model.pt` loads your file, whose forward must map [N, 16] to [N, 4] logits. Without
// an argument the program creates such a file. Exits with 1 if the loss does not decrease, or if
// the checkpoint has other weights.
#include <mezzo/checkpoint.h>
#include <mezzo/mezzo.h>
#include <mezzo/torchscript.h>

#include <torch/script.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <random>
#include <string>

namespace {

/// Saves a scripted model, as `torch.jit.script(model).save(file)` does in Python.
void make_model(const std::string& file) {
  torch::jit::Module model("Net");
  const auto weight = [](int64_t rows, int64_t columns) {
    return (torch::randn({rows, columns}) / 4).set_requires_grad(true);
  };
  model.register_parameter("first", weight(64, 16), /*is_buffer=*/false);
  model.register_parameter("last", weight(4, 64), /*is_buffer=*/false);
  model.define(R"(
    def forward(self, x):
        return torch.linear(torch.gelu(torch.linear(x, self.first)), self.last)
  )");
  model.save(file);
}

}  // namespace

int main(int argc, char** argv) try {
  torch::manual_seed(0);
  const auto directory = std::filesystem::temp_directory_path() /
                         ("mezzo_torchscript_" + std::to_string(std::random_device()()));
  std::filesystem::create_directories(directory);
  const std::string file = argc > 1 ? argv[1] : (directory / "model.pt").string();
  if (argc <= 1) make_model(file);

  mezzo::ScriptModule model(torch::jit::load(file));  // a torch::nn::Module
  torch::nn::CrossEntropyLoss criterion;
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  mezzo::GradScaler scaler;
  mezzo::TrainingState state;
  state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
  mezzo::CheckpointManager checkpoints(directory / "checkpoints");

  const auto teacher = torch::randn({16, 4});
  torch::Tensor first, last;
  for (int step = 0; step < 100; ++step) {
    const auto input = torch::randn({64, 16});
    const auto target = input.mm(teacher).argmax(1);
    optimizer.zero_grad();
    const auto loss = mezzo::autocast({.device_type = torch::kCPU}, [&] {
      return criterion(model(input).toTensor(), target);  // forward returns an IValue
    });
    scaler.scale(loss).backward();
    scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    (step == 0 ? first : last) = loss.detach();
  }
  checkpoints.save(state, 100);

  auto reloaded = torch::jit::load(file);
  mezzo::ScriptModule reloaded_model(reloaded);  // shares its tensors
  mezzo::TrainingState weights;
  weights.add("model", reloaded_model);
  checkpoints.load_latest(weights, {.ignore_unexpected = true});
  const auto input = torch::randn({8, 16});
  const bool is_equal = torch::equal(reloaded.forward({input}).toTensor(), model(input).toTensor());
  reloaded.save((directory / "trained.pt").string());  // for torch.jit.load in Python, or a server
  std::filesystem::remove_all(directory);

  const auto from = first.item<double>(), to = last.item<double>();
  std::printf("loss %.3f -> %.3f, %s\n", from, to,
              is_equal ? "checkpoint is equal" : "checkpoint differs");
  return to < from / 2 && is_equal ? 0 : 1;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "torchscript: %s\n", error.what_without_backtrace());
  return 2;
}
