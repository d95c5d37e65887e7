// Which precision should this model use? Runs it in float32 and in each candidate, from the same
// weights and on the same batches, and prints how far gradients and losses are from float32's and
// what a step costs. Then runs autocast's ops in float32 one at a time, which shows where the error
// comes from, and writes the op overrides that keeps the proposed setting within the bound.
//
// To ask of your own model, copy this file and write make_model, make_batches and loss_of.
// Exits with 1 unless some 16-bit setting is within the bound, and its saved policy reads back.
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr double kMaxGradientError = 0.05;
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Batch {
  torch::Tensor tokens, labels;
};

struct TaggerImpl : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(64, 64));
  torch::nn::TransformerEncoderLayerOptions layer =
      torch::nn::TransformerEncoderLayerOptions(64, 4).dim_feedforward(256).dropout(0.1);
  torch::nn::TransformerEncoder encoder = register_module(
      "encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderLayer(layer), 2));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(64, 5));

  torch::Tensor forward(const torch::Tensor& tokens) {
    return head->forward(encoder->forward(embedding->forward(tokens)));
  }
};
TORCH_MODULE(Tagger);

torch::Device device() { return torch::cuda::is_available() ? torch::kCUDA : torch::kCPU; }

/// Returns a model with the same weights in each call.
Tagger make_model() {
  torch::manual_seed(0);
  Tagger model;
  model->to(device());
  return model;
}

std::vector<Batch> make_batches() {
  torch::manual_seed(1);
  std::vector<Batch> batches;
  for (int i = 0; i < 12; ++i) {
    const torch::Tensor tokens = torch::randint(64, {32, 16}, torch::kLong).to(device());
    batches.push_back({tokens, tokens.remainder(5)});
  }
  return batches;
}

torch::Tensor loss_of(Tagger& model, const Batch& batch) {
  const torch::Tensor logits = model->forward(batch.tokens);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), batch.labels.flatten());
}

struct Setting {
  std::string name;
  std::optional<torch::ScalarType> autocast = {};  // what autocast lowers to; none: off
  bool casts_weights = false;  // matrices to bfloat16; norms and biases stay float32
  mezzo::optim::WeightStorage storage = mezzo::optim::WeightStorage::plain;
  mezzo::OpOverrides policy = {};
  double first_scale() const { return autocast == torch::kHalf ? 65536 : 1; }
};

Tagger model_in(const Setting& setting) {
  Tagger model = make_model();
  for (torch::Tensor& parameter : model->parameters()) {
    if (setting.casts_weights && parameter.dim() >= 2) {
      parameter.set_data(parameter.detach().to(torch::kBFloat16));
    }
  }
  torch::manual_seed(2);  // dropout drops the same values in each setting
  return model;
}

torch::Tensor loss_in(const Setting& setting, Tagger& model, const Batch& batch) {
  return mezzo::autocast({.device_type = device().type(),
                          .dtype = setting.autocast.value_or(torch::kBFloat16),
                          .enabled = setting.autocast.has_value(),
                          .op_overrides = setting.policy},
                         [&] { return loss_of(model, batch); });
}

/// All gradients of the batch as one float vector. A scale that overflows is halved, as GradScaler
/// does.
torch::Tensor gradient_of(const Setting& setting, const Batch& batch) {
  for (double scale = setting.first_scale();; scale /= 2) {
    Tagger model = model_in(setting);
    (loss_in(setting, model, batch) * scale).backward();
    std::vector<torch::Tensor> gradients;
    for (const torch::Tensor& parameter : model->parameters()) {
      gradients.push_back(parameter.grad().to(torch::kFloat).flatten() / scale);
    }
    const torch::Tensor all = torch::cat(gradients);
    if (scale <= 1 || all.isfinite().all().item<bool>()) return all;
  }
}

/// |g - g32| / |g32|; infinite where a gradient is.
double error_of(const torch::Tensor& gradient, const torch::Tensor& exact) {
  const double error = ((gradient - exact).norm() / exact.norm()).item<double>();
  return std::isfinite(error) ? error : kInf;
}

struct Row {
  double gradient_error = 0, loss_difference = 0, milliseconds = 0;
  int skipped = 0;
  torch::Tensor losses = torch::zeros({0});
};

/// The first gradient, and a step a batch with AdamW: losses, skipped steps and the median time.
Row row_of(const Setting& setting, const std::vector<Batch>& batches, const torch::Tensor& exact,
           const std::optional<torch::Tensor>& float32_losses) {
  Row row{.gradient_error = error_of(gradient_of(setting, batches.front()), exact)};
  Tagger model = model_in(setting);
  mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(1e-4),
                                {.weight_storage = setting.storage});
  mezzo::GradScaler scaler(
      {.init_scale = setting.first_scale(), .enabled = setting.autocast == torch::kHalf});
  std::vector<double> times;
  for (const Batch& batch : batches) {
    const auto begin = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    const torch::Tensor loss = loss_in(setting, model, batch);
    scaler.scale(loss).backward();
    row.skipped += scaler.step(optimizer).applied() ? 0 : 1;  // waits for the device
    scaler.update();
    row.losses = torch::cat({row.losses, loss.detach().cpu().view({1})});
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    times.push_back(time.count());
  }
  std::sort(times.begin(), times.end());
  row.milliseconds = times[times.size() / 2];
  const torch::Tensor exact_losses = float32_losses.value_or(row.losses);
  row.loss_difference =
      ((row.losses - exact_losses).abs().sum() / exact_losses.abs().sum()).item<double>();
  return row;
}

void print(const std::string& name, const Row& row) {
  std::printf("%-26s %14.3g %12.3g %8d %9.2f\n", name.c_str(), row.gradient_error,
              row.loss_difference, row.skipped, row.milliseconds);
}

/// The gradient error that is left when one op alone runs in float32, the least first.
std::vector<std::pair<double, std::string>> causes(const Setting& setting, const Batch& batch,
                                                   const torch::Tensor& exact) {
  std::vector<std::pair<double, std::string>> errors;
  for (const char* const op : {"aten::linear", "aten::matmul", "aten::bmm", "aten::addmm"}) {
    Setting without = setting;
    without.policy = mezzo::install_op_overrides(mezzo::OpOverrides(setting.policy).deny(op));
    errors.emplace_back(error_of(gradient_of(without, batch), exact), op);
  }
  std::sort(errors.begin(), errors.end());
  return errors;
}

}  // namespace

int main() {
  const std::vector<Batch> batches = make_batches();
  const Batch& first = batches.front();
  using Storage = mezzo::optim::WeightStorage;
  std::vector<Setting> settings = {
      {"bf16 autocast", torch::kBFloat16},
      {"fp16 autocast", torch::kHalf},
      {"bf16 weights + masters", torch::kBFloat16, true, Storage::fp32_master},
      {"bf16 weights, stochastic", torch::kBFloat16, true, Storage::stochastic_rounding}};
  const Setting float32{.name = "float32"};
  const torch::Tensor exact = gradient_of(float32, first);
  const Row reference = row_of(float32, batches, exact, {});
  std::printf("%-26s %14s %12s %8s %9s\n", "setting", "gradient error", "loss diff", "skipped",
              "ms/step");
  print(float32.name, reference);

  const Setting* proposed = nullptr;
  double fastest = kInf;
  for (Setting& setting : settings) {
    Row row = row_of(setting, batches, exact, reference.losses);
    print(setting.name, row);
    if (row.gradient_error > kMaxGradientError) {  // ops in float32, the costliest first
      for (const auto& [left, op] : causes(setting, first, exact)) {
        setting.policy = mezzo::install_op_overrides(mezzo::OpOverrides(setting.policy).deny(op));
        row = row_of(setting, batches, exact, reference.losses);
        if (row.gradient_error <= kMaxGradientError) break;
      }
      print(setting.name + " + policy", row);
    }
    if (row.gradient_error > kMaxGradientError || row.milliseconds > fastest) continue;
    fastest = row.milliseconds;
    proposed = &setting;
  }
  if (proposed == nullptr) return 1;

  std::printf(
      "proposed: %s, the fastest with a gradient error of at most %g; its error with one op "
      "in float32:\n",
      proposed->name.c_str(), kMaxGradientError);
  for (const auto& [left, op] : causes(*proposed, first, exact)) {
    std::printf("  %-14s %.3g\n", op.c_str(), left);
  }
  std::ofstream("policy.txt") << proposed->policy;
  return mezzo::OpOverrides::from_file("policy.txt").entries() == proposed->policy.entries() ? 0
                                                                                             : 1;
}
