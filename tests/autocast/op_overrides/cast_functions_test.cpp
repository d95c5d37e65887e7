#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/cast_functions.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

using mezzo::AutocastGuard;
using torch::kBFloat16;
using torch::kCPU;
using torch::kDouble;
using torch::kFloat;
using torch::kHalf;
using torch::Tensor;

Tensor ones(at::ScalarType dtype) { return torch::ones({2, 2}, dtype); }

at::ScalarType dtype_seen(const Tensor& x) { return x.scalar_type(); }

TEST(CastFunctions, CastOnlyInRegions) {
  const auto exact = mezzo::float_function(dtype_seen);
  const auto lowered = mezzo::half_function(dtype_seen);
  EXPECT_EQ(exact(ones(kHalf)), kHalf);
  EXPECT_EQ(lowered(ones(kFloat)), kFloat);
  {
    const AutocastGuard<kCPU, kHalf> autocast;
    EXPECT_EQ(exact(ones(kHalf)), kFloat);
    EXPECT_EQ(lowered(ones(kFloat)), kHalf);  // the region's dtype, not the device's default
    EXPECT_EQ(mezzo::cast_inputs(kBFloat16, dtype_seen)(ones(kFloat)), kBFloat16);
    const AutocastGuard<kCPU> disabled({.enabled = false});
    EXPECT_EQ(lowered(ones(kFloat)), kFloat);
  }
  const AutocastGuard<torch::kCUDA> cuda;  // not the device of the tensors
  EXPECT_EQ(lowered(ones(kFloat)), kFloat);
}

TEST(CastFunctions, RunWithAutocastDisabled) {
  const auto product = [](const Tensor& a, const Tensor& b) { return torch::mm(a, b); };
  const AutocastGuard<kCPU> autocast;
  EXPECT_EQ(mezzo::float_function(product)(ones(kFloat), ones(kFloat)).scalar_type(), kFloat);
  EXPECT_EQ(product(ones(kFloat), ones(kFloat)).scalar_type(), kBFloat16);
}

TEST(CastFunctions, CopyReturnedArgument) {
  const auto same = mezzo::float_function([](const Tensor& x) -> const Tensor& { return x; });
  const AutocastGuard<kCPU> autocast;
  const Tensor x = ones(kHalf);
  const Tensor& result = same(x);
  EXPECT_TRUE(torch::equal(result, ones(kFloat)));
}

TEST(CastFunctions, PromoteToWidestDtype) {
  const auto dtypes = mezzo::promote_function([](const Tensor& a, const std::vector<Tensor>& b) {
    return std::pair(a.scalar_type(), b.at(0).scalar_type());
  });
  const auto call = [&](at::ScalarType a, at::ScalarType b) {
    const AutocastGuard<kCPU> autocast;
    return dtypes(ones(a), std::vector<Tensor>{ones(b)});
  };
  EXPECT_EQ(call(kBFloat16, kFloat), std::pair(kFloat, kFloat));
  EXPECT_EQ(call(kBFloat16, kBFloat16), std::pair(kBFloat16, kBFloat16));
  EXPECT_EQ(call(kBFloat16, kHalf), std::pair(kFloat, kFloat));
  EXPECT_EQ(call(kBFloat16, kDouble), std::pair(kBFloat16, kDouble));
}

TEST(CastFunctions, IgnoreDoubleAndIntegerTensors) {
  const auto lowered = mezzo::half_function(dtype_seen);
  const AutocastGuard<kCPU> autocast;
  EXPECT_EQ(lowered(ones(kDouble)), kDouble);
  EXPECT_EQ(lowered(ones(torch::kLong)), torch::kLong);
  EXPECT_FALSE(mezzo::half_function([](const Tensor& x) { return x.defined(); })(Tensor()));
}

TEST(CastFunctions, CastTensorsInNestedContainers) {
  using Containers = std::tuple<std::optional<Tensor>, std::map<std::string, std::vector<Tensor>>,
                                std::pair<int, Tensor>>;
  const auto lowered = mezzo::half_function([](const Containers& nested, at::TensorList list,
                                               const std::array<Tensor, 1>& array) {
    return std::vector<at::ScalarType>{
        std::get<0>(nested)->scalar_type(), std::get<1>(nested).at("a").at(0).scalar_type(),
        std::get<2>(nested).second.scalar_type(), list[0].scalar_type(), array[0].scalar_type()};
  });
  const Containers nested{ones(kFloat), {{"a", {ones(kFloat)}}}, {1, ones(kFloat)}};
  const std::vector<Tensor> list = {ones(kFloat)};
  const AutocastGuard<kCPU> autocast;
  const auto dtypes = lowered(nested, at::TensorList(list), std::array<Tensor, 1>{ones(kFloat)});
  EXPECT_EQ(dtypes, std::vector<at::ScalarType>(5, kBFloat16));
  EXPECT_EQ(list[0].scalar_type(), kFloat);  // the caller's list is not modified
}

TEST(CastFunctions, ForwardOtherArgumentsPerfectly) {
  const auto f =
      mezzo::float_function([](const Tensor&, std::unique_ptr<int> owned, int& counter) -> int& {
        counter += *owned;
        return counter;
      });
  int counter = 1;
  for (const bool enabled : {true, false}) {
    const AutocastGuard<kCPU> autocast({.enabled = enabled});
    int& result = f(ones(kHalf), std::make_unique<int>(2), counter);
    EXPECT_EQ(&result, &counter);
  }
  EXPECT_EQ(counter, 5);
}

TEST(CastFunctions, AreDifferentiable) {
  auto x = torch::ones({2}, torch::requires_grad());
  {
    const AutocastGuard<kCPU> autocast;
    mezzo::half_function([](const Tensor& t) { return t * 3; })(x).to(kFloat).sum().backward();
  }
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({2}, 3.0)));
}

TEST(CastFunctions, ThrowForUnsupportedDtype) {
  EXPECT_THROW((void)mezzo::cast_inputs(kDouble, dtype_seen), c10::Error);
  EXPECT_THROW((void)mezzo::cast_inputs(torch::kInt, dtype_seen), c10::Error);
}

}  // namespace
