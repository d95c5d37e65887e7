// The right-hand column of docs/porting.md: what it shows has to compile and run.
#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/autograd_function.h>
#include <mezzo/autocast/cast_functions.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/levels/initialize.h>
#include <mezzo/levels/loss_scale_optimizer.h>
#include <mezzo/optim/master_weights.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <thread>
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
    mezzo::AutocastGuard autocast(
        {.device = torch::kCPU, .dtype = torch::kBFloat16, .enabled = flag});
    EXPECT_TRUE(at::autocast::is_autocast_enabled(torch::kCPU));
    EXPECT_EQ(at::autocast::get_autocast_dtype(torch::kCPU), torch::kBFloat16);
    mezzo::Autocast<torch::kCPU> uncached({.cache = false});
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

struct Multiply : mezzo::AutocastFunction<Multiply> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor a,
                               torch::Tensor b) {
    ctx->save_for_backward({a, b});
    return a.mm(b);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0])};
  }
};

TEST_F(FromPython, FunctionsCheckpointsAndThreadsAreWrittenAsTheTableSays) {
  const torch::Tensor a = torch::rand({4, 4}, torch::requires_grad());
  mezzo::Autocast<torch::kCPU> autocast;
  const torch::Tensor lowered = Multiply::apply(a, input.t());
  EXPECT_EQ(lowered.scalar_type(), torch::kBFloat16);
  const torch::Tensor exact = mezzo::AutocastFunction<Multiply, torch::kFloat>::apply(a, input.t());
  EXPECT_EQ(exact.scalar_type(), torch::kFloat);
  (lowered.sum() + exact.sum()).backward();
  EXPECT_TRUE(a.grad().defined());
  EXPECT_EQ(mezzo::activation_checkpoint(model, input).scalar_type(), torch::kBFloat16);
  const auto add = [](const torch::Tensor& x, const torch::Tensor& y) { return x + y; };
  EXPECT_EQ(mezzo::cast_inputs(torch::kHalf, add)(input, input).scalar_type(), torch::kHalf);
  at::autocast::clear_cache();
  torch::ScalarType in_thread = torch::kFloat;
  std::thread([&, state = mezzo::AutocastState::capture()] {
    const mezzo::AutocastState::Scope scope(state);
    in_thread = model(input).scalar_type();
  }).join();
  EXPECT_EQ(in_thread, torch::kBFloat16);
}

TEST_F(FromPython, OpListsDoWhatTheTableSays) {
  const torch::Tensor low = torch::ones({2, 4}, torch::kBFloat16);
  const torch::Tensor half = torch::ones({2, 4}, torch::kHalf);
  {
    mezzo::Autocast<torch::kCPU> autocast;
    EXPECT_EQ(low.sum().scalar_type(), torch::kBFloat16);
    EXPECT_EQ(input.mul(input).scalar_type(), torch::kFloat);
  }
  mezzo::Autocast<torch::kCPU> autocast(
      {.policy = mezzo::install_op_overrides(mezzo::OpPolicy()
                                                 .deny("aten::sum")
                                                 .promote("aten::add.Tensor")
                                                 .allow("aten::mul.Tensor"))});
  EXPECT_EQ(low.sum().scalar_type(), torch::kFloat);
  EXPECT_EQ((low + half).scalar_type(), torch::kFloat);
  EXPECT_EQ(input.mul(input).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(model(input).scalar_type(), torch::kBFloat16);
  mezzo::Autocast<torch::kCPU> exact_layers(
      {.policy = mezzo::install_op_overrides(
           mezzo::OpPolicy().deny("aten::addmm").deny("aten::matmul"))});
  torch::nn::Linear without_bias(torch::nn::LinearOptions(4, 4).bias(false));
  for (const torch::Tensor& x : {input, input[0], torch::rand({2, 3, 4})}) {
    EXPECT_EQ(model(x).scalar_type(), torch::kFloat);
    EXPECT_EQ(without_bias(x).scalar_type(), torch::kFloat);
  }
}

// As docs/porting.md says, libtorch's layers do not call aten::linear.
TEST_F(FromPython, LinearLayersOfLibtorchDoNotCallTheOpLinear) {
  mezzo::Autocast<torch::kCPU> autocast(
      {.policy = mezzo::install_op_overrides(mezzo::OpPolicy().deny("aten::linear"))});
  EXPECT_EQ(torch::linear(input, model->weight, model->bias).scalar_type(), torch::kFloat);
  EXPECT_EQ(model(input).scalar_type(), torch::kBFloat16);
}

TEST_F(FromPython, GradScalerIsWrittenAsTheTableSays) {
  mezzo::GradScaler scaler({.init_scale = 1024,
                            .growth_factor = 2,
                            .backoff_factor = 0.5,
                            .growth_interval = 2000,
                            .enabled = flag});
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
  std::stringstream file;
  torch::save(scaler, file);
  torch::load(scaler, file);
  EXPECT_EQ(scaler.get_scale(), 512);
}

TEST_F(FromPython, ApexIsWrittenAsTheTableSays) {
  const auto scale = mezzo::LossScale::dynamic({.min_scale = 1, .max_scale = 1048576});
  EXPECT_EQ(mezzo::OptLevel::parse("O2", {.loss_scale = scale}).loss_scale().max_scale, 1048576);
  const std::string choice = "dynamic";
  EXPECT_EQ(mezzo::OptLevel::parse("O3", {.loss_scale = choice}).loss_scale().kind,
            mezzo::LossScaleKind::dynamic);
  EXPECT_EQ(mezzo::OptLevel::O2({.loss_scale = 128.0}).loss_scale().init_scale, 128);
  const auto policy = mezzo::install_op_overrides(
      mezzo::OpPolicy().allow("aten::bmm").deny("aten::sum").promote("aten::add.Tensor"));
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
  EXPECT_EQ(&amp.optimizer(optimizer).optimizer(), &optimizer);
  EXPECT_EQ(amp.scaler(0).get_scale(), 1);
  std::stringstream file;
  torch::save(amp, file);
  torch::load(amp, file);
}

TEST_F(FromPython, ApexsOlderAndRarerCallsAreWrittenAsTheTableSays) {
  const mezzo::InitializeOptions quiet{.verbosity = 0};
  {
    torch::nn::Linear evaluated(4, 4);
    auto amp = mezzo::initialize(evaluated, mezzo::OptLevel::O3(), quiet);
    EXPECT_EQ(amp(evaluated, input).scalar_type(), torch::kFloat);
    EXPECT_EQ(evaluated->weight.scalar_type(), torch::kHalf);
  }
  {
    torch::nn::Linear cast(4, 4);
    torch::optim::SGD sgd(cast->parameters(), 0.1);
    auto amp = mezzo::initialize(cast, sgd, mezzo::OptLevel::O2(), quiet);
    std::stringstream file;
    torch::save(amp.optimizer(sgd), file);
    torch::load(amp.optimizer(sgd), file);
  }
  model->to(torch::kHalf);
  mezzo::MasterWeights masters(optimizer);
  mezzo::GradScaler scaler;
  scaler.scale(model(input.to(torch::kHalf)).to(torch::kFloat).mean()).backward();
  EXPECT_TRUE(scaler.step(masters, {.max_norm = 1.0}).ran());
  scaler.update();
}

// A gradient penalty: the gradient in it is unscaled out of place, in float32.
TEST_F(FromPython, AGradientPenaltyIsWrittenAsTheTextSays) {
  auto amp = mezzo::initialize(model, optimizer, mezzo::OptLevel::O1_bf16({.loss_scale = 128.0}),
                               {.verbosity = 0});
  const torch::Tensor loss = amp(model, input).to(torch::kFloat).pow(2).mean();
  std::vector<torch::Tensor> gradients = torch::autograd::grad(
      {amp.scaler().scale(loss)}, model->parameters(), {}, /*retain_graph=*/true,
      /*create_graph=*/true);
  const double inverse = 1.0 / amp.scaler().get_scale();
  torch::Tensor norm = torch::zeros({});
  for (const torch::Tensor& gradient : gradients) {
    norm = norm + (gradient.to(torch::kFloat) * inverse).pow(2).sum();
  }
  EXPECT_GT(norm.item<double>(), 0);
  amp.scale_loss(loss + norm.sqrt(), optimizer);
  EXPECT_TRUE(amp.step(optimizer).ran());
}

TEST_F(FromPython, KerasIsWrittenAsTheTableSays) {
  const mezzo::Precision precision({.compute = torch::kHalf});
  EXPECT_EQ(precision.compute, torch::kHalf);
  EXPECT_EQ(precision.param, torch::kFloat);
  mezzo::LossScaleOptimizer wrapped(optimizer, {.init_scale = 32768, .growth_interval = 2000});
  wrapped.scale(model(input).sum()).backward();
  wrapped.unscale_();
  EXPECT_TRUE(wrapped.step({.max_norm = 1.0}).ran());
  EXPECT_EQ(wrapped.iterations(), 1);
  EXPECT_EQ(wrapped.loss_scale(), wrapped.initial_scale());
  EXPECT_TRUE(wrapped.dynamic());
  EXPECT_EQ(wrapped.inner_optimizer().param_groups()[0].options().get_lr(), 0.1);
  auto fixed = mezzo::enable_mixed_precision(of_other, mezzo::LossScale::fixed(128));
  EXPECT_EQ(fixed.loss_scale(), 128);
  const auto dynamic =
      mezzo::LossScale::dynamic({.init_scale = 32768, .growth_factor = 2, .growth_interval = 2000});
  EXPECT_EQ(mezzo::GradScaler(dynamic).get_scale(), 32768);
  EXPECT_EQ(mezzo::GradScaler(mezzo::LossScale::fixed(128)).get_scale(), 128);
  std::stringstream file;
  torch::save(wrapped, file);
  torch::load(wrapped, file);
  EXPECT_EQ(wrapped.iterations(), 1);
}

}  // namespace
