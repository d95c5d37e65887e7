// What a WeightCache saves against libtorch's cache of weight casts.
//
//   a hit        nanoseconds a call of a small linear op, with each cache and without any
//   an encoder   casts of weights, their bytes and the time of a training step and of an evaluation
//   of
//                a BERT-shaped encoder: 6 layers, 384 wide, 22.6 million parameters, of
//                torch::nn::Linear and torch::nn::Embedding modules
//
// Casts are counted by CastTrace. All ways run in the same process, interleaved; times are medians
// of rounds, ratios medians of the ratios within a round.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/cast_trace.h>
#include <mezzo/autocast/weight_cache.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "encoder.h"

namespace {

using bench::Encoder;
using bench::kVocabulary;
using mezzo::Autocast;
using mezzo::AutocastSetting;
using torch::kBFloat16;
using torch::kCPU;
using torch::Tensor;

constexpr int64_t kBatch = 4;
constexpr int64_t kTokens = 32;
constexpr int kMicroBatches = 4;

double seconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Way {
  std::string name;
  AutocastSetting options;
  const mezzo::WeightCache* publish = nullptr;
};

/// Weights whose matrices a publishing optimizer would write: those of the linear modules.
std::vector<Tensor> lowered_weights(const Encoder& encoder) {
  std::vector<Tensor> weights;
  for (const auto& module : encoder->modules()) {
    if (const auto* linear = module->as<torch::nn::Linear>()) weights.push_back(linear->weight);
  }
  return weights;
}

/// Stands for an optimizer: shows a write of every trainable weight, and is not part of what is
/// timed.
void step(const Encoder& encoder, const mezzo::WeightCache* publish) {
  const torch::NoGradGuard no_grad;
  for (auto& each : encoder->parameters()) {
    if (each.requires_grad()) each.mul_(1);
  }
  if (publish == nullptr) return;
  for (const auto& weight : lowered_weights(encoder)) {
    if (!weight.requires_grad()) continue;
    const auto copy = publish->buffer_for(weight, kBFloat16);
    copy.copy_(weight);
    publish->publish(weight, copy);
  }
}

struct Cost {
  int64_t casts = 0;
  int64_t bytes = 0;
  std::vector<double> times;
};

/// Of weights and activations: the latter are the same under all caches.
int64_t count_casts(const mezzo::CastTrace& trace, int64_t& bytes) {
  int64_t casts = 0;
  for (const auto& record : trace.records()) {
    casts += record.casts;
    bytes += record.bytes;
  }
  return casts;
}

using Work = std::function<void(const Way&)>;

void compare(const char* title, const std::vector<Way>& ways, const Work& work,
             const std::function<void(const Way&)>& between, int rounds) {
  std::vector<Cost> costs(ways.size());
  for (std::size_t i = 0; i < ways.size(); ++i) {
    for (int warm = 0; warm < 2; ++warm) {
      between(ways[i]);
      work(ways[i]);
    }
    between(ways[i]);
    const mezzo::CastTrace trace;
    work(ways[i]);
    costs[i].casts = count_casts(trace, costs[i].bytes);
  }
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < ways.size(); ++i) {
      between(ways[i]);
      costs[i].times.push_back(seconds([&] { work(ways[i]); }));
    }
  }
  std::printf("\n%s\n%-44s %8s %10s %10s %8s\n", title, "", "casts", "MB cast", "ms", "ratio");
  for (std::size_t i = 0; i < ways.size(); ++i) {
    std::vector<double> ratios;
    for (std::size_t r = 0; r < costs[i].times.size(); ++r) {
      ratios.push_back(costs[i].times[r] / costs[0].times[r]);
    }
    std::printf("%-44s %8lld %10.1f %10.2f %8.3f\n", ways[i].name.c_str(),
                static_cast<long long>(costs[i].casts), static_cast<double>(costs[i].bytes) / 1e6,
                1e3 * median(costs[i].times), median(ratios));
  }
}

void compare_encoders(int frozen_layers, const char* which, int rounds) {
  torch::manual_seed(1);
  Encoder encoder;
  if (frozen_layers > 0) encoder->freeze(frozen_layers);
  const auto tokens = torch::randint(kVocabulary, {kBatch, kTokens});
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const mezzo::WeightCache pinned = mezzo::install_op_overrides(mezzo::WeightCache());
  pinned.pin(encoder->parameters());
  const mezzo::WeightCache published = mezzo::install_op_overrides(mezzo::WeightCache());
  published.pin(encoder->parameters());  // what nobody publishes: biases and frozen weights
  const std::vector<Way> ways = {
      {"at::autocast's cache", {}},
      {"WeightCache", {.cache = cache}},
      {"WeightCache, pinned", {.cache = pinned}},
      {"WeightCache, published", {.cache = published}, &published},
  };
  const auto forward = [&](const Way& way) {
    const Autocast<kCPU> autocast(way.options);
    return encoder(tokens).to(torch::kFloat).pow(2).mean();
  };
  const std::string model = std::string("encoder, ") + which;
  compare((model + ": evaluation of a batch").c_str(), ways,
          [&](const Way& way) {
            const torch::NoGradGuard no_grad;
            forward(way);
          },
          [](const Way&) {}, rounds);
  const auto train = [&](int micro_batches) {
    return [&, micro_batches](const Way& way) {
      for (int i = 0; i < micro_batches; ++i) forward(way).backward();
      encoder->zero_grad();
    };
  };
  const auto between = [&](const Way& way) { step(encoder, way.publish); };
  compare((model + ": forward and backward").c_str(), ways, train(1), between, rounds);
  compare((model + ": 4 micro-batches a step").c_str(), ways, train(kMicroBatches), between,
          rounds);
}

double nanoseconds_a_call(const std::function<void()>& call) {
  constexpr int kCalls = 2000;
  return seconds([&] {
           for (int i = 0; i < kCalls; ++i) call();
         }) *
         1e9 / kCalls;
}

void compare_hits() {
  at::set_num_threads(1);
  const auto x = torch::ones({1, 4}, kBFloat16);
  const auto weight = torch::ones({4, 4}).requires_grad_();
  const auto lowered = weight.detach().to(kBFloat16).requires_grad_();
  const auto call = [&] { torch::linear(x, weight); };
  const auto no_cast = [&] { torch::linear(x, lowered); };
  const auto time = [&](const std::function<void()>& each, const AutocastSetting& options,
                        bool grad) {
    const c10::AutoGradMode mode(grad);
    const Autocast<kCPU> autocast(options);
    each();
    return nanoseconds_a_call(each);
  };
  constexpr int kRounds = 31;
  std::vector<std::pair<std::string, std::function<double()>>> cases;
  std::vector<std::vector<double>> times;
  const auto run = [&] {
    times.assign(cases.size(), {});
    for (int round = 0; round < kRounds; ++round) {
      for (std::size_t i = 0; i < cases.size(); ++i) times[i].push_back(cases[i].second());
    }
    for (std::size_t i = 0; i < cases.size(); ++i) {
      std::printf("%-60s %8.0f ns\n", cases[i].first.c_str(), median(times[i]));
    }
  };
  std::puts("linear 1x4 by 4x4, before any WeightCache exists");
  cases = {{"bfloat16 weight, nothing to cast", [&] { return time(no_cast, {}, false); }},
           {"at::autocast's cache, a hit", [&] { return time(call, {}, false); }},
           {"at::autocast's cache, a hit, with gradient", [&] { return time(call, {}, true); }}};
  run();
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  std::puts("\nand now that one does");
  cases.push_back({"WeightCache, a hit", [&] { return time(call, {.cache = cache}, false); }});
  cases.push_back(
      {"WeightCache, a hit, with gradient", [&] { return time(call, {.cache = cache}, true); }});
  cases.push_back({"no cache", [&] { return time(call, {.cache = false}, false); }});
  cases.push_back({"no cache, with gradient", [&] { return time(call, {.cache = false}, true); }});
  run();
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  const int threads = at::get_num_threads();
  compare_hits();
  at::set_num_threads(threads);
  compare_encoders(0, "all trainable", rounds);
  compare_encoders(3, "embeddings and first three layers frozen", rounds);
}
