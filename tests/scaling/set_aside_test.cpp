// Gradients that are set aside for a scope come back as they were, or join those that came since.

#include <mezzo/scaling/detail/set_aside.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <vector>

namespace {

using mezzo::detail::SetAside;
using torch::Tensor;

Tensor leaf(torch::ScalarType dtype = torch::kFloat) {
  return torch::ones({3}, dtype).requires_grad_();
}

Tensor sparse(double value, torch::ScalarType dtype = torch::kFloat) {
  return torch::sparse_coo_tensor(torch::tensor({{int64_t{1}}}), torch::full({1}, value, dtype),
                                  {3});
}

TEST(SetAside, PutsBackAViewWhoseMemoryTheNextPassHasWritten) {
  const auto a = leaf();
  const auto flat = torch::zeros({8});
  const auto place = flat.narrow(0, 2, 3);
  place.fill_(2);
  a.mutable_grad() = place;
  {
    const SetAside before({a});
    place.fill_(7);  // as the hook of a bucket does
    a.mutable_grad() = place;
  }
  EXPECT_TRUE(a.grad().is_same(place));
  EXPECT_TRUE(torch::equal(place, torch::full({3}, 2.0F)));
}

TEST(SetAside, TheSumIsAFloatWhereOneOfTheTwoIs) {
  for (const auto low : {torch::kBFloat16, torch::kHalf}) {
    for (const bool is_old_wide : {false, true}) {
      const auto a = leaf(low);
      a.mutable_grad() = torch::full({3}, 2048.0, is_old_wide ? torch::kFloat : low);
      SetAside before({a});
      a.mutable_grad() = torch::full({3}, 1.0, is_old_wide ? low : torch::kFloat);
      before.add_back();
      EXPECT_TRUE(torch::equal(a.grad(), torch::full({3}, 2049.0F)));
    }
  }
}

TEST(SetAside, AddsSparseToDenseAndDenseToSparse) {
  const auto expected = torch::tensor({1.0F, 3.0F, 1.0F});
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const bool is_old_sparse : {false, true}) {
      const auto a = leaf(dtype);
      a.mutable_grad() = is_old_sparse ? sparse(2) : torch::ones({3}, dtype);
      SetAside before({a});
      a.mutable_grad() = is_old_sparse ? torch::ones({3}, dtype) : sparse(2);
      before.add_back();
      EXPECT_TRUE(torch::equal(a.grad(), expected)) << dtype << is_old_sparse << a.grad();
    }
  }
  const auto a = leaf();
  a.mutable_grad() = sparse(2);
  SetAside before({a});
  a.mutable_grad() = sparse(3);
  before.add_back();
  EXPECT_TRUE(a.grad().is_sparse());
  EXPECT_TRUE(torch::equal(a.grad().to_dense(), torch::tensor({0.0F, 5.0F, 0.0F})));
}

}  // namespace
