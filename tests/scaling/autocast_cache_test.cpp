// An autocast region around several iterations: modifying weights clears libtorch's cache of weight
// casts, which otherwise lasts until the outermost region ends.

#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr float kRate = 0.5F;

torch::Tensor output_of(torch::nn::Conv2d& model, const torch::Tensor& x) {
  return model->forward(x);
}

/// A call that modifies weights.
struct Writer {
  std::string name;
  std::function<std::function<void()>(torch::nn::Conv2d&)> make;
};

template <class Optimizer>
Writer stepped_by_scaler(const char* name, bool with_options, bool enabled = true) {
  return {name, [=](torch::nn::Conv2d& model) {
            const auto optimizer = std::make_shared<Optimizer>(model->parameters(), kRate);
            const auto scaler = std::make_shared<mezzo::GradScaler>(
                mezzo::GradScalerOptions{.init_scale = 4, .enabled = enabled});
            (void)scaler->scale(torch::zeros({}));
            return [=] {
              with_options ? scaler->step(*optimizer, {.max_norm = 1e6}) : scaler->step(*optimizer);
              if (enabled) scaler->update();
            };
          }};
}

std::vector<Writer> writers() {
  using torch::optim::SGD;
  return {
      stepped_by_scaler<mezzo::optim::SGD>("mezzo's optimizer", true),
      stepped_by_scaler<SGD>("libtorch's optimizer", false),
      stepped_by_scaler<SGD>("libtorch's optimizer, with options", true),
      stepped_by_scaler<SGD>("libtorch's optimizer, disabled scaler", false, false),
      stepped_by_scaler<SGD>("libtorch's optimizer, disabled scaler, with options", true, false),
      {"mezzo's optimizer alone",
       [](torch::nn::Conv2d& model) {
         const auto optimizer = std::make_shared<mezzo::optim::SGD>(model->parameters(), kRate);
         return [=] { optimizer->step(); };
       }},
      {"MasterWeights",
       [](torch::nn::Conv2d& model) {
         const auto inner = std::make_shared<SGD>(model->parameters(), kRate);
         const auto masters = std::make_shared<mezzo::MasterWeights>(*inner);
         return [=] { (void)inner, masters->step(); };
       }},
  };
}

TEST(AutocastCacheInvalidation, WeightWriteReachesNextForward) {
  for (const Writer& writer : writers()) {
    SCOPED_TRACE(writer.name);
    torch::nn::Conv2d model(torch::nn::Conv2dOptions(2, 3, 3));
    const torch::Tensor x = torch::rand({1, 2, 5, 5});
    torch::Tensor before, inside;
    const std::function<void()> write = writer.make(model);
    {
      const mezzo::AutocastGuard<torch::kCPU> region;
      before = output_of(model, x);
      before.sum().backward();
      write();
      inside = output_of(model, x);
    }
    EXPECT_FALSE(torch::equal(before, inside));
    const mezzo::AutocastGuard<torch::kCPU> fresh;
    EXPECT_TRUE(torch::equal(inside, output_of(model, x)));
  }
}

TEST(AutocastCacheInvalidation, EmaWeightsUsedOnlyInsideGuard) {
  torch::nn::Conv2d model(torch::nn::Conv2dOptions(2, 3, 3));
  const torch::Tensor x = torch::rand({1, 2, 5, 5});
  const mezzo::Ema ema(model->parameters());
  for (const torch::Tensor& average : ema.averages()) average.add_(1);
  torch::Tensor before, averaged, after;
  {
    const mezzo::AutocastGuard<torch::kCPU> region;
    before = output_of(model, x);
    {
      const mezzo::EmaGuard scope(ema);
      averaged = output_of(model, x);
    }
    after = output_of(model, x);
  }
  EXPECT_FALSE(torch::equal(before, averaged));
  EXPECT_TRUE(torch::equal(before, after));
  const mezzo::EmaGuard scope(ema);
  const mezzo::AutocastGuard<torch::kCPU> fresh;
  EXPECT_TRUE(torch::equal(averaged, output_of(model, x)));
}

}  // namespace
