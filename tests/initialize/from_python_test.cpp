// The right-hand column of examples/from_python/README.md: what it shows has to compile and run.
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <mezzo/autocast.h>
#include <mezzo/autocast_module.h>
#include <mezzo/cast_functions.h>
#include <mezzo/initialize.h>
#include <mezzo/loss_scale_optimizer.h>
#include <mezzo/op_policy.h>

#include <vector>

namespace {

struct FromPython : testing::Test {
  torch::nn::Linear model{4, 4};
  torch::nn::Linear other{4, 4};
  torch::optim::SGD optimizer{model->parameters(), 0.1};
  torch::optim::SGD of_other{other->parameters(), 0.1};
  torch::Tensor input = torch::rand({2, 4});
  bool flag = true;
};

TEST_F(FromPython, AutocastIsWrittenAsTheTableSays) {
  static_assert(mezzo::autocast_accepts(torch::kCUDA, torch::kHalf));
  {
    mezzo::AutocastGuard autocast(torch::kCPU, torch::kBFloat16, {.enabled = flag});
    EXPECT_TRUE(at::autocast::is_autocast_enabled(torch::kCPU));
    EXPECT_EQ(at::autocast::get_autocast_dtype(torch::kCPU), torch::kBFloat16);
    mezzo::Autocast<torch::kCPU> uncached({.cache_enabled = false});
    EXPECT_EQ(model(input).scalar_type(), torch::kBFloat16);
    mezzo::Autocast<torch::kCPU> exact({.enabled = false});
    EXPECT_EQ(model(input).scalar_type(), torch::kFloat);
  }
  const auto forward = [&](const torch::Tensor& x) { return model(x); };
  EXPECT_EQ(mezzo::autocast<torch::kCPU>(forward)(input).scalar_type(), torch::kBFloat16);
  mezzo::AutocastModule net(model, {.device = torch::kCPU});
  EXPECT_EQ(net(input).scalar_type(), torch::kBFloat16);
  {
    mezzo::AutocastGuard autocast(mezzo::autocast_from_env(torch::kCPU));
    mezzo::Autocast<torch::kCPU, torch::kHalf> half;
    const auto add = [](const torch::Tensor& a, const torch::Tensor& b) { return a + b; };
    const torch::Tensor low = input.to(torch::kBFloat16);
    EXPECT_EQ(mezzo::half_function(add)(low, input).scalar_type(), torch::kHalf);
    EXPECT_EQ(mezzo::float_function(add)(low, low).scalar_type(), torch::kFloat);
    EXPECT_EQ(mezzo::promote_function(add)(low, input).scalar_type(), torch::kFloat);
  }
}

TEST_F(FromPython, GradScalerIsWrittenAsTheTableSays) {
  mezzo::GradScaler scaler(mezzo::GradScalerOptions().init_scale(1024).enabled(flag));
  const auto scaled = scaler.scale(std::vector{model(input).sum(), other(input).sum()});
  (scaled[0] + scaled[1]).backward();
  scaler.unscale_(optimizer);
  torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
  const auto result = scaler.step(optimizer);
  EXPECT_TRUE(result.ran() && result.value().has_value());
  EXPECT_TRUE(scaler.step(of_other, {.max_norm = 1.0}).ran());
  scaler.update(512.0);
  EXPECT_EQ(scaler.get_scale(), 512);
  scaler.set_growth_factor(4);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(100);
  scaler.load_state_dict(scaler.state_dict());
  EXPECT_EQ(scaler.get_growth_factor(), 4);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
  EXPECT_EQ(scaler.get_growth_interval(), 100);
  EXPECT_TRUE(scaler.is_enabled());
}

TEST_F(FromPython, ApexIsWrittenAsTheTableSays) {
  const auto scale = mezzo::LossScale::dynamic({.min_scale = 1, .max_scale = 1048576});
  EXPECT_EQ(mezzo::OptLevel::parse("O2", {.loss_scale = scale}).loss_scale().max_scale(), 1048576);
  const auto policy =
      mezzo::OpPolicy().allow("aten::bmm").deny("aten::sum").promote("aten::add.Tensor");
  auto amp = mezzo::initialize({model, other}, {optimizer, of_other}, mezzo::OptLevel::O1_bf16(),
                               {.num_losses = 3, .verbosity = 0, .policy = policy});
  amp.scale_loss(amp(model, input).sum(), optimizer, {.delay_unscale = true});
  amp.scale_loss(amp(other, amp(model, input)).sum(), {optimizer, of_other}, {.loss_id = 1});
  amp.scale_loss(amp(model, input).sum(), optimizer,
                 [&](const torch::Tensor& loss) { loss.backward({}, true); });
  torch::nn::utils::clip_grad_norm_(amp.master_params(optimizer), 1.0);
  EXPECT_TRUE(amp.step(optimizer).ran());
  amp.zero_grad(of_other);
  amp.load_state_dict(amp.state_dict());
  EXPECT_EQ(&amp.optimizer(optimizer), &optimizer);
}

TEST_F(FromPython, KerasIsWrittenAsTheTableSays) {
  const mezzo::Precision precision({.compute = torch::kHalf});
  EXPECT_EQ(precision.compute(), torch::kHalf);
  EXPECT_EQ(precision.param(), torch::kFloat);
  mezzo::LossScaleOptimizer wrapped(optimizer,
                                    {.initial_scale = 32768, .dynamic_growth_steps = 2000});
  wrapped.scale(model(input).sum()).backward();
  wrapped.unscale_();
  EXPECT_TRUE(wrapped.step({.max_norm = 1.0}).ran());
  EXPECT_EQ(wrapped.iterations(), 1);
  EXPECT_EQ(wrapped.loss_scale(), wrapped.initial_scale());
  EXPECT_TRUE(wrapped.dynamic());
  EXPECT_EQ(wrapped.inner_optimizer().param_groups()[0].options().get_lr(), 0.1);
  auto fixed = mezzo::enable_mixed_precision(of_other, {.initial_scale = 128, .dynamic = false});
  EXPECT_EQ(fixed.loss_scale(), 128);
}

}  // namespace
