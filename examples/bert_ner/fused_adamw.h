/// \file
/// AdamW in one pass over parameters, moments and gradients.
#pragma once

#include <torch/torch.h>

namespace bert_ner {

/// torch::optim::AdamW with the same options, state and answers, whose step() is libtorch's fused
/// kernel, one launch a group, where the C++ class loops over the parameters with a dozen
/// operations each (108 ms against 17 for 22.6 million parameters on 2 cores). `amsgrad` is not
/// taken.
class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  /// Parameters without a gradient are passed over. \returns the closure's loss, if there is one.
  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace bert_ner
