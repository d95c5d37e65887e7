// A communicator of one process that stands for several ranks doing just the same.
#pragma once

#include <ATen/ATen.h>
#include <mezzo/distributed/communicator.h>

namespace distributed_test {

class AlikeRanks {
 public:
  explicit AlikeRanks(int size) : size_(size) {}
  int rank() const { return 0; }
  int size() const { return size_; }
  bool serves(c10::DeviceType device) const { return device == at::kCPU; }
  /// Maxima and averages of values that are all alike are those values.
  mezzo::Work all_reduce(const at::Tensor& tensor, mezzo::Reduction reduction) {
    const at::NoGradGuard no_grad;
    if (reduction == mezzo::Reduction::sum) at::Tensor(tensor).mul_(size_);
    return {};
  }
  mezzo::Work broadcast(const at::Tensor& /*tensor*/, int /*root*/) { return {}; }
  mezzo::Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    at::Tensor(output).view({size_, -1}).copy_(input.view({1, -1}).expand({size_, -1}));
    return {};
  }
  mezzo::Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                             mezzo::Reduction reduction) {
    at::Tensor(output).copy_(input.view({size_, -1})[0].view_as(output));
    if (reduction == mezzo::Reduction::sum) at::Tensor(output).mul_(size_);
    return {};
  }
  mezzo::Work barrier() { return {}; }

 private:
  int size_;
};

}  // namespace distributed_test
