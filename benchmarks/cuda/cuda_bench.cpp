// Measures mezzo's kernels on a GPU, compared with a copy of as many bytes and with ATen's kernels
// as torch.amp calls them, in one process.
//
//   copy       the upper bound: one float32 tensor to another
//   check      found_inf and norm of all gradients in one read; compared with
//              _amp_foreach_non_finite_check_and_unscale_ and _foreach_norm
//   unscale    the same, and gradients multiplied in place
//   update     one parameter's step for each optimizer and weight storage; compared with
//              _fused_adamw_
//   step       unscale, check, clip at norm 1, AdamW, next scale, zero gradients; eager, and
//              replayed from a CUDA graph; compared with the calls that torch.amp documents:
//              foreach unscale, foreach norm, foreach mul, _fused_adamw_, _amp_update_scale_
//   training   forward under float16 autocast, backward, and the step, for a BERT-shaped encoder:
//              at a small batch, bound by launches, and at a large one, bound by kernels
//
// Variants of a row alternate; times are medians. `gpu_ms`, the time of the kernels alone, is
// measured after a busy stream, so that the host is ahead. `ms` begins on an idle GPU and ends with
// the last kernel. `host_us` is the time of the calls. `of_copy` is the bandwidth as a fraction of
// the copy's, computed from the fewest bytes that the operation has to move. Launches are counted
// in a captured graph, if a variant can be captured.
//
//   cuda_bench [--rounds N] [--small]     prints a line of JSON for each variant when it is done

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../tests/cuda/cuda_device.h"
#include "../encoder.h"
#include "../optim/shapes.h"

namespace {

using cuda_test::kGpu;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

constexpr double kMaxNorm = 1.0;
constexpr double kScale = 65536.0;
constexpr double kLr = 1e-4;
constexpr double kDecay = 0.01;

struct Options {
  int rounds = 11;
  bool is_small = false;  ///< small shapes, for tests; times are meaningless
};

Tensors parameters_of(const optim_bench::Model& model) {
  torch::manual_seed(1);
  Tensors parameters;
  for (const auto& shape : model.shapes) {
    auto parameter = torch::randn(shape, kGpu);
    parameter.mutable_grad() = torch::randn(shape, kGpu) * kScale;
    parameters.push_back(parameter.requires_grad_());
  }
  return parameters;
}

Tensors gradients_of(const Tensors& parameters) {
  Tensors all;
  for (const Tensor& parameter : parameters) all.push_back(parameter.grad());
  return all;
}

Tensors copies_of(const Tensors& tensors) {
  Tensors copies;
  for (const Tensor& tensor : tensors) copies.push_back(tensor.clone());
  return copies;
}

/// Updates parameters from gradients.
class Stepper {
 public:
  Stepper() = default;
  Stepper(const Stepper&) = delete;
  Stepper& operator=(const Stepper&) = delete;
  virtual ~Stepper() = default;
  virtual Tensor scale(const Tensor& loss) = 0;
  virtual void step() = 0;
};

class Mezzo : public Stepper {
 public:
  explicit Mezzo(const Tensors& parameters)
      : optimizer_(parameters, mezzo::optim::AdamWOptions(kLr).weight_decay(kDecay)),
        scaler_({.init_scale = kScale}) {
    (void)scaler_.scale(torch::zeros({}, kGpu));
  }
  Tensor scale(const Tensor& loss) override { return scaler_.scale(loss); }
  void step() override {
    scaler_.step(optimizer_, {.max_norm = kMaxNorm, .zero_grad = true});
    scaler_.update();
  }

 private:
  mezzo::optim::AdamW optimizer_;
  mezzo::GradScaler scaler_;
};

/// Passes found_inf to _fused_adamw_, without a sync.
class Aten : public Stepper {
 public:
  explicit Aten(const Tensors& parameters) : parameters_(parameters) {
    for (const Tensor& parameter : parameters_) {
      details_.push_back(parameter.detach());
      means_.push_back(torch::zeros_like(details_.back()));
      squares_.push_back(torch::zeros_like(details_.back()));
      steps_.push_back(torch::zeros({}, kGpu));
    }
  }
  Tensor scale(const Tensor& loss) override { return loss * scale_; }
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
  Tensor scale_ = torch::full({}, kScale, kGpu);
  Tensor found_inf_ = torch::zeros({}, kGpu);
  Tensor growth_tracker_ = torch::zeros({}, torch::TensorOptions(kGpu).dtype(torch::kInt));
};

/// One variant of a row.
struct Way {
  std::string peer;
  double bytes;  ///< minimum bytes moved; 0: unknown
  std::function<void()> run;
  std::function<void()> before = [] {};  ///< called before each run, not timed
  bool counts_launches = true;
  std::string error = {};  ///< the error that it threw; then it is not run again
  std::vector<double> gpu_ms = {}, ms = {}, host_us = {};
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {}

  /// Times the variants of one `what`, and prints a row for each.
  void compare(const std::string& what, std::vector<Way> ways) {
    for (int round = -3; round < options_.rounds; ++round) {
      for (Way& way : ways) {
        if (!way.error.empty()) continue;
        try {
          time(way, /*counts=*/round >= 0);
        } catch (const std::exception& error) {
          way.error = error.what();
        }
      }
    }
    for (const Way& way : ways) print(what, way);
  }

  /// Calls `work`, which compares variants. An exception does not end the other benchmarks.
  void run(const char* name, const std::function<void()>& work) {
    try {
      work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", name, error.what());
      has_failed_ = true;
    }
  }
  bool has_failed() const { return has_failed_; }

 private:
  static void time(Way& way, bool counts) {
    constexpr int64_t kCycles = 50'000'000;  // some 30 ms, in which the host runs ahead
    for (const bool is_ahead : {false, true}) {
      way.before();
      cuda_test::synchronize();
      c10::Event begin(kGpu, c10::EventFlag::BACKEND_DEFAULT);
      c10::Event end(kGpu, c10::EventFlag::BACKEND_DEFAULT);
      std::unique_ptr<cuda_test::BusyStream> busy;
      if (is_ahead) busy = std::make_unique<cuda_test::BusyStream>(kCycles);
      const auto called = std::chrono::steady_clock::now();
      begin.record(cuda_test::current_stream());
      way.run();
      end.record(cuda_test::current_stream());
      const auto returned = std::chrono::steady_clock::now();
      if (is_ahead) busy->end();
      end.synchronize();
      if (!counts) continue;
      (is_ahead ? way.gpu_ms : way.ms).push_back(begin.elapsedTime(end));
      if (is_ahead) continue;
      way.host_us.push_back(std::chrono::duration<double, std::micro>(returned - called).count());
    }
  }

  void print(const std::string& what, const Way& way) {
    if (!way.error.empty()) {
      std::fprintf(stderr, "%s of %s: %s\n", what.c_str(), way.peer.c_str(), way.error.c_str());
      std::printf("{\"what\": \"%s\", \"peer\": \"%s\", \"failed\": true}\n", what.c_str(),
                  way.peer.c_str());
      std::fflush(stdout);
      has_failed_ = true;
      return;
    }
    const double gpu_ms = median(way.gpu_ms);
    const double speed = way.bytes / gpu_ms / 1e6;
    if (what == "copy") copy_speed_ = speed;
    std::printf(
        "{\"what\": \"%s\", \"peer\": \"%s\", \"gpu_ms\": %.4f, \"ms\": %.4f, \"host_us\": %.1f",
        what.c_str(), way.peer.c_str(), gpu_ms, median(way.ms), median(way.host_us));
    if (way.bytes > 0) {
      std::printf(", \"gb_per_s\": %.1f", speed);
      if (copy_speed_ > 0) std::printf(", \"of_copy\": %.3f", speed / copy_speed_);
    }
    if (way.counts_launches) print_launches(way);
    std::printf("}\n");
    std::fflush(stdout);
  }

  static void print_launches(const Way& way) {
    try {
      cuda_test::synchronize();
      const auto launches = static_cast<long long>(cuda_test::count_launches(way.run));
      std::printf(", \"launches\": %lld", launches);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s cannot be captured: %s\n", way.peer.c_str(), error.what());
    }
  }

  Options options_;
  double copy_speed_ = 0;
  bool has_failed_ = false;
};

// --- One tensor --------------------------------------------------------------------------------

void copies(Bench& bench, int64_t count) {
  const Tensor from = torch::randn({count}, kGpu);
  const Tensor to = torch::empty_like(from);
  bench.compare("copy", {{"copy_", 8.0 * static_cast<double>(count), [=] { to.copy_(from); }}});
}

void gradient_passes(Bench& bench, int64_t count) {
  for (const auto& [name, dtype] :
       {std::pair("float", torch::kFloat), std::pair("half", torch::kHalf),
        std::pair("bfloat16", torch::kBFloat16)}) {
    const Tensors gradients{torch::randn({count}, kGpu).to(dtype)};
    const double bytes = static_cast<double>(count * gradients[0].element_size());
    const Tensor one = torch::ones({}, kGpu);
    Tensor found = torch::zeros({}, kGpu);
    auto aten_unscale = [=]() mutable {
      at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, one);
    };
    bench.compare(
        std::string("check ") + name,
        {{"mezzo", bytes, [=] { (void)mezzo::detail::compute_grad_stats(gradients, one); }},
         {"ATen", bytes, [=]() mutable {
            aten_unscale();
            (void)at::_foreach_norm(gradients, 2);
          }}});
    bench.compare(std::string("unscale ") + name,
                  {{"mezzo", 2 * bytes,
                    [=]() mutable { mezzo::detail::unscale_and_check_(gradients, found, one); }},
                   {"ATen", 2 * bytes, aten_unscale}});
  }
}

/// A step of one parameter, without a scaler.
template <class Optimizer, class... Arguments>
Way update(torch::ScalarType dtype, int64_t count, double bytes_each,
           const Arguments&... arguments) {
  const Tensor x = torch::randn({count}, kGpu).to(dtype);
  x.mutable_grad() = torch::randn({count}, kGpu).to(dtype);
  const auto optimizer = std::make_shared<Optimizer>(Tensors{x}, arguments...);
  return {"mezzo", bytes_each * static_cast<double>(count), [=] { (void)optimizer->step(); }};
}

Way aten_update(torch::ScalarType dtype, int64_t count, double bytes_each) {
  const auto options = torch::dtype(dtype).device(kGpu);
  const Tensors x{torch::randn({count}, kGpu).to(dtype)},
      gradient{torch::randn({count}, kGpu).to(dtype)};
  const Tensors mean{torch::zeros({count}, options)}, square{torch::zeros({count}, options)};
  const Tensors steps{torch::ones({}, kGpu)};
  return {"ATen", bytes_each * static_cast<double>(count), [=] {
            at::_fused_adamw_(x, gradient, mean, square, {}, steps, kLr, 0.9, 0.999, kDecay, 1e-8,
                              /*amsgrad=*/false, /*maximize=*/false);
          }};
}

void updates(Bench& bench, int64_t count) {
  using namespace mezzo::optim;
  const AdamWOptions adamw(kLr);
  for (const auto& [name, dtype, bytes] :
       {std::tuple("update AdamW float", torch::kFloat, 28.0),
        std::tuple("update AdamW half", torch::kHalf, 14.0),
        std::tuple("update AdamW bfloat16", torch::kBFloat16, 14.0)}) {
    bench.compare(name,
                  {update<AdamW>(dtype, count, bytes, adamw), aten_update(dtype, count, bytes)});
  }
  for (const auto& [name, storage, bytes] :
       {std::tuple("update AdamW bfloat16, master", WeightStorage::fp32_master, 28.0),
        std::tuple("update AdamW bfloat16, split master", WeightStorage::split_master, 26.0),
        std::tuple("update AdamW bfloat16, stochastic", WeightStorage::stochastic_rounding,
                   14.0)}) {
    const WeightStorageOptions weights{.weight_storage = storage, .seed = 1};
    bench.compare(name, {update<AdamW>(torch::kBFloat16, count, bytes, adamw, weights)});
  }
  bench.compare("update Lion float", {update<Lion>(torch::kFloat, count, 20.0, LionOptions(kLr))});
  bench.compare("update SGD float, momentum",
                {update<SGD>(torch::kFloat, count, 20.0, SGDOptions(kLr).momentum(0.9))});
  bench.compare("update AdamW8bit float", {update<AdamW8bit>(torch::kFloat, count, 16.0, adamw)});
}

// --- Whole steps -------------------------------------------------------------------------------

/// The step as a CUDA graph, captured after one eager run.
Way replayed(const std::shared_ptr<Stepper>& stepper, double bytes, std::function<void()> before) {
  const c10::Stream stream = cuda_test::new_stream();
  const c10::StreamGuard guard(stream);
  stepper->step();
  stream.synchronize();
  const auto graph = std::make_shared<cuda_test::Graph>();
  graph->capture_begin();
  stepper->step();
  graph->capture_end();
  return {"mezzo, replayed", bytes, [stepper, graph] { graph->replay(); }, std::move(before),
          /*counts_launches=*/false};
}

void steps(Bench& bench, const optim_bench::Model& model) {
  int64_t count = 0;
  for (const Tensor& parameter : parameters_of(model)) count += parameter.numel();
  const auto elements = static_cast<double>(count);
  {
    const Tensors gradients = gradients_of(parameters_of(model));
    const Tensor one = torch::ones({}, kGpu);
    Tensor found = torch::zeros({}, kGpu);
    bench.compare(
        "check " + model.name,
        {{"mezzo", 4 * elements, [=] { (void)mezzo::detail::compute_grad_stats(gradients, one); }},
         {"ATen", 4 * elements, [=]() mutable {
            at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, one);
            (void)at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, 2)), 2);
          }}});
  }
  // A step zeroes the gradients: each needs new ones.
  const auto refilled = [&](const Tensors& parameters) {
    return [to = gradients_of(parameters), from = copies_of(gradients_of(parameters))] {
      at::_foreach_copy_(to, from);
    };
  };
  const Tensors own = parameters_of(model), captured = parameters_of(model),
                atens = parameters_of(model);
  const auto stepper = std::make_shared<Mezzo>(own);
  const auto chain = std::make_shared<Aten>(atens);
  std::vector<Way> ways{{"mezzo", 36 * elements, [=] { stepper->step(); }, refilled(own)}};
  cuda_test::synchronize();
  ways.push_back(replayed(std::make_shared<Mezzo>(captured), 36 * elements, refilled(captured)));
  ways.push_back({"ATen", 36 * elements, [=] { chain->step(); }, refilled(atens)});
  bench.compare("step " + model.name, std::move(ways));
}

// --- Training ----------------------------------------------------------------------------------

/// Forward, backward and step of an encoder.
template <class OwnStepper>
Way training(const char* peer, const bench::EncoderSizes& sizes, int64_t batch, int64_t length) {
  torch::manual_seed(1);
  bench::Encoder model(sizes);
  model->to(torch::Device(kGpu, 0));
  const Tensor tokens = torch::randint(sizes.vocabulary, {batch, length}).to(kGpu);
  const auto stepper = std::make_shared<OwnStepper>(model->parameters());
  auto loss_of = [=]() mutable { return model->forward(tokens).to(torch::kFloat).square().mean(); };
  auto run = [=]() mutable {
    Tensor loss;
    if constexpr (std::is_same_v<OwnStepper, Mezzo>) {
      const mezzo::AutocastGuard<torch::kCUDA> autocast;
      loss = loss_of();
    } else {
      at::autocast::set_autocast_enabled(at::kCUDA, true);
      loss = loss_of();
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCUDA, false);
    }
    stepper->scale(loss).backward();
    stepper->step();
  };
  return {peer, 0, run, [] {}, /*counts_launches=*/false};
}

void trainings(Bench& bench, bool is_small) {
  const bench::EncoderSizes sizes =
      is_small ? bench::EncoderSizes{50, 24, 1, 12, 16} : bench::EncoderSizes{};
  for (const int64_t batch : is_small ? std::vector<int64_t>{2} : std::vector<int64_t>{16, 256}) {
    bench.compare("training, batch " + std::to_string(batch),
                  {training<Mezzo>("mezzo", sizes, batch, is_small ? 8 : 128),
                   training<Aten>("at::autocast, ATen", sizes, batch, is_small ? 8 : 128)});
  }
}

/// Returns whether all variants were timed.
bool run_all(const Options& options) {
  using optim_bench::bert;
  using optim_bench::tiny_tensors;
  Bench bench(options);
  const bool is_small = options.is_small;
  const int64_t count = is_small ? 1000 : int64_t{1} << 27;
  bench.run("copy", [&] { copies(bench, count); });
  bench.run("steps of BERT", [&] {
    steps(bench, is_small ? bert("BERT", 50, 1, 8) : bert("BERT-base", 30522, 12, 768));
  });
  bench.run("steps of small tensors",
            [&] { steps(bench, is_small ? tiny_tensors(5, 10) : tiny_tensors(2000, 1000)); });
  bench.run("training", [&] { trainings(bench, is_small); });
  bench.run("gradients", [&] { gradient_passes(bench, count); });
  bench.run("updates", [&] { updates(bench, count); });
  return !bench.has_failed();
}

}  // namespace

#ifndef MEZZO_CUDA_EMULATION
int main(int argc, char** argv) {
  if (!cuda_test::has_gpu()) {
    std::fprintf(stderr, "cuda_bench: libtorch sees no CUDA device; nothing was measured\n");
    return 77;
  }
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    options.is_small = options.is_small || word == "--small";
    if (word == "--rounds" && i + 1 < argc) options.rounds = std::max(1, std::atoi(argv[i + 1]));
  }
  return run_all(options) ? 0 : 1;
}
#endif
