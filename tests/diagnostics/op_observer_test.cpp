#include <mezzo/diagnostics/op_observer.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <vector>

namespace {

TEST(TensorNameLookup, FindsViewsAndFlatParams) {
  const torch::Tensor flat = torch::zeros({10});
  torch::nn::Linear layer(2, 2);
  const mezzo::detail::TensorNameLookup names({{"a.weight", flat.narrow(0, 0, 4)},
                                               {"b.weight", flat.narrow(0, 4, 6)},
                                               {"c", layer->weight}});
  EXPECT_EQ(names.find_name(flat.narrow(0, 5, 2)), "b.weight");
  EXPECT_EQ(names.find_name(flat.narrow(0, 0, 2).view({2, 1})), "a.weight");
  EXPECT_EQ(names.find_name(layer->weight.t()), "c");
  EXPECT_EQ(names.find_name(torch::zeros({4})), "");
  const std::vector<c10::IValue> inputs = {torch::zeros({2}), flat.narrow(0, 4, 6)};
  EXPECT_EQ(names.find_module(mezzo::detail::OpArguments(inputs.data(), inputs.size())), "b");
  layer->weight.set_data(torch::zeros({2, 2}));
  EXPECT_EQ(names.find_name(flat), "a.weight");
}

}  // namespace
