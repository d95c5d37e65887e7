// Options that a param group leaves at their defaults.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/muon.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace {

using torch::optim::OptimizerParamGroup;

template <class Options>
OptimizerParamGroup group_of(const Options& options) {
  return {{torch::ones({2, 2}).requires_grad_()}, std::make_unique<Options>(options)};
}

/// Returns lr and weight decay of a group that sets its decay alone, given to the constructor, and
/// of one that is added later.
template <class Optimizer, class Options>
std::vector<double> options_of_groups() {
  Optimizer optimizer({group_of(Options().weight_decay(0.25))}, Options(0.5).weight_decay(0.75));
  optimizer.add_param_group(group_of(Options().weight_decay(0.25)));
  std::vector<double> all;
  for (auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    all.insert(all.end(),
               {options.lr() == Options().lr() ? 0 : options.lr(), options.weight_decay()});
  }
  return all;
}

// From libtorch 2.12 on such a group takes the optimizer's learning rate; before, it keeps the
// default.
TEST(GroupOptions, InheritLikeTorch) {
  using torch::optim::AdamWOptions;
  const auto expected = options_of_groups<torch::optim::AdamW, AdamWOptions>();
  EXPECT_EQ(expected[0] != 0, mezzo::detail::kGroupsInheritOptions);
  using namespace mezzo::optim;
  EXPECT_EQ((options_of_groups<AdamW, AdamWOptions>()), expected);
  EXPECT_EQ((options_of_groups<AdamW8bit, AdamWOptions>()), expected);
  EXPECT_EQ((options_of_groups<Lion, LionOptions>()), expected);
  EXPECT_EQ((options_of_groups<LAMB, LAMBOptions>()), expected);
  EXPECT_EQ((options_of_groups<Muon, MuonOptions>()), expected);
}

TEST(GroupOptions, InheritWhereDefault) {
  mezzo::optim::LionOptions group, defaults(0.5);
  group.weight_decay(0.25);
  defaults.weight_decay(0.75).betas({0.5, 0.6});
  mezzo::detail::inherit_options(group, defaults);
  EXPECT_EQ(group.lr(), 0.5);
  EXPECT_EQ(group.weight_decay(), 0.25);
  EXPECT_EQ(group.betas(), std::make_tuple(0.5, 0.6));
}

}  // namespace
