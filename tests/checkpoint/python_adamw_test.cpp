// AdamW's state comes from Python, and goes on as it would have there: examples/python_adamw.

#include "../../examples/python_adamw/python_adamw.h"

#include <mezzo/optim/adamw.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "../support/error_of.h"

#ifndef MEZZO_CHECKPOINT_TEST_DATA
#error "give -DMEZZO_CHECKPOINT_TEST_DATA, the folder tests/checkpoint/data"
#endif

namespace {

using test_support::error_of;
using testing::HasSubstr;

/// data/python_adamw.pt, which data/python_adamw.py wrote with PyTorch.
const c10::IValue& from_python() {
  static const c10::IValue file = read_python_file(MEZZO_CHECKPOINT_TEST_DATA "/python_adamw.pt");
  return file;
}

std::vector<torch::Tensor> tensors(const c10::IValue& list) {
  std::vector<torch::Tensor> tensors;
  for (const c10::IValue& one : list.toListRef()) tensors.push_back(one.toTensor());
  return tensors;
}

/// Python's weights as parameters, in its two groups.
struct Parameters {
  Parameters() {
    for (const torch::Tensor& weight : tensors(python_item(from_python(), "weights"))) {
      all.push_back(weight.clone().requires_grad_());
    }
  }
  std::vector<torch::optim::OptimizerParamGroup> groups() const {
    return {{{all[0], all[1]}}, {{all[2], all[3]}}};
  }
  std::vector<torch::Tensor> all;
};

template <class Optimizer>
Optimizer made(const Parameters& parameters) {
  return Optimizer(parameters.groups(), {});
}

template <class Optimizer>
void expect_to_go_on() {
  const Parameters parameters;
  auto optimizer = made<Optimizer>(parameters);
  load_python_adamw(optimizer, python_item(from_python(), "optimizer"));
  const c10::IValue gradients = python_item(from_python(), "gradients");
  for (const c10::IValue& step : gradients.toListRef()) {
    const auto of_step = tensors(step);
    for (std::size_t i = 0; i < of_step.size(); ++i) {
      parameters.all[i].mutable_grad() = of_step[i].clone();
    }
    optimizer.step();
  }
  const auto after = tensors(python_item(from_python(), "after"));
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_TRUE(torch::allclose(parameters.all[i], after[i], 1e-6, 1e-7))
        << i << '\n'
        << parameters.all[i] << '\n'
        << after[i];
  }
}

TEST(PythonAdamW, GoesOnInMezzosAdamW) { expect_to_go_on<mezzo::optim::AdamW>(); }

TEST(PythonAdamW, GoesOnInLibtorchsAdamW) { expect_to_go_on<torch::optim::AdamW>(); }

TEST(PythonAdamW, KeepsHowThisOptimizerStoresWeights) {
  const Parameters parameters;
  for (const torch::Tensor& one : parameters.all) {
    one.set_data(one.detach().to(torch::kBFloat16));
  }
  mezzo::optim::AdamW optimizer(
      parameters.groups(),
      mezzo::optim::AdamWOptions().weight_storage(mezzo::optim::WeightStorage::split_master));
  load_python_adamw(optimizer, python_item(from_python(), "optimizer"));
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const mezzo::optim::AdamWOptions&>(group.options());
    EXPECT_EQ(options.weight_storage(), mezzo::optim::WeightStorage::split_master);
  }
  for (const torch::Tensor& one : parameters.all) one.mutable_grad() = torch::ones_like(one);
  optimizer.step();
  const auto& state = static_cast<mezzo::optim::AdamWParamState&>(
      *optimizer.state().at(parameters.all[0].unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 4);
}

TEST(PythonAdamW, WhatDoesNotFitIsNamedAndNothingChanges) {
  const Parameters parameters;
  const auto error = [&](std::vector<torch::optim::OptimizerParamGroup> groups,
                         const c10::IValue& state) {
    mezzo::optim::AdamW optimizer(std::move(groups), mezzo::optim::AdamWOptions(0.5));
    std::string words = error_of([&] { load_python_adamw(optimizer, state); });
    EXPECT_TRUE(optimizer.state().empty());
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
    return words;
  };
  const c10::IValue state = python_item(from_python(), "optimizer");
  EXPECT_THAT(error({{parameters.all}}, state), HasSubstr("has 2 groups, and this one 1"));
  EXPECT_THAT(error({{{parameters.all[1], parameters.all[0]}}, parameters.groups()[1]}, state),
              HasSubstr("parameter 0 of group 0 is [2, 3] in Python, and [2] here"));
  EXPECT_THAT(error({{{parameters.all[0]}}, parameters.groups()[1]}, state),
              HasSubstr("group 0 has 2 parameters in Python, and 1 here"));
  EXPECT_THAT(error(parameters.groups(), from_python()), HasSubstr("lacks param_groups"));
  c10::IValue adam = state.deepcopy();
  python_item(adam, "param_groups")
      .toListRef()[0]
      .toGenericDict()
      .insert_or_assign("decoupled_weight_decay", false);
  EXPECT_THAT(error(parameters.groups(), adam), HasSubstr("of Adam, and not of AdamW"));
}

}  // namespace
