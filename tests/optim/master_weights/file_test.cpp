// MasterWeights in files: a resumed run takes the steps of one that was not interrupted, and files
// of something else are refused whole.

#include <mezzo/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "../../support/saved.h"
#include "../../support/scratch.h"
#include "master_model.h"

namespace {

using namespace master_weights_test;
using mezzo::GradScaler;
using mezzo::master_params;
using mezzo::MasterWeights;
using test_support::load;
using test_support::saved;
using testing::HasSubstr;
using testing::ThrowsMessage;

void train(const Model& model, MasterWeights& optimizer, int first, int last) {
  GradScaler scaler = quiet_scaler();
  for (int step = first; step < last; ++step) {
    model.set_gradients(step);
    if (step < 6) model.parameters[3].mutable_grad() = torch::Tensor();  // its master comes later
    scaler.step(optimizer, {.max_norm = 2.0});
    scaler.update();
  }
}

class FileOfDtype : public testing::TestWithParam<torch::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(MasterWeightsFile, FileOfDtype,
                         testing::Values(torch::kHalf, torch::kBFloat16));

TEST_P(FileOfDtype, ResumesToTheBitInTheMiddleOfARun) {
  for (const MakeOptimizer& make : libtorch_optimizers()) {
    const Model whole(GetParam());
    const auto whole_inner = make(whole.groups());
    MasterWeights uninterrupted(*whole_inner);
    train(whole, uninterrupted, 0, 5);
    const std::string file = saved(uninterrupted);
    const Tensors values = copies_of(whole.parameters);
    train(whole, uninterrupted, 5, 10);

    const Model resumed(GetParam());
    const auto inner = make(resumed.groups());
    MasterWeights optimizer(*inner);
    train(resumed, optimizer, 20, 22);  // of which nothing may be left
    load(optimizer, file);
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < values.size(); ++i) resumed.parameters[i].copy_(values[i]);
    }
    EXPECT_EQ(optimizer.applied_steps(), 5);
    train(resumed, optimizer, 5, 10);
    EXPECT_THAT(resumed.parameters, SameBits(whole.parameters));
    EXPECT_THAT(master_params(optimizer), SameBits(master_params(uninterrupted)));
    EXPECT_EQ(optimizer.applied_steps(), 10);
  }
}

TEST(MasterWeightsFile, HoldsMastersInFloatWhateverTheModelIsCastTo) {
  const Model model(torch::kBFloat16);
  torch::optim::SGD inner(model.groups(), torch::optim::SGDOptions(0.1));
  MasterWeights optimizer(inner);
  train(model, optimizer, 0, 8);
  const Tensors masters = copies_of(master_params(optimizer));
  Model half(torch::kHalf);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < masters.size(); ++i) half.parameters[i].copy_(masters[i]);
  }
  torch::optim::SGD other(half.groups(), torch::optim::SGDOptions(0.1));
  MasterWeights loaded(other);
  load(loaded, saved(optimizer));
  EXPECT_THAT(master_params(loaded), SameBits(masters));
}

TEST(MasterWeightsFile, OfTheInnerOptimizerAloneIsAnOrdinaryOne) {
  const Model model(torch::kHalf);
  torch::optim::SGD inner(model.groups(), torch::optim::SGDOptions(0.1).momentum(0.9));
  MasterWeights optimizer(inner);
  train(model, optimizer, 0, 7);
  torch::optim::SGD other(model.groups(), torch::optim::SGDOptions(0.5).momentum(0.9));
  load(other, saved(inner));
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.1);
  const auto momentum = [&](const torch::optim::SGD& sgd) {
    const auto key = model.parameters[0].unsafeGetTensorImpl();
    return static_cast<torch::optim::SGDParamState&>(*sgd.state().at(key)).momentum_buffer();
  };
  EXPECT_THAT(momentum(other), SameBits(momentum(inner)));
}

/// What `call` throws; the optimizer goes on as if nothing had been.
class RefusedFile : public testing::Test {
 protected:
  RefusedFile() { train(model_, optimizer_, 0, 7); }

  std::string error_of_loading(const std::string& file) {
    const std::string before = saved(optimizer_);
    const Tensors masters = copies_of(master_params(optimizer_));
    std::string error = "no error";
    try {
      load(optimizer_, file);
    } catch (const c10::Error& caught) {
      error = caught.what_without_backtrace();
    }
    EXPECT_THAT(master_params(optimizer_), SameBits(masters));
    EXPECT_EQ(optimizer_.applied_steps(), 7);
    EXPECT_EQ(inner_.param_groups()[1].options().get_lr(), 0.1);
    EXPECT_EQ(inner_.state().size(), model_.parameters.size());
    EXPECT_EQ(saved(optimizer_).size(), before.size());
    return error;
  }

  Model model_{torch::kHalf};
  torch::optim::SGD inner_{model_.groups(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  MasterWeights optimizer_{inner_};
};

TEST_F(RefusedFile, OfTheBareOptimizer) {
  EXPECT_THAT(error_of_loading(saved(inner_)), HasSubstr("the archive holds no masters"));
}

TEST_F(RefusedFile, OfAnotherKindOfOptimizer) {
  torch::optim::Adam adam(model_.groups(), torch::optim::AdamOptions(0.7));
  const MasterWeights other(adam);
  EXPECT_NE(error_of_loading(saved(other)), "no error");
}

TEST_F(RefusedFile, OfOtherGroups) {
  torch::optim::SGD sgd(model_.parameters, torch::optim::SGDOptions(0.7));
  const MasterWeights other(sgd);
  EXPECT_THAT(error_of_loading(saved(other)), HasSubstr("a different number of parameter groups"));
}

TEST_F(RefusedFile, OfAModelThatWasCast) {
  const std::string file = saved(optimizer_);
  model_.parameters[0].mutable_grad() = torch::Tensor();
  model_.parameters[0].set_data(model_.parameters[0].detach().to(torch::kFloat));
  EXPECT_THAT(error_of_loading(file), HasSubstr("cast as it was then"));
}

TEST_F(RefusedFile, OfMastersOfAnotherShape) {
  Model model(torch::kHalf);
  model.parameters[0] = torch::zeros({5, 7}, torch::kHalf).requires_grad_();
  torch::optim::SGD sgd(model.groups(), torch::optim::SGDOptions(0.7).momentum(0.9));
  MasterWeights other(sgd);
  train(model, other, 0, 2);
  EXPECT_THAT(error_of_loading(saved(other)),
              HasSubstr("the master float32 [5, 7] on cpu for parameter 0 of group 0"));
}

TEST(MasterWeightsFile, OfAFloatModelIsReadFromACheckpoint) {
  const torch::nn::Linear model(2, 2);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  MasterWeights masters(sgd);
  mezzo::TrainingState state;
  state.add("optimizer", masters);
  const test_support::Scratch scratch;
  mezzo::save_checkpoint(scratch / "checkpoint", state);
  EXPECT_NO_THROW(mezzo::load_checkpoint(scratch / "checkpoint", state));
}

}  // namespace
