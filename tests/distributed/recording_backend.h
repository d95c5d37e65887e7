// A backend that records the collectives that it forwards.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace distributed_test {

class RecordingBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// Called at the start of each collective, with its name (of an all-reduce the reduction) and its
  /// tensor (the output; undefined for a barrier).
  using Listener = std::function<void(const std::string& collective, const at::Tensor& tensor)>;

  RecordingBackend(c10::intrusive_ptr<c10d::Backend> inner, Listener listener)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        listener_(std::move(listener)) {}
  const std::string getBackendName() const override { return inner_->getBackendName(); }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    const auto reduction = options.reduceOp.op_;
    listener_(reduction == c10d::ReduceOp::SUM   ? "sum"
              : reduction == c10d::ReduceOp::AVG ? "average"
                                                 : "max",
              tensors[0]);
    return inner_->allreduce(tensors, options);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override {
    listener_("broadcast", tensors[0]);
    return inner_->broadcast(tensors, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    listener_("all_gather", output);
    return inner_->_allgather_base(output, input, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    listener_("barrier", at::Tensor());
    return inner_->barrier(options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  Listener listener_;
};

inline c10::intrusive_ptr<c10d::Backend> make_recording_backend(
    c10::intrusive_ptr<c10d::Backend> inner, RecordingBackend::Listener listener) {
  return c10::make_intrusive<RecordingBackend>(std::move(inner), std::move(listener));
}

/// Appends the names of collectives to `log`.
inline c10::intrusive_ptr<c10d::Backend> make_recording_backend(
    c10::intrusive_ptr<c10d::Backend> inner, std::vector<std::string>& log) {
  return make_recording_backend(
      std::move(inner), [&log](const std::string& collective, const at::Tensor& /*tensor*/) {
        log.push_back(collective);
      });
}

}  // namespace distributed_test
