// custom_fwd(cast_inputs=...): casts arguments, and disables autocast in forward and backward.

#include <mezzo/autocast/autocast_autograd_function.h>
#include <mezzo/autocast/autocast_guard.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool autocast_is_on() { return at::autocast::is_autocast_enabled(at::kCPU); }

std::vector<at::ScalarType> dtypes_seen;
bool on_in_forward = true;
bool on_in_backward = true;

// A kernel that needs one dtype: a.mm(b).
template <at::ScalarType Dtype>
struct CastAndMultiply : mezzo::AutocastAutogradFunction<CastAndMultiply<Dtype>, Dtype> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    dtypes_seen = {a.scalar_type(), b.scalar_type()};
    on_in_forward = autocast_is_on();
    ctx->save_for_backward({a, b});
    return a.mm(b);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    on_in_backward = autocast_is_on();
    const auto saved = ctx->get_saved_variables();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0])};
  }
};

template <class Function, class... Args>
auto apply_under_autocast(Args&&... args) {
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  return Function::apply(std::forward<Args>(args)...);
}

TEST(AutocastAutogradFunctionCastInputs, Float32RunsWithAutocastDisabled) {
  const auto a = torch::randn({3, 4}).to(at::kBFloat16).requires_grad_();
  const auto b = torch::randn({4, 5}).requires_grad_();
  const auto c = apply_under_autocast<CastAndMultiply<at::kFloat>>(a, b);
  EXPECT_EQ(dtypes_seen, (std::vector{at::kFloat, at::kFloat}));
  EXPECT_FALSE(on_in_forward);
  EXPECT_TRUE(torch::equal(c, a.to(at::kFloat).mm(b)));

  const mezzo::AutocastGuard<torch::kCPU> autocast;
  on_in_backward = true;
  c.sum().backward();
  EXPECT_FALSE(on_in_backward);
  EXPECT_TRUE(autocast_is_on());
}

TEST(AutocastAutogradFunctionCastInputs, GradientsHaveArgumentDtype) {
  const auto a = torch::randn({3, 4}).requires_grad_();
  const auto b = torch::randn({4, 5}).requires_grad_();
  const auto c = apply_under_autocast<CastAndMultiply<at::kHalf>>(a, b);
  EXPECT_EQ(c.scalar_type(), at::kHalf);
  c.sum().backward();
  const auto ones = torch::ones({3, 5}, at::kHalf);
  EXPECT_EQ(a.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::equal(a.grad(), ones.mm(b.detach().to(at::kHalf).t()).to(at::kFloat)));
  EXPECT_TRUE(torch::equal(b.grad(), a.detach().to(at::kHalf).t().mm(ones).to(at::kFloat)));
}

// Records the arguments of its forward.
struct Note : mezzo::AutocastAutogradFunction<Note, at::kHalf> {
  template <class... Args>
  static Tensor forward(AutogradContext*, Args&&... args) {
    dtypes_seen.clear();
    (mezzo::detail::for_each_tensor(
         args, [](const Tensor& tensor) { dtypes_seen.push_back(tensor.scalar_type()); }),
     ...);
    return torch::zeros({});
  }
  static variable_list backward(AutogradContext*, const variable_list&) { return {}; }
};

TEST(AutocastAutogradFunctionCastInputs, IgnoresDoubleIntegerUndefinedTensors) {
  apply_under_autocast<Note>(torch::ones(1, at::kDouble), torch::ones(1, at::kLong),
                             torch::ones(1, at::kBool), torch::ones(1, at::kComplexFloat));
  EXPECT_EQ(dtypes_seen, (std::vector{at::kDouble, at::kLong, at::kBool, at::kComplexFloat}));
  apply_under_autocast<Note>(std::vector<Tensor>{Tensor()});
  EXPECT_EQ(dtypes_seen, std::vector{at::ScalarType::Undefined});
}

TEST(AutocastAutogradFunctionCastInputs, IgnoresTensorsOnOtherDevices) {
  const mezzo::AutocastGuard<torch::kCUDA> autocast;
  Note::apply(torch::ones(1));
  EXPECT_EQ(dtypes_seen, std::vector{at::kFloat});
}

struct Pair {
  Tensor left, right;
  auto tensors() { return std::tie(left, right); }
};

TEST(AutocastAutogradFunctionCastInputs, CastsTensorsInNestedContainers) {
  const auto x = torch::ones(1);
  const std::vector<Tensor> two{x, x};
  const std::optional<Tensor> none;
  apply_under_autocast<Note>(std::optional(x), none, two, at::TensorList(two), std::array{x},
                             std::map<std::string, std::vector<Tensor>>{{"a", {x}}, {"b", {x, x}}},
                             std::tuple{1, x, std::pair{x, "text"}},
                             std::vector<std::optional<Pair>>{Pair{x, x}});
  EXPECT_EQ(dtypes_seen, std::vector(13, at::kHalf));
  EXPECT_EQ(two[0].scalar_type(), at::kFloat) << "the caller's containers are not modified";
}

struct Forwards : mezzo::AutocastAutogradFunction<Forwards, at::kHalf> {
  static Tensor forward(AutogradContext*, const Tensor& x, std::string_view text, int& count,
                        const std::string* pointer) {
    count += static_cast<int>(text.size() + pointer->size());
    return x;
  }
  static variable_list backward(AutogradContext*, const variable_list&) { return {}; }
};

TEST(AutocastAutogradFunctionCastInputs, ForwardsOtherArguments) {
  int count = 1;
  const std::string text = "four";
  apply_under_autocast<Forwards>(torch::ones(1), "text", count, &text);
  EXPECT_EQ(count, 9);
}

TEST(AutocastAutogradFunctionCastInputs, NoOpOutsideAutocast) {
  const auto a = torch::randn({3, 4}).to(at::kBFloat16).requires_grad_();
  const auto b = torch::randn({4, 5}).to(at::kBFloat16);
  const auto c = CastAndMultiply<at::kFloat>::apply(a, b);
  EXPECT_EQ(dtypes_seen, (std::vector{at::kBFloat16, at::kBFloat16}));
  EXPECT_EQ(c.scalar_type(), at::kBFloat16);
  {
    const mezzo::AutocastGuard<torch::kCPU> autocast;
    const mezzo::AutocastGuard<torch::kCPU> off({.enabled = false});
    CastAndMultiply<at::kFloat>::apply(a, b);
    EXPECT_EQ(dtypes_seen, (std::vector{at::kBFloat16, at::kBFloat16}));
  }
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  c.sum().backward();
  EXPECT_FALSE(on_in_backward);
}

struct SumOfList : mezzo::AutocastAutogradFunction<SumOfList, at::kFloat> {
  static Tensor forward(AutogradContext* ctx, at::TensorList list) {
    ctx->saved_data["size"] = static_cast<int64_t>(list.size());
    return torch::stack(list).sum(0);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    return variable_list(static_cast<std::size_t>(ctx->saved_data["size"].toInt()), gradients[0]);
  }
};

TEST(AutocastAutogradFunctionCastInputs, DifferentiatesTensorList) {
  const std::vector<Tensor> list{torch::ones(2, at::kBFloat16).requires_grad_(),
                                 torch::ones(2).requires_grad_()};
  const auto sum = apply_under_autocast<SumOfList>(at::TensorList(list));
  EXPECT_EQ(sum.scalar_type(), at::kFloat);
  sum.sum().backward();
  EXPECT_TRUE(torch::equal(list[0].grad(), torch::ones(2, at::kBFloat16)));
  EXPECT_TRUE(torch::equal(list[1].grad(), torch::ones(2)));
}

TEST(AutocastAutogradFunctionCastInputs, ForwardMayEnterRegion) {
  struct Opens : mezzo::AutocastAutogradFunction<Opens, at::kFloat> {
    static Tensor forward(AutogradContext*, const Tensor& x) {
      const mezzo::AutocastGuard<torch::kCPU> autocast;
      return x.mm(x);
    }
    static variable_list backward(AutogradContext*, const variable_list&) { return {}; }
  };
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  EXPECT_EQ(Opens::apply(torch::ones({2, 2})).scalar_type(), at::kBFloat16);
  EXPECT_TRUE(autocast_is_on());
}

}  // namespace
