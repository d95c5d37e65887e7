// Memory and time of variants of mixed-precision training.
//
//   memory   bytes per parameter allocated by libtorch: between two steps, gradients included, and the
//            peak within a step. Of eight bias-free Linear modules of 1024 x 1024 with one row of input,
//            so that activations are negligible.
//   BERT-base  the same for the whole model (109 million parameters) and one sentence of 32 tokens, with and
//            without StepInBackward.
//   a step   forward, backward and update of a BERT-shaped encoder with a small batch, where weight casts
//            dominate.
//
// Gradients are zeroed in place. Rounds are interleaved, and ratios are medians of each round's
// ratio.
//
//   training_step_bench [rounds]     0 rounds: only memory

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/step_in_backward.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "counting_allocator.h"
#include "encoder.h"

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::WeightStorage;
using torch::kBFloat16;
using torch::kFloat;

/// A variant: model dtype, autocast, optimizer.
struct Way {
  std::string name;
  torch::ScalarType model = kFloat;
  bool autocast = false;
  bool is_torchs = false;
  WeightStorage storage = WeightStorage::plain;
  bool is_8bit = false;
  bool in_backward = false;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all{
      {.name = "float32", .model = kFloat},
      {.name = "O1: at::autocast, torch::optim::AdamW", .autocast = true, .is_torchs = true},
      {.name = "O1: at::autocast, mezzo's AdamW", .autocast = true},
      {.name = "O2: bfloat16, master", .model = kBFloat16, .storage = WeightStorage::fp32_master},
      {.name = "bfloat16, split master",
       .model = kBFloat16,
       .storage = WeightStorage::split_master},
      {.name = "bfloat16, stochastic rounding",
       .model = kBFloat16,
       .storage = WeightStorage::stochastic_rounding},
  };
  return all;
}

std::vector<Way> bert_base_ways() {
  std::vector<Way> all;
  for (const bool is_8bit : {false, true}) {
    for (const bool in_backward : {false, true}) {
      all.push_back({.name = std::string(is_8bit ? "AdamW8bit" : "AdamW, stochastic rounding") +
                             (in_backward ? ", in backward" : ""),
                     .model = kBFloat16,
                     .storage = WeightStorage::stochastic_rounding,
                     .is_8bit = is_8bit,
                     .in_backward = in_backward});
    }
  }
  return all;
}

/// The training of a model with one variant.
template <class Model>
class Training {
 public:
  Training(const Way& way, Model model) : way_(way), model_(std::move(model)) {
    model_->to(way.model);
    if (way.is_torchs) {
      optimizer_ = std::make_unique<torch::optim::AdamW>(model_->parameters(), 1e-4);
    } else if (way.is_8bit) {
      optimizer_ = std::make_unique<mezzo::optim::AdamW8bit>(model_->parameters(), 1e-4);
    } else {
      optimizer_ = std::make_unique<AdamW>(
          model_->parameters(), AdamWOptions(1e-4),
          mezzo::optim::WeightStorageOptions{.weight_storage = way.storage});
    }
    if (way.in_backward) in_backward_ = std::make_unique<mezzo::StepInBackward>(*optimizer_);
  }

  void step(const torch::Tensor& input) {
    {
      std::optional<mezzo::AutocastGuard<torch::kCPU>> autocast;
      if (way_.autocast) autocast.emplace();
      model_->forward(input).to(kFloat).square().mean().backward();
    }
    if (in_backward_ != nullptr) {
      in_backward_->step();
    } else if (way_.is_torchs) {
      optimizer_->step();
      optimizer_->zero_grad(/*set_to_none=*/false);
    } else {
      scaler_.step(*optimizer_, {.zero_grad = true});
    }
  }

  const Way& way() const { return way_; }

 private:
  Way way_;
  Model model_;
  mezzo::GradScaler scaler_{{.enabled = false}};
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<mezzo::StepInBackward> in_backward_;
};

/// Trains the model that `make` returns, and prints the bytes a parameter.
template <class MakeModel>
void print_memory(const Way& way, const torch::Tensor& input, const MakeModel& make) {
  auto& allocator = bench::counting_allocator();
  const int64_t before = allocator.in_use();
  auto model = make();
  int64_t num_parameters = 0;
  for (const auto& parameter : model->parameters()) num_parameters += parameter.numel();
  Training training(way, model);
  for (int step = 0; step < 3; ++step) training.step(input);
  allocator.reset_peak();
  const int64_t between = allocator.in_use();
  training.step(input);
  const auto a_parameter = [&](int64_t bytes) {
    return static_cast<double>(bytes - before) / static_cast<double>(num_parameters);
  };
  std::printf("%-40s %16.2f %16.2f\n", way.name.c_str(), a_parameter(between),
              a_parameter(allocator.peak()));
}

void print_memory() {
  std::printf("%-40s %16s %16s\n", "bytes a parameter", "between steps", "most in a step");
  for (const Way& way : ways()) {
    print_memory(way, torch::randn({1, 1024}).to(way.model), [] {
      torch::nn::Sequential model;
      for (int layer = 0; layer < 8; ++layer) {
        model->push_back(torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false)));
      }
      return model;
    });
  }
  std::printf("\n%-40s %16s %16s\n", "BERT-base, bytes a parameter", "between steps",
              "most in a step");
  for (const Way& way : bert_base_ways()) {
    print_memory(way, torch::randint(bench::kVocabulary, {1, 32}),
                 [] { return bench::Encoder(bench::EncoderSizes{.width = 768, .layers = 12}); });
  }
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void print_steps(int64_t batch, int rounds) {
  const auto tokens = torch::randint(bench::kVocabulary, {batch, 32});
  std::vector<std::unique_ptr<Training<bench::Encoder>>> all;
  std::vector<std::vector<double>> times(ways().size());
  for (const Way& way : ways()) {
    torch::manual_seed(1);
    all.push_back(std::make_unique<Training<bench::Encoder>>(way, bench::Encoder()));
  }
  for (int round = -2; round < rounds; ++round) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto start = std::chrono::steady_clock::now();
      all[i]->step(tokens);
      const std::chrono::duration<double, std::milli> time =
          std::chrono::steady_clock::now() - start;
      if (round >= 0) times[i].push_back(time.count());
    }
  }
  std::printf("\n%-40s %8s %24s\n", ("a step of " + std::to_string(batch) + " x 32 tokens").c_str(),
              "ms", "x at::autocast, mezzo's");
  constexpr std::size_t kReference = 2;
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::vector<double> ratios;
    for (std::size_t r = 0; r < times[i].size(); ++r) {
      ratios.push_back(times[i][r] / times[kReference][r]);
    }
    std::printf("%-40s %8.2f %24.3f\n", all[i]->way().name.c_str(), median(times[i]),
                median(ratios));
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  bench::counting_allocator();
  std::printf("%d threads, %d rounds\n\n", at::get_num_threads(), rounds);
  print_memory();
  if (rounds == 0) return 0;
  print_steps(1, rounds);
  print_steps(8, rounds);
}
