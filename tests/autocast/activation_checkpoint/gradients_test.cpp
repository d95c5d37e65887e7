// Gradients through a checkpoint are bitwise identical to those without it.

#include <mezzo/autocast/activation_checkpoint.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../support/message_of.h"
#include "loss_and_gradients.h"

namespace {

using activation_checkpoint_test::BitwiseEqual;
using activation_checkpoint_test::loss_and_gradients;
using torch::Tensor;
using torch::autograd::variable_list;

// Calls the function directly, or through mezzo::activation_checkpoint.
struct Plain {
  template <class F, class... Args>
  auto operator()(F&& function, Args&&... args) const {
    return std::invoke(std::forward<F>(function), std::forward<Args>(args)...);
  }
};
struct Checkpointed {
  template <class F, class... Args>
  auto operator()(F&& function, Args&&... args) const {
    return mezzo::activation_checkpoint(std::forward<F>(function), std::forward<Args>(args)...);
  }
};

// Expects the same loss and gradients from `make_loss(run)` with and without checkpoints.
template <class MakeLoss>
void expect_same(const std::vector<Tensor>& leaves, const MakeLoss& make_loss) {
  const auto plain = loss_and_gradients(leaves, [&] { return make_loss(Plain{}); });
  const auto checkpointed = loss_and_gradients(leaves, [&] { return make_loss(Checkpointed{}); });
  EXPECT_THAT(checkpointed, BitwiseEqual(plain));
}

class ActivationCheckpointGradients : public testing::Test {
 protected:
  ActivationCheckpointGradients() {
    torch::manual_seed(3);
    for (Tensor* leaf : {&x_, &w_, &v_}) *leaf = torch::randn({6, 6}).requires_grad_();
  }

  Tensor x_, w_, v_;
};

TEST_F(ActivationCheckpointGradients, MatchForInputAndCapturedParameters) {
  expect_same({x_, w_, v_}, [&](auto run) {
    const auto block = [&](const Tensor& x) { return torch::gelu(x.mm(w_)).mm(v_); };
    return run(block, x_).pow(2).sum();
  });
}

// Unsupported by use_reentrant=True in Python.
TEST_F(ActivationCheckpointGradients, MatchWithoutInputThatRequiresGrad) {
  expect_same({w_, v_}, [&](auto run) {
    const auto block = [&](const Tensor& x) { return torch::gelu(x.mm(w_)).mm(v_); };
    return run(block, x_.detach()).pow(2).sum();
  });
}

TEST_F(ActivationCheckpointGradients, MatchForTensorUsedOutsideToo) {
  expect_same({x_, w_, v_}, [&](auto run) {
    const auto hidden = x_.mm(w_).tanh();
    const auto attention = [&](const Tensor& h) {
      return torch::softmax(h.mm(w_).mm(h.mm(v_).t()), -1).mm(h) + h * h;
    };
    return (hidden + run(attention, hidden) * hidden.sigmoid() - hidden.exp()).sum();
  });
}

TEST_F(ActivationCheckpointGradients, MatchForParameterInTwoCheckpoints) {
  expect_same({x_, w_}, [&](auto run) {
    const auto block = [&](const Tensor& x) { return torch::tanh(x.mm(w_) + w_).mm(w_); };
    return run(block, run(block, x_.mm(w_))).mm(w_).sum();
  });
}

TEST_F(ActivationCheckpointGradients, MatchForCapturedNonLeafTensors) {
  expect_same({x_, w_}, [&](auto run) {
    const auto scale = w_.exp();
    const auto block = [scale](const Tensor& x) { return (x * scale).tanh() * scale; };
    return (run(block, x_) + scale).sum();
  });
}

struct GatedOutput {
  Tensor hidden, gate, loss;
  auto tensors() { return std::tie(hidden, gate, loss); }
};

TEST_F(ActivationCheckpointGradients, MatchForSeveralResults) {
  const auto block = [&](const Tensor& x) {
    const auto hidden = x.mm(w_).tanh();
    const auto gate = hidden.sigmoid();
    return GatedOutput{hidden, gate, (hidden * gate).mm(v_).sum()};
  };
  expect_same({x_, w_, v_}, [&](auto run) {
    const GatedOutput out = run(block, x_);
    return (out.hidden * out.gate).sum() + out.loss;
  });
  expect_same({x_, w_, v_}, [&](auto run) { return run(block, x_).gate.sum(); });
  expect_same({x_, w_, v_}, [&](auto run) {
    const auto pieces = run([&](const Tensor& x) { return x.mm(w_).chunk(3); }, x_);
    return pieces[0].sum() + pieces[2].pow(3).sum();
  });
  expect_same({x_, w_, v_}, [&](auto run) {
    const auto [twice, again] = run(
        [&](const Tensor& x) {
          const auto y = x.mm(w_);
          return std::pair{y, y};
        },
        x_);
    return (twice * again.exp()).sum();
  });
}

TEST_F(ActivationCheckpointGradients, MatchForResultsNotComputedInside) {
  expect_same({x_, w_}, [&](auto run) {
    const auto block = [&](const Tensor& x) {
      return std::tuple{x, w_, x.mm(w_), torch::ones(2), Tensor(), x.detach().mm(w_.detach())};
    };
    const auto [input, weight, product, ones, nothing, constant] = run(block, x_);
    EXPECT_FALSE(nothing.defined());
    EXPECT_FALSE(constant.requires_grad());
    return (input * weight * product * constant).sum() * ones.sum();
  });
}

TEST_F(ActivationCheckpointGradients, MatchForInPlaceOpsAndViews) {
  expect_same({x_, w_, v_}, [&](auto run) {
    const auto block = [&](const Tensor& x) {
      auto buffer = torch::zeros({6, 6});
      buffer.narrow(0, 0, 3).copy_(x.narrow(0, 0, 3));
      buffer.select(1, 2).mul_(w_.select(0, 1));
      buffer.narrow(0, 0, 6).mul_(v_);
      buffer.add_(v_).tanh_();
      return buffer.mm(w_);
    };
    auto y = run(block, x_);
    y.mul_(2);
    return y.sum();
  });
}

TEST_F(ActivationCheckpointGradients, MatchForNestedCheckpoints) {
  expect_same({x_, w_, v_}, [&](auto run) {
    const auto inner = [this](const Tensor& x) {
      return torch::dropout(x.mm(w_).tanh(), 0.5, true);
    };
    const auto middle = [=, this](const Tensor& x) { return run(inner, run(inner, x) + x).mm(v_); };
    return run([=](const Tensor& x) { return run(middle, x) + run(middle, x); }, x_).sum();
  });
}

TEST_F(ActivationCheckpointGradients, MatchForAutogradGradOfInputs) {
  const auto block = [&](const Tensor& x) {
    const auto shifted = (torch::zeros_like(x) + x).narrow(0, 0, 4).mul_(w_.narrow(0, 1, 4));
    return shifted.mm(v_).tanh().mm(w_);
  };
  for (const variable_list& inputs : {variable_list{x_}, {w_}, {v_}, {v_, x_}, {x_, w_, v_}}) {
    const auto plain = torch::autograd::grad({block(x_).sum()}, inputs);
    const auto ours =
        torch::autograd::grad({mezzo::activation_checkpoint(block, x_).sum()}, inputs);
    EXPECT_THAT(ours, BitwiseEqual(plain));
  }
  EXPECT_FALSE(w_.grad().defined()) << "grad() accumulates nowhere";
}

// Counts calls of its backward.
int backward_runs = 0;
struct Counted : torch::autograd::Function<Counted> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list gradients) {
    ++backward_runs;
    return gradients;
  }
};

TEST_F(ActivationCheckpointGradients, SkipsUnneededRecomputation) {
  const auto block = [&](const Tensor& x) { return Counted::apply(w_.tanh()).mm(x).mm(v_); };
  backward_runs = 0;
  torch::autograd::grad({mezzo::activation_checkpoint(block, x_).sum()}, {x_});
  EXPECT_EQ(backward_runs, 0);
  torch::autograd::grad({mezzo::activation_checkpoint(block, x_).sum()}, {w_});
  EXPECT_EQ(backward_runs, 1);
}

TEST_F(ActivationCheckpointGradients, RetainGraphAllowsSecondBackward) {
  const auto y =
      mezzo::activation_checkpoint([&](const Tensor& x) { return x.mm(w_).tanh(); }, x_).sum();
  const auto first = torch::autograd::grad({y}, {x_, w_}, {}, /*retain_graph=*/true);
  const auto second = torch::autograd::grad({y}, {x_, w_});
  EXPECT_THAT(first, BitwiseEqual(second));
  EXPECT_THAT(test_support::message_of([&] {
                torch::autograd::grad({y}, {x_, w_});
              }),
              testing::HasSubstr("backward through the graph a second time"));
}

TEST_F(ActivationCheckpointGradients, RunsParameterHooksOnce) {
  std::vector<std::string> calls;
  w_.register_hook([&](const Tensor& gradient) {
    calls.emplace_back("gradient");
    return gradient * 2;
  });
  expect_same({x_, w_}, [&](auto run) {
    calls.clear();
    const auto hidden = x_.mm(v_);
    hidden.register_hook([&](const Tensor&) { calls.emplace_back("hidden"); });
    const auto block = [&](const Tensor& h) {
      const auto inside = h.mm(w_);
      inside.register_hook([&](const Tensor&) { calls.emplace_back("inside"); });
      return inside.mm(w_);
    };
    const auto y = run(block, hidden);
    y.register_hook([&](const Tensor&) { calls.emplace_back("result"); });
    return y.sum();
  });
  EXPECT_EQ(calls, (std::vector<std::string>{"result", "inside", "gradient", "hidden"}));
}

// A backward that builds a graph with a checkpoint and runs backward through it.
struct Nested : torch::autograd::Function<Nested> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
    ctx->save_for_backward({x});
    return x.tanh();
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list gradients) {
    const torch::AutoGradMode recording(true);
    const auto x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const auto y = mezzo::activation_checkpoint([](const Tensor& t) { return t.tanh(); }, x);
    return torch::autograd::grad({y}, {x}, gradients);
  }
};

TEST_F(ActivationCheckpointGradients, MatchForReentrantBackward) {
  expect_same({x_, w_}, [&](auto run) {
    return run([&](const Tensor& x) { return Nested::apply(x.mm(w_)).mm(w_); }, x_).sum();
  });
  const auto plain = torch::autograd::grad({x_.tanh().sum()}, {x_});
  EXPECT_THAT(torch::autograd::grad({Nested::apply(x_).sum()}, {x_}), BitwiseEqual(plain));
}

// The engine runs backward passes nested deeper than 60 in other threads.
TEST_F(ActivationCheckpointGradients, MatchBeyondNestingLimitOfEngine) {
  std::function<Tensor(const Tensor&, int)> nest;
  expect_same({x_, w_}, [&](auto run) {
    nest = [this, run, &nest](const Tensor& x, int depth) -> Tensor {
      return depth == 0 ? x.mm(w_).tanh() : run(std::ref(nest), x, depth - 1) * 1.01;
    };
    return nest(x_, 70).sum();
  });
}

TEST_F(ActivationCheckpointGradients, NotRecordedWithoutGradMode) {
  const auto block = [&](const Tensor& x) { return x.mm(w_); };
  {
    const torch::NoGradGuard off;
    EXPECT_FALSE(mezzo::activation_checkpoint(block, x_).requires_grad());
  }
  {
    const c10::InferenceMode inference;
    EXPECT_FALSE(mezzo::activation_checkpoint(block, x_.detach()).requires_grad());
  }
  EXPECT_FALSE(mezzo::activation_checkpoint([](const Tensor& x) { return x * 2; }, x_.detach())
                   .requires_grad());
}

}  // namespace
