// Compares precisions for a model. Trains it in float32 and in several 16-bit configurations, from
// the same weights and on the same batches, and prints the errors of gradients and losses relative
// to float32, and the time of a step. Then runs single ops in float32 to find the source of the
// error, and saves the op overrides of the proposed configuration.
//
// For your model, copy this file and change make_model, make_batches and compute_loss. Exits with 1
// if no 16-bit configuration is within the bound, or if the saved overrides differ when loaded.
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

/// Returns a model with the same weights on every call.
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

torch::Tensor compute_loss(Tagger& model, const Batch& batch) {
  const torch::Tensor logits = model->forward(batch.tokens);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), batch.labels.flatten());
}

struct Config {
  std::string name;
  std::optional<torch::ScalarType> autocast = {};  // autocast's dtype; disabled if none
  bool casts_weights = false;  // matrices to bfloat16; norms and biases remain float32
  mezzo::optim::WeightStorage storage = mezzo::optim::WeightStorage::plain;
  mezzo::OpOverrides overrides = {};
  double init_scale() const { return autocast == torch::kHalf ? 65536 : 1; }
};

Tagger make_model_for(const Config& config) {
  Tagger model = make_model();
  for (torch::Tensor& parameter : model->parameters()) {
    if (config.casts_weights && parameter.dim() >= 2) {
      parameter.set_data(parameter.detach().to(torch::kBFloat16));
    }
  }
  torch::manual_seed(2);  // the same dropout masks in each configuration
  return model;
}

torch::Tensor forward_loss(const Config& config, Tagger& model, const Batch& batch) {
  return mezzo::autocast({.device_type = device().type(),
                          .dtype = config.autocast.value_or(torch::kBFloat16),
                          .enabled = config.autocast.has_value(),
                          .op_overrides = config.overrides},
                         [&] { return compute_loss(model, batch); });
}

/// Returns all gradients of a batch as one float32 vector. Halves the loss scale on overflow, like
/// GradScaler.
torch::Tensor compute_gradient(const Config& config, const Batch& batch) {
  for (double scale = config.init_scale();; scale /= 2) {
    Tagger model = make_model_for(config);
    (forward_loss(config, model, batch) * scale).backward();
    std::vector<torch::Tensor> gradients;
    for (const torch::Tensor& parameter : model->parameters()) {
      gradients.push_back(parameter.grad().to(torch::kFloat).flatten() / scale);
    }
    const torch::Tensor all = torch::cat(gradients);
    if (scale <= 1 || all.isfinite().all().item<bool>()) return all;
  }
}

/// Returns |g - g32| / |g32|; infinite if g is not finite.
double relative_error(const torch::Tensor& gradient, const torch::Tensor& exact) {
  const double error = ((gradient - exact).norm() / exact.norm()).item<double>();
  return std::isfinite(error) ? error : kInf;
}

struct Row {
  double gradient_error = 0, loss_difference = 0, milliseconds = 0;
  int skipped = 0;
  torch::Tensor losses = torch::zeros({0});
};

/// Computes the first gradient, and trains one step per batch with AdamW.
Row measure(const Config& config, const std::vector<Batch>& batches, const torch::Tensor& exact,
            const std::optional<torch::Tensor>& float32_losses) {
  Row row{.gradient_error = relative_error(compute_gradient(config, batches.front()), exact)};
  Tagger model = make_model_for(config);
  mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(1e-4),
                                {.weight_storage = config.storage});
  mezzo::GradScaler scaler(
      {.init_scale = config.init_scale(), .enabled = config.autocast == torch::kHalf});
  std::vector<double> times;
  for (const Batch& batch : batches) {
    const auto begin = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    const torch::Tensor loss = forward_loss(config, model, batch);
    scaler.scale(loss).backward();
    row.skipped += scaler.step(optimizer).applied() ? 0 : 1;  // synchronizes with the device
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

/// Returns the gradient error with a single op in float32, for each op, in ascending order.
std::vector<std::pair<double, std::string>> errors_without(const Config& config, const Batch& batch,
                                                           const torch::Tensor& exact) {
  std::vector<std::pair<double, std::string>> errors;
  for (const char* const op : {"aten::linear", "aten::matmul", "aten::bmm", "aten::addmm"}) {
    Config denied = config;
    denied.overrides = mezzo::install_op_overrides(mezzo::OpOverrides(config.overrides).deny(op));
    errors.emplace_back(relative_error(compute_gradient(denied, batch), exact), op);
  }
  std::sort(errors.begin(), errors.end());
  return errors;
}

}  // namespace

int main() {
  const std::vector<Batch> batches = make_batches();
  const Batch& first = batches.front();
  using Storage = mezzo::optim::WeightStorage;
  std::vector<Config> configs = {
      {"bf16 autocast", torch::kBFloat16},
      {"fp16 autocast", torch::kHalf},
      {"bf16 weights + masters", torch::kBFloat16, true, Storage::fp32_master},
      {"bf16 weights, stochastic", torch::kBFloat16, true, Storage::stochastic_rounding}};
  const Config float32{.name = "float32"};
  const torch::Tensor exact = compute_gradient(float32, first);
  const Row reference = measure(float32, batches, exact, {});
  std::printf("%-26s %14s %12s %8s %9s\n", "config", "gradient error", "loss diff", "skipped",
              "ms/step");
  print(float32.name, reference);

  const Config* proposed = nullptr;
  double fastest = kInf;
  for (Config& config : configs) {
    Row row = measure(config, batches, exact, reference.losses);
    print(config.name, row);
    if (row.gradient_error > kMaxGradientError) {  // runs ops in float32, the most effective first
      for (const auto& [error, op] : errors_without(config, first, exact)) {
        config.overrides =
            mezzo::install_op_overrides(mezzo::OpOverrides(config.overrides).deny(op));
        row = measure(config, batches, exact, reference.losses);
        if (row.gradient_error <= kMaxGradientError) break;
      }
      print(config.name + " + overrides", row);
    }
    if (row.gradient_error > kMaxGradientError || row.milliseconds > fastest) continue;
    fastest = row.milliseconds;
    proposed = &config;
  }
  if (proposed == nullptr) return 1;

  std::printf(
      "proposed: %s, the fastest with a gradient error of at most %g; its error with one op "
      "in float32:\n",
      proposed->name.c_str(), kMaxGradientError);
  for (const auto& [error, op] : errors_without(*proposed, first, exact)) {
    std::printf("  %-14s %.3g\n", op.c_str(), error);
  }
  std::ofstream("overrides.txt") << proposed->overrides;
  return mezzo::OpOverrides::from_file("overrides.txt").entries() == proposed->overrides.entries()
             ? 0
             : 1;
}
