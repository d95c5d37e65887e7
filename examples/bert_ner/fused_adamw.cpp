#include "fused_adamw.h"

#include <tuple>
#include <vector>

namespace bert_ner {
namespace {

using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

/// The lists that the kernel takes, one entry a parameter.
struct Lists {
  std::vector<Tensor> parameters, gradients, exp_avgs, exp_avg_sqs;
  std::vector<float> steps;
};

template <typename States>
AdamWParamState& state_of(States& states, const Tensor& parameter) {
  auto& slot = states[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<AdamWParamState>();
    fresh->exp_avg(torch::zeros_like(parameter));
    fresh->exp_avg_sq(torch::zeros_like(parameter));
    slot = std::move(fresh);
  }
  return static_cast<AdamWParamState&>(*slot);
}

void step_group(const Lists& lists, const AdamWOptions& options) {
  if (lists.parameters.empty()) return;
  const auto device = lists.parameters.front().device();
  const auto steps = torch::tensor(lists.steps).to(device).unbind(0);
  const auto [beta1, beta2] = options.betas();
  at::_fused_adamw_(lists.parameters, lists.gradients, lists.exp_avgs, lists.exp_avg_sqs,
                    /*max_exp_avg_sqs=*/{}, steps, options.lr(), beta1, beta2,
                    options.weight_decay(), options.eps(), /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace

Tensor FusedAdamW::step(LossClosure closure) {
  Tensor loss;
  if (closure) {
    const torch::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    TORCH_CHECK(!options.amsgrad(), "FusedAdamW does not take amsgrad; use torch::optim::AdamW");
    Lists lists;
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_of(state_, parameter);
      state.step(state.step() + 1);
      lists.parameters.push_back(parameter);
      lists.gradients.push_back(parameter.grad());
      lists.exp_avgs.push_back(state.exp_avg());
      lists.exp_avg_sqs.push_back(state.exp_avg_sq());
      lists.steps.push_back(static_cast<float>(state.step()));
    }
    step_group(lists, options);
  }
  return loss;
}

}  // namespace bert_ner
