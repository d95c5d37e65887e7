#include <mezzo/autocast/autocast_guard.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "get_product_dtype.h"

namespace {

using mezzo::autocast;
using mezzo::autocast_wrap;
using mezzo::AutocastOptions;
using torch::Tensor;

/// Wraps a function for the CPU in bfloat16.
template <class F>
auto lowered(F&& function) {
  return autocast_wrap<torch::kCPU>(std::forward<F>(function));
}

TEST(AutocastWrap, RunsOnlyCallUnderAutocast) {
  EXPECT_EQ(autocast_wrap<torch::kCPU>(get_product_dtype)(), torch::kBFloat16);
  EXPECT_EQ((autocast_wrap<torch::kCPU, torch::kHalf>(get_product_dtype)()), torch::kHalf);
  const AutocastOptions half{.device_type = torch::kCPU, .dtype = torch::kHalf};
  EXPECT_EQ(autocast_wrap(half, get_product_dtype)(), torch::kHalf);
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
}

TEST(AutocastWrap, ThrowsForBadOptionsBeforeCall) {
  EXPECT_THROW(std::ignore = autocast_wrap({.device_type = torch::kCPU, .dtype = torch::kDouble},
                                           get_product_dtype),
               c10::Error);
}

TEST(AutocastWrap, PreservesValueCategories) {
  const auto categories = [](auto&&... args) {
    return std::tuple<std::type_identity<decltype(args)>...>();
  };
  int lvalue = 0;
  const int constant = 0;
  const auto seen =
      lowered(categories)(lvalue, constant, 0, std::move(lvalue), std::move(constant));
  using Expected = std::tuple<std::type_identity<int&>, std::type_identity<const int&>,
                              std::type_identity<int&&>, std::type_identity<int&&>,
                              std::type_identity<const int&&>>;
  static_assert(std::is_same_v<decltype(seen), const Expected>);
}

TEST(AutocastWrap, ReturnsReferencesUnchanged) {
  int value = 0;
  const auto same = lowered([](int& x) -> int& { return x; });
  static_assert(std::is_same_v<decltype(same(value)), int&>);
  EXPECT_EQ(&same(value), &value);
  const auto constant = lowered([](const int& x) -> const int& { return x; });
  static_assert(std::is_same_v<decltype(constant(value)), const int&>);
  EXPECT_EQ(&constant(value), &value);
  const auto expiring = lowered([](int& x) -> int&& { return std::move(x); });
  static_assert(std::is_same_v<decltype(expiring(value)), int&&>);
}

TEST(AutocastWrap, ReturnsValuesAndVoid) {
  const auto pair = lowered([](int a) { return std::pair<int, std::string>(a, "b"); });
  static_assert(std::is_same_v<decltype(pair(1)), std::pair<int, std::string>>);
  static_assert(std::is_void_v<decltype(lowered([] {})())>);
}

struct Immovable {
  explicit Immovable(int v) : value(v) {}
  Immovable(const Immovable&) = delete;
  int value;
};

TEST(AutocastWrap, ReturnsImmovableTypes) {
  EXPECT_EQ(lowered([](int v) { return Immovable(v); })(5).value, 5);
}

/// Returns which call operator ran.
struct Overloaded {
  std::string operator()(int) & { return "mutable"; }
  std::string operator()(int) const& { return "const"; }
  std::string operator()(const std::string&) const { return "string"; }
};

TEST(AutocastWrap, PreservesOverloadsAndConstness) {
  auto callable = lowered(Overloaded());
  EXPECT_EQ(callable(1), "mutable");
  EXPECT_EQ(std::as_const(callable)(1), "const");
  EXPECT_EQ(callable("text"), "string");
}

TEST(AutocastWrap, PreservesStateOfMutableCallable) {
  auto counter = lowered([n = 0]() mutable { return ++n; });
  counter();
  EXPECT_EQ(counter(), 2);
  static_assert(!std::invocable<const decltype(counter)&>);
}

TEST(AutocastWrap, CopiesLvalueUnlessReference) {
  auto counter = [n = 0]() mutable { return ++n; };
  lowered(counter)();
  EXPECT_EQ(counter(), 1);
  lowered(std::ref(counter))();
  EXPECT_EQ(counter(), 3);
}

struct Model {
  torch::ScalarType forward(const Tensor& x, const Tensor& y) const {
    return torch::mm(x, y).scalar_type();
  }
  int layers = 3;
};

TEST(AutocastWrap, CallsMemberFunctions) {
  Model model;
  const Tensor x = torch::ones({2, 2});
  const auto forward = lowered(&Model::forward);
  EXPECT_EQ(forward(model, x, x), torch::kBFloat16);
  EXPECT_EQ(forward(&model, x, x), torch::kBFloat16);
  EXPECT_EQ(forward(std::make_shared<Model>(), x, x), torch::kBFloat16);
  lowered (&Model::layers)(model) = 4;
  EXPECT_EQ(model.layers, 4);
}

TEST(AutocastWrap, InvocableLikeCallable) {
  const auto callable = lowered([](int) {});
  static_assert(std::is_invocable_v<decltype(callable), int>);
  static_assert(!std::is_invocable_v<decltype(callable), std::string>);
  static_assert(!std::is_invocable_v<decltype(callable)>);
}

TEST(AutocastCall, ReturnsResultOfFunction) {
  const AutocastOptions half{.device_type = torch::kCPU, .dtype = torch::kHalf};
  EXPECT_EQ(autocast(half, [] { return get_product_dtype(); }), torch::kHalf);
  EXPECT_EQ(autocast({.device_type = torch::kCPU}, get_product_dtype), torch::kBFloat16);
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
  int value = 0;
  static_assert(std::is_same_v<decltype(autocast(half, [&]() -> int& { return value; })), int&>);
  static_assert(std::is_void_v<decltype(autocast(half, [] {}))>);
}

// --- output_dtype ----------------------------------------------------------------------

Tensor product() { return torch::ones({2, 2}).mm(torch::ones({2, 2})); }

const AutocastOptions kFloatOutput{.device_type = torch::kCPU, .output_dtype = torch::kFloat};

TEST(AutocastOutputDtype, CastsResult) {
  EXPECT_EQ(autocast({.device_type = torch::kCPU}, product).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(autocast(kFloatOutput, product).scalar_type(), torch::kFloat);
  EXPECT_EQ(autocast_wrap(kFloatOutput, product)().scalar_type(), torch::kFloat);
  EXPECT_EQ(autocast_wrap<torch::kCPU>({.output_dtype = torch::kFloat}, product)().scalar_type(),
            torch::kFloat);
}

TEST(AutocastOutputDtype, IgnoresOtherDtypes) {
  const auto [wide, count, low, none] = autocast(kFloatOutput, [] {
    return std::tuple(torch::ones({2}, torch::kDouble), torch::ones({2}, torch::kLong), product(),
                      Tensor());
  });
  EXPECT_EQ(wide.scalar_type(), torch::kDouble);
  EXPECT_EQ(count.scalar_type(), torch::kLong);
  EXPECT_EQ(low.scalar_type(), torch::kFloat);
  EXPECT_FALSE(none.defined());
}

TEST(AutocastOutputDtype, CastsTensorsInContainers) {
  const auto [pair, numbers] = autocast(kFloatOutput, [] {
    return std::pair(std::vector<Tensor>{product(), product()},
                     std::pair(std::optional(product()), std::array{product()}));
  });
  EXPECT_EQ(pair[1].scalar_type(), torch::kFloat);
  EXPECT_EQ(numbers.first->scalar_type(), torch::kFloat);
  EXPECT_EQ(numbers.second[0].scalar_type(), torch::kFloat);
  const auto value = autocast(kFloatOutput, [] {
    return c10::IValue(c10::ivalue::Tuple::create({product(), std::vector<Tensor>{product()}}));
  });
  EXPECT_EQ(value.toTupleRef().elements()[0].toTensor().scalar_type(), torch::kFloat);
  EXPECT_EQ(value.toTupleRef().elements()[1].toTensorVector()[0].scalar_type(), torch::kFloat);
}

TEST(AutocastOutputDtype, CastsTensorsListedByStruct) {
  struct Output {
    Tensor logits;
    auto tensors() { return std::tie(logits); }
  };
  const Output output = autocast(kFloatOutput, [] { return Output{product()}; });
  EXPECT_EQ(output.logits.scalar_type(), torch::kFloat);
}

TEST(AutocastOutputDtype, ReturnsNumbersAndVoidUnchanged) {
  EXPECT_EQ(autocast(kFloatOutput, [] { return 3; }), 3);
  autocast(kFloatOutput, [] {});
}

TEST(AutocastOutputDtype, ThrowsForTypesWithoutTensors) {
  struct Output {
    Tensor logits;
  };
  const auto throws = [](const char* what) {
    return testing::ThrowsMessage<c10::Error>(testing::HasSubstr(what));
  };
  EXPECT_THAT([] { (void)autocast(kFloatOutput, [] { return Output{product()}; }); },
              throws("returns a type that lists no tensors"));
  Tensor kept = product();
  EXPECT_THAT([&] { (void)autocast(kFloatOutput, [&]() -> Tensor& { return kept; }); },
              throws("returns a reference"));
  EXPECT_THAT(
      [] { (void)autocast({.device_type = torch::kCPU, .output_dtype = torch::kLong}, product); },
      throws("output_dtype is Long; it should be a floating-point dtype"));
}

// Otherwise the logged loss of a language model is rounded to bfloat16: 6.28125 for 6.2846.
TEST(AutocastOutputDtype, LossOutsideHasFloat32Precision) {
  torch::manual_seed(0);
  const Tensor x = torch::randn({64, 32});
  const Tensor w = torch::randn({32, 500}) * 0.3;
  const Tensor target = torch::randint(500, {64});
  const auto forward = [&] { return x.mm(w); };
  const double exact = torch::cross_entropy_loss(forward(), target).item<double>();
  const Tensor low =
      torch::cross_entropy_loss(autocast({.device_type = torch::kCPU}, forward), target);
  const Tensor wide = torch::cross_entropy_loss(autocast(kFloatOutput, forward), target);
  EXPECT_EQ(low.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(wide.scalar_type(), torch::kFloat);
  EXPECT_LT(std::abs(wide.item<double>() - exact), std::abs(low.item<double>() - exact));
}

TEST(AutocastCall, RestoresStateWhenFunctionThrows) {
  EXPECT_THROW(autocast({.device_type = torch::kCPU}, [] { TORCH_CHECK(false, "no"); }),
               c10::Error);
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
  EXPECT_THROW(autocast({.device_type = torch::kMeta}, get_product_dtype), c10::Error);
}

}  // namespace
