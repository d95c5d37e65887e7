// What mezzo's kernels cost on a GPU, beside ATen's as torch.amp calls them, in one process.
//
//   check      has a gradient inf or NaN, and how large are all: one read
//              beside _amp_foreach_non_finite_check_and_unscale_ and _foreach_norm
//   step       unscale, check, clip at norm 1, AdamW, next scale, clear the gradients
//              beside the chain that torch.amp documents: foreach unscale, foreach norm, foreach mul,
//              _fused_adamw_, _amp_update_scale_
//   training   forward under autocast to half, backward, and that step, of a BERT-shaped encoder
//
// Peers take turns; times are medians of CUDA's events. Bandwidth is what each needs to move at the
// least, counted once, so that a way that moves more shows a smaller number. Launches are counted
// in a captured graph; -1 where a way cannot be captured.
//
//   cuda_bench [rounds]        a JSON array on standard output

#include <mezzo/autocast/autocast.h>
#include <mezzo/kernels/gradient_passes.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/autocast_mode.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../tests/cuda/count_launches.h"
#include "../encoder.h"
#include "../optim/shapes.h"

namespace {

constexpr double kMaxNorm = 1.0;
constexpr double kScale = 65536.0;
constexpr double kLr = 1e-4;
constexpr double kDecay = 0.01;

using Tensors = std::vector<torch::Tensor>;

Tensors parameters_of(const optim_bench::Model& model) {
  torch::manual_seed(1);
  Tensors parameters;
  for (const auto& shape : model.shapes) {
    auto parameter = torch::randn(shape, torch::kCUDA);
    parameter.mutable_grad() = torch::randn_like(parameter) * kScale;
    parameters.push_back(parameter.requires_grad_());
  }
  return parameters;
}

Tensors gradients_of(const Tensors& parameters) {
  Tensors all;
  for (const torch::Tensor& parameter : parameters) all.push_back(parameter.grad());
  return all;
}

/// From gradients to new parameters.
class Stepper {
 public:
  Stepper() = default;
  Stepper(const Stepper&) = delete;
  Stepper& operator=(const Stepper&) = delete;
  virtual ~Stepper() = default;
  virtual torch::Tensor scale(const torch::Tensor& loss) = 0;
  virtual void step() = 0;
};

class Mezzo : public Stepper {
 public:
  explicit Mezzo(const Tensors& parameters)
      : optimizer_(parameters, mezzo::optim::AdamWOptions(kLr).weight_decay(kDecay)),
        scaler_({.init_scale = kScale}) {
    (void)scaler_.scale(torch::zeros({}, torch::kCUDA));
  }
  torch::Tensor scale(const torch::Tensor& loss) override { return scaler_.scale(loss); }
  void step() override {
    scaler_.step(optimizer_, {.max_norm = kMaxNorm, .zero_grad = true});
    scaler_.update();
  }

 private:
  mezzo::optim::AdamW optimizer_;
  mezzo::GradScaler scaler_;
};

/// With `found_inf` handed to _fused_adamw_, so that nothing waits for the device.
class Aten : public Stepper {
 public:
  explicit Aten(const Tensors& parameters) : parameters_(parameters) {
    for (const torch::Tensor& parameter : parameters_) {
      details_.push_back(parameter.detach());
      means_.push_back(torch::zeros_like(details_.back()));
      squares_.push_back(torch::zeros_like(details_.back()));
      steps_.push_back(torch::zeros({}, torch::kCUDA));
    }
  }
  torch::Tensor scale(const torch::Tensor& loss) override { return loss * scale_; }
  void step() override {
    const Tensors gradients = gradients_of(parameters_);
    found_inf_.zero_();
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf_, scale_.reciprocal());
    const auto norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, 2)), 2);
    at::_foreach_mul_(gradients, (kMaxNorm / (norm + 1e-6)).clamp_max(1.0));
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(details_, gradients, means_, squares_, {}, steps_, kLr, 0.9, 0.999, kDecay,
                      1e-8, /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/std::nullopt,
                      found_inf_);
    at::_amp_update_scale_(scale_, growth_tracker_, found_inf_, 2.0, 0.5, 2000);
    at::_foreach_zero_(gradients);
  }

 private:
  Tensors parameters_, details_, means_, squares_, steps_;
  torch::Tensor scale_ = torch::full({}, kScale, torch::kCUDA);
  torch::Tensor found_inf_ = torch::zeros({}, torch::kCUDA);
  torch::Tensor growth_tracker_ =
      torch::zeros({}, torch::TensorOptions(torch::kCUDA).dtype(torch::kInt));
};

/// A whole step of training.
class Training {
 public:
  Training() {
    torch::manual_seed(1);
    model_ = bench::Encoder();
    model_->to(torch::kCUDA);
    tokens_ = torch::randint(bench::kVocabulary, {16, 128}, torch::kCUDA);
  }
  Tensors parameters() { return model_->parameters(); }
  torch::Tensor loss() { return model_->forward(tokens_).to(torch::kFloat).square().mean(); }

 private:
  bench::Encoder model_ = nullptr;
  torch::Tensor tokens_;
};

struct Way {
  std::string what, peer;
  double bytes;  ///< that it has to move at the least; 0: not known
  std::function<void()> run;
  std::vector<double> milliseconds = {};
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void time_all(std::vector<Way>& ways, int rounds) {
  for (int round = -3; round < rounds; ++round) {
    for (Way& way : ways) {
      at::cuda::CUDAEvent begin(cudaEventDefault);
      at::cuda::CUDAEvent end(cudaEventDefault);
      begin.record();
      way.run();
      end.record();
      end.synchronize();
      if (round >= 0) way.milliseconds.push_back(static_cast<double>(begin.elapsed_time(end)));
    }
  }
}

int64_t launches_of(const Way& way) {
  if (way.what == "training") return -1;
  try {
    return cuda_test::count_launches(way.run);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s of %s cannot be captured: %s\n", way.what.c_str(), way.peer.c_str(),
                 error.what());
    return -1;
  }
}

void add_check_and_step(const optim_bench::Model& model, std::vector<Way>& ways,
                        std::vector<std::shared_ptr<Stepper>>& steppers) {
  const Tensors parameters = parameters_of(model);
  int64_t count = 0;
  for (const torch::Tensor& parameter : parameters) count += parameter.numel();
  const auto elements = static_cast<double>(count);
  const Tensors gradients = gradients_of(parameters);
  const auto inverse = torch::full({}, 1.0, torch::kCUDA);
  auto found = torch::zeros({}, torch::kCUDA);
  ways.push_back({"check " + model.name, "mezzo", 4 * elements,
                  [=] { (void)mezzo::detail::summarize_gradients(gradients, inverse); }});
  ways.push_back({"check " + model.name, "ATen", 4 * elements, [=]() mutable {
                    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
                    (void)at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, 2)), 2);
                  }});
  const auto add = [&](const char* peer, std::shared_ptr<Stepper> stepper) {
    steppers.push_back(stepper);
    ways.push_back({"step " + model.name, peer, 36 * elements, [stepper] { stepper->step(); }});
  };
  add("mezzo", std::make_shared<Mezzo>(parameters_of(model)));
  add("ATen", std::make_shared<Aten>(parameters_of(model)));
}

void add_training(const char* peer, bool is_mezzo, std::vector<Way>& ways,
                  std::vector<std::shared_ptr<Stepper>>& steppers) {
  const auto training = std::make_shared<Training>();
  std::shared_ptr<Stepper> stepper;
  if (is_mezzo) {
    stepper = std::make_shared<Mezzo>(training->parameters());
  } else {
    stepper = std::make_shared<Aten>(training->parameters());
  }
  steppers.push_back(stepper);
  ways.push_back({"training", peer, 0, [=] {
                    torch::Tensor loss;
                    if (is_mezzo) {
                      const mezzo::Autocast<torch::kCUDA> autocast;
                      loss = training->loss();
                    } else {
                      at::autocast::set_autocast_enabled(at::kCUDA, true);
                      loss = training->loss();
                      at::autocast::clear_cache();
                      at::autocast::set_autocast_enabled(at::kCUDA, false);
                    }
                    stepper->scale(loss).backward();
                    stepper->step();
                  }});
}

}  // namespace

int main(int argc, char** argv) {
  if (c10::cuda::device_count() == 0) {
    std::fprintf(stderr, "cuda_bench: no CUDA device; nothing was measured\n");
    return 77;
  }
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 21;
  std::vector<Way> ways;
  std::vector<std::shared_ptr<Stepper>> steppers;
  add_check_and_step(optim_bench::bert("BERT-base", 30522, 12, 768), ways, steppers);
  add_check_and_step(optim_bench::tiny_tensors(2000, 1000), ways, steppers);
  add_training("mezzo", true, ways, steppers);
  add_training("at::autocast, ATen", false, ways, steppers);
  time_all(ways, rounds);
  std::printf("[\n");
  for (const Way& way : ways) {
    const double time = median(way.milliseconds);
    std::printf(
        " {\"what\": \"%s\", \"peer\": \"%s\", \"ms\": %.4f, \"gb_per_s\": %.1f, \"launches\": "
        "%lld}%s\n",
        way.what.c_str(), way.peer.c_str(), time, way.bytes / time / 1e6,
        static_cast<long long>(launches_of(way)), &way == &ways.back() ? "" : ",");
  }
  std::printf("]\n");
}
