// A backend of one process that simulates several identical ranks.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace distributed_test {

struct CompletedWork : c10d::Work {
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/ = kNoTimeout) override { return true; }
};

/// The maximum and the average of identical values is the value itself.
class FakeBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit FakeBackend(int size) : Backend(0, size) {}
  /// "mpi", so that AVG is used.
  const std::string getBackendName() const override { return "mpi"; }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    const at::NoGradGuard no_grad;
    if (options.reduceOp == c10d::ReduceOp::SUM) tensors[0].mul_(size_);
    return done();
  }
  WorkPtr broadcast(std::vector<at::Tensor>& /*tensors*/,
                    const c10d::BroadcastOptions& /*options*/) override {
    return done();
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& /*options*/) override {
    output.view({size_, -1}).copy_(input.view({1, -1}).expand({size_, -1}));
    return done();
  }
  WorkPtr barrier(const c10d::BarrierOptions& /*options*/) override { return done(); }

 protected:
  static WorkPtr done() { return c10::make_intrusive<CompletedWork>(); }
};

inline c10::intrusive_ptr<c10d::Backend> make_fake_backend(int size) {
  return c10::make_intrusive<FakeBackend>(size);
}

}  // namespace distributed_test
