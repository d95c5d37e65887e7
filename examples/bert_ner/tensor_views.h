/// \file
/// Between libtorch's tensors and those of a safetensors file.
#pragma once

#include <torch/torch.h>

#include <string>

#include "safetensors.h"

namespace bert_ner {

/// A copy, on the CPU, of a tensor in a file.
torch::Tensor to_tensor(const TensorView& view);

/// A view of a contiguous CPU tensor, which must outlive it.
TensorView view_of(std::string name, const torch::Tensor& tensor);

}  // namespace bert_ner
