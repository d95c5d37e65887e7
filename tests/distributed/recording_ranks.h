// A group that tells of the collectives that it passes on.
#pragma once

#include <mezzo/distributed/detail/collectives.h>

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
  /// Hears of each collective as it begins, an all-reduce by its reduction, and of the tensor: of
  /// an input and an output the one that is all ranks' together; of a barrier none.
  using Listener = std::function<void(const std::string& collective, const at::Tensor& tensor)>;

  RecordingBackend(c10::intrusive_ptr<c10d::Backend> inner, Listener listener)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        listener_(std::move(listener)) {}
  const std::string getBackendName() const override { return inner_->getBackendName(); }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    listener_(mezzo::detail::name_of(options.reduceOp.op_), tensors[0]);
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
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    listener_("reduce_scatter", input);
    return inner_->_reduce_scatter_base(output, input, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    listener_("all_to_all", input);
    return inner_->alltoall_base(output, input, output_sizes, input_sizes, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    listener_("barrier", at::Tensor());
    return inner_->barrier(options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  Listener listener_;
};

inline c10::intrusive_ptr<c10d::Backend> recording_ranks(c10::intrusive_ptr<c10d::Backend> inner,
                                                         RecordingBackend::Listener listener) {
  return c10::make_intrusive<RecordingBackend>(std::move(inner), std::move(listener));
}

/// Writes the names down.
inline c10::intrusive_ptr<c10d::Backend> recording_ranks(c10::intrusive_ptr<c10d::Backend> inner,
                                                         std::vector<std::string>& log) {
  return recording_ranks(std::move(inner),
                         [&log](const std::string& collective, const at::Tensor& /*tensor*/) {
                           log.push_back(collective);
                         });
}

}  // namespace distributed_test
