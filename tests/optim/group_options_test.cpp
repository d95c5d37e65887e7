// Param group options with default values.

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
OptimizerParamGroup make_group(const Options& options) {
  return {{torch::ones({2, 2}).requires_grad_()}, std::make_unique<Options>(options)};
}

/// Returns lr and weight decay of two groups that set only the weight decay: one passed to the
/// constructor, one added later.
template <class Optimizer, class Options>
std::vector<double> get_group_options() {
  Optimizer optimizer({make_group(Options().weight_decay(0.25))}, Options(0.5).weight_decay(0.75));
  optimizer.add_param_group(make_group(Options().weight_decay(0.25)));
  std::vector<double> all;
  for (auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    all.insert(all.end(),
               {options.lr() == Options().lr() ? 0 : options.lr(), options.weight_decay()});
  }
  return all;
}

// Since libtorch 2.12 such a group inherits the optimizer's lr; before, it kept the default.
TEST(GroupOptions, InheritLikeTorch) {
  using torch::optim::AdamWOptions;
  const auto expected = get_group_options<torch::optim::AdamW, AdamWOptions>();
  EXPECT_EQ(expected[0] != 0, mezzo::detail::kGroupsInheritOptions);
  using namespace mezzo::optim;
  EXPECT_EQ((get_group_options<AdamW, AdamWOptions>()), expected);
  EXPECT_EQ((get_group_options<AdamW8bit, AdamWOptions>()), expected);
  EXPECT_EQ((get_group_options<Lion, LionOptions>()), expected);
  EXPECT_EQ((get_group_options<LAMB, LAMBOptions>()), expected);
  EXPECT_EQ((get_group_options<Muon, MuonOptions>()), expected);
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
