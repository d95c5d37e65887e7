/// \file
/// The dtype of a matrix product under the current autocast state.
#pragma once

#include <torch/torch.h>

inline torch::ScalarType get_product_dtype() {
  return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}
