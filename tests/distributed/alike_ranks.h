// A communicator of one process that stands for several ranks doing just the same.
#pragma once

#include <mezzo/distributed/communicator.h>

#include <ATen/ATen.h>

#include <memory>

namespace distributed_test {

/// Maxima and averages of values that are all alike are those values.
class AlikeBackend : public mezzo::CommunicatorBackend {
 public:
  explicit AlikeBackend(int size) : size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  bool serves(c10::DeviceType device) const override { return device == at::kCPU; }
  mezzo::Work all_reduce(const at::Tensor& tensor, mezzo::Reduction reduction) override {
    const at::NoGradGuard no_grad;
    if (reduction == mezzo::Reduction::sum) at::Tensor(tensor).mul_(size_);
    return {};
  }
  mezzo::Work broadcast(const at::Tensor& /*tensor*/, int /*root*/) override { return {}; }
  mezzo::Work all_gather(const at::Tensor& output, const at::Tensor& input) override {
    at::Tensor(output).view({size_, -1}).copy_(input.view({1, -1}).expand({size_, -1}));
    return {};
  }
  mezzo::Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                             mezzo::Reduction reduction) override {
    at::Tensor(output).copy_(input.view({size_, -1})[0].view_as(output));
    if (reduction == mezzo::Reduction::sum) at::Tensor(output).mul_(size_);
    return {};
  }
  mezzo::Work barrier() override { return {}; }

 private:
  int size_;
};

class AlikeRanks : public mezzo::Communicator {
 public:
  explicit AlikeRanks(int size) : Communicator(std::make_shared<AlikeBackend>(size)) {}
};

}  // namespace distributed_test
