// Muon compared with Python's torch.optim.Muon, recorded by data/muon.py.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/muon.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../support/get_param_state.h"

#ifndef MEZZO_OPTIM_TEST_DATA
#error "define MEZZO_OPTIM_TEST_DATA as the directory tests/optim/data"
#endif

namespace {

using mezzo::optim::Muon;
using mezzo::optim::MuonOptions;
using test_support::get_param_state;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<torch::Tensor> to_tensors(const c10::IValue& list) {
  std::vector<torch::Tensor> all;
  for (const c10::IValue& one : list.toListRef()) all.push_back(one.toTensor());
  return all;
}

/// Maximum difference of two tensors, relative to the maximum magnitude.
double difference(const torch::Tensor& left, const torch::Tensor& right) {
  const auto wide = right.to(torch::kDouble);
  return ((left.to(torch::kDouble) - wide).abs().max() / wide.abs().max()).item<double>();
}

TEST(Muon, MatchesPython) {
  // bfloat16 products differ between CPUs: only Python on the same machine is bitwise identical.
  const char* const recorded_cases_path = std::getenv("MEZZO_MUON_CASES");
  std::ifstream file(recorded_cases_path ? recorded_cases_path : MEZZO_OPTIM_TEST_DATA "/muon.pt",
                     std::ios::binary);
  const c10::IValue cases = torch::pickle_load({std::istreambuf_iterator<char>(file), {}});
  if (recorded_cases_path != nullptr) torch::set_num_threads(1);
  ASSERT_GE(cases.toListRef().size(), 12U);
  for (std::size_t i = 0; i < cases.toListRef().size(); ++i) {
    SCOPED_TRACE(i);
    const auto recorded = cases.toListRef()[i].toGenericDict();
    const auto get_number = [&](const char* key) { return recorded.at(key).toScalar().toDouble(); };
    const auto& coefficients = recorded.at("ns_coefficients").toTupleRef().elements();
    std::vector<torch::Tensor> parameters = to_tensors(recorded.at("weights"));
    Muon optimizer(parameters,
                   MuonOptions(get_number("lr"))
                       .weight_decay(get_number("weight_decay"))
                       .momentum(get_number("momentum"))
                       .nesterov(recorded.at("nesterov").toBool())
                       .ns_coefficients({coefficients[0].toDouble(), coefficients[1].toDouble(),
                                         coefficients[2].toDouble()})
                       .eps(get_number("eps"))
                       .ns_steps(recorded.at("ns_steps").toInt())
                       .adjust_lr_fn(recorded.at("adjust_lr_fn").toStringRef()));
    for (const c10::IValue& step : recorded.at("gradients").toListRef()) {
      const auto gradients = to_tensors(step);
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        parameters[p].mutable_grad() = gradients[p].numel() == 0 ? torch::Tensor() : gradients[p];
      }
      optimizer.step();
    }
    const auto expected = to_tensors(recorded.at("expected"));
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      EXPECT_LE(difference(parameters[p], expected[p]), recorded_cases_path ? 0.0 : 0.02)
          << parameters[p] << "\n"
          << expected[p];
    }
  }
}

TEST(Muon, ThrowsForNonMatrix) {
  EXPECT_THAT(
      [] {
        Muon(std::vector<torch::Tensor>{torch::ones({2, 2}), torch::ones(3)});
      },
      ThrowsMessage<c10::Error>(
          AllOf(HasSubstr("Muon only supports 2D parameters whereas we found a parameter "
                          "with size: [3], parameter 1 of group 0"),
                HasSubstr("pass it to an AdamW"))));
  EXPECT_THAT(
      [] {
        Muon({torch::ones({2, 2}, torch::kComplexFloat)});
      },
      ThrowsMessage<c10::Error>(HasSubstr("does not support complex parameters")));
  Muon optimizer({torch::ones({2, 2})});
  EXPECT_THAT([&] { optimizer.add_param_group({std::vector<torch::Tensor>{torch::ones(3)}}); },
              ThrowsMessage<c10::Error>(HasSubstr("only supports 2D parameters")));
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
}

TEST(Muon, WorksWithGradScalerAndSchedule) {
  torch::manual_seed(1);
  auto weight = torch::randn({6, 4}).requires_grad_();
  Muon optimizer({weight}, MuonOptions(2e-2));
  mezzo::GradScaler scaler;
  mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 0, .total_steps = 4});
  const auto x = torch::randn({3, 6});
  const auto before = weight.detach().clone();
  scaler.scale(x.mm(weight).sum() * std::numeric_limits<double>::infinity()).backward();
  auto skipped = scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});
  scaler.update();
  schedule.step(skipped);
  EXPECT_FALSE(skipped.applied());
  EXPECT_TRUE(weight.equal(before)) << weight;
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 2e-2);
  scaler.scale(x.mm(weight).pow(2).sum()).backward();
  schedule.step(scaler.step(optimizer, {.max_norm = 1.0}));
  scaler.update();
  EXPECT_FALSE(weight.equal(before));
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1.5e-2);
}

TEST(Muon, StepIgnoresAutocast) {
  const auto train = [](bool in_region) {
    torch::manual_seed(1);
    auto weight = torch::randn({6, 4});
    Muon optimizer({weight});
    weight.mutable_grad() = torch::randn({6, 4});
    if (in_region) {
      const mezzo::AutocastGuard guard({.device_type = torch::kCPU, .dtype = torch::kHalf});
      optimizer.step();
    } else {
      optimizer.step();
    }
    return weight;
  };
  EXPECT_TRUE(train(true).equal(train(false)));
}

TEST(Muon, PreservesMomentumOf16BitGradients) {
  auto weight = torch::randn({6, 4}, torch::kBFloat16);
  Muon optimizer({weight}, MuonOptions().momentum(0.5).nesterov(false));
  weight.mutable_grad() = torch::full({6, 4}, 2.0, torch::kBFloat16);
  optimizer.step();
  const auto& state = get_param_state<mezzo::optim::MuonParamState>(optimizer, weight);
  EXPECT_TRUE(state.momentum_buffer().eq(1).all().item<bool>()) << state.momentum_buffer();
}

}  // namespace
