#pragma once

#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace test_support {

struct TrainingOptions {
  int parameters = 3;
  int64_t elements = 50;  ///< of the first; others have a few more
  at::ScalarType dtype = at::kFloat;
  std::optional<at::ScalarType> gradient_dtype{};  ///< default: that of the parameters
  mezzo::optim::AdamWOptions adamw = mezzo::optim::AdamWOptions(0.1);
  mezzo::optim::WeightStorageOptions weights{};
  double max_norm = 5.0;
  bool unscales = false;           ///< calls unscale_ before the step
  bool has_skip_callback = false;  ///< sets on_skip
};

/// Parameters whose gradients are the scaled `input`, with AdamW and GradScaler, on any device.
class Training {
 public:
  explicit Training(at::Device device, const TrainingOptions& options = {})
      : input(at::ones({}, at::device(device))),
        options_(options),
        parameters_(parameters_on(device, options)),
        optimizer_(parameters_, options.adamw, options.weights),
        scaler_({.init_scale = 4, .growth_interval = 2}) {
    scaler_.on_skip(nullptr);
    if (options.has_skip_callback) scaler_.on_skip([](const mezzo::SkippedStep&) {});
    optimizer_.set_lr_factors({1.0, 0.5, 0.25, 1.0});
  }

  /// Runs an iteration in which every unscaled gradient is `input`.
  mezzo::StepResult iterate() {
    const at::Tensor scaled = scaler_.scale(input);
    for (const at::Tensor& parameter : parameters_) {
      const at::ScalarType dtype = options_.gradient_dtype.value_or(parameter.scalar_type());
      const at::Tensor gradient = scaled.to(dtype).expand_as(parameter);
      if (parameter.grad().defined()) {
        parameter.mutable_grad().copy_(gradient);
      } else {
        parameter.mutable_grad() = gradient.contiguous();
      }
    }
    if (options_.unscales) scaler_.unscale_(optimizer_);
    const mezzo::StepResult result = scaler_.step(optimizer_, {.max_norm = options_.max_norm});
    scaler_.update();
    return result;
  }

  at::Tensor weights() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : parameters_) {
      all.push_back(parameter.detach().flatten().to(at::kCPU, at::kDouble));
    }
    return at::cat(all);
  }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  mezzo::optim::AdamW& optimizer() { return optimizer_; }
  mezzo::GradScaler& scaler() { return scaler_; }
  int64_t applied_steps() const { return optimizer_.applied_steps(); }
  double scale() const { return scaler_.get_scale(); }
  void set_scale(double scale) {
    (void)scaler_.scale(input);
    scaler_.update(scale);
  }

  at::Tensor input;

 private:
  static std::vector<at::Tensor> parameters_on(at::Device device, const TrainingOptions& options) {
    std::vector<at::Tensor> all;
    for (int i = 0; i < options.parameters; ++i) {
      const at::Tensor values = at::linspace(-1, 1, options.elements + i % 5);
      all.push_back(values.to(options.dtype).to(device));
    }
    return all;
  }

  TrainingOptions options_;
  std::vector<at::Tensor> parameters_;
  mezzo::optim::AdamW optimizer_;
  mezzo::GradScaler scaler_;
};

/// Compares a training on a device with one on the CPU.
inline void expect_same(const Training& device, const Training& cpu) {
  EXPECT_TRUE(at::allclose(device.weights(), cpu.weights(), 1e-6, 1e-7));
  EXPECT_EQ(device.applied_steps(), cpu.applied_steps());
  EXPECT_EQ(device.scale(), cpu.scale());
}

inline void expect_same(const mezzo::StepResult& device, const mezzo::StepResult& cpu) {
  EXPECT_EQ(device.applied(), cpu.applied());
  EXPECT_EQ(device.scale(), cpu.scale());
  if (!cpu.applied()) return;
  EXPECT_NEAR(*device.grad_norm(), *cpu.grad_norm(), 1e-9 * *cpu.grad_norm());
  EXPECT_EQ(*device.grad_max_abs(), *cpu.grad_max_abs());
  EXPECT_EQ(device.was_unscaled(), cpu.was_unscaled());
}

}  // namespace test_support
