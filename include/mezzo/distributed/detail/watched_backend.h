#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/collectives.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A collective whose waiting is logged.
class WatchedWork final : public c10d::Work {
 public:
  WatchedWork(WorkPtr under, std::shared_ptr<CollectiveLog> log, const CollectiveLog::Entry& entry)
      : Work(-1, entry.call.collective),
        under_(std::move(under)),
        log_(std::move(log)),
        entry_(entry) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const CollectiveLog::Waiting waiting(*log_, entry_);
    return under_->wait(timeout);
  }
  bool isCompleted() override { return under_->isCompleted(); }
  bool isSuccess() const override { return under_->isSuccess(); }
  std::exception_ptr exception() const override { return under_->exception(); }
  std::vector<at::Tensor> result() override { return under_->result(); }
  void synchronize() override { under_->synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return under_->getFuture(); }

 private:
  WorkPtr under_;
  std::shared_ptr<CollectiveLog> log_;
  CollectiveLog::Entry entry_;
};

/// Passes every collective on, and logs the calls and the waiting. (c10d's ProcessGroupWrapper is
/// such a backend too.)
class WatchedBackend final : public c10d::Backend {
 public:
  WatchedBackend(GroupPtr under, std::shared_ptr<CollectiveLog> log)
      : Backend(under->getRank(), under->getSize()),
        under_(std::move(under)),
        log_(std::move(log)),
        number_(log_->add_group()) {}

  const std::string getBackendName() const override { return under_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return under_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { under_->setTimeout(timeout); }
  void abort() override { under_->abort(); }
  void shutdown() override { under_->shutdown(); }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options = {}) override {
    return launch(c10d::OpType::ALLREDUCE, tensors, options.reduceOp, 0,
                  [&] { return under_->allreduce(tensors, options); });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options = {}) override {
    return launch(c10d::OpType::BROADCAST, tensors, c10d::ReduceOp::SUM, options.rootRank,
                  [&] { return under_->broadcast(tensors, options); });
  }
  WorkPtr reduce(std::vector<at::Tensor>& tensors,
                 const c10d::ReduceOptions& options = {}) override {
    return launch(c10d::OpType::REDUCE, tensors, options.reduceOp, options.rootRank,
                  [&] { return under_->reduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options = {}) override {
    return launch(c10d::OpType::ALLGATHER, inputs, c10d::ReduceOp::SUM, 0,
                  [&] { return under_->allgather(outputs, inputs, options); });
  }
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& options = {}) override {
    return launch(c10d::OpType::GATHER, inputs, c10d::ReduceOp::SUM, options.rootRank,
                  [&] { return under_->gather(outputs, inputs, options); });
  }
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options = {}) override {
    return launch(c10d::OpType::SCATTER, outputs, c10d::ReduceOp::SUM, options.rootRank,
                  [&] { return under_->scatter(outputs, inputs, options); });
  }
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options = {}) override {
    return launch(c10d::OpType::REDUCE_SCATTER, outputs, options.reduceOp, 0,
                  [&] { return under_->reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& options = {}) override {
    return launch(c10d::OpType::ALLTOALL, inputs, c10d::ReduceOp::SUM, 0,
                  [&] { return under_->alltoall(outputs, inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& /*options*/ = {}) override {
    return launch(c10d::OpType::_ALLGATHER_BASE, {input}, c10d::ReduceOp::SUM, 0,
                  [&] { return detail::all_gather_single(*under_, output, input); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options = {}) override {
    return launch(c10d::OpType::_REDUCE_SCATTER_BASE, {input}, options.reduceOp, 0,
                  [&] { return under_->_reduce_scatter_base(output, input, options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options = {}) override {
    return launch(c10d::OpType::ALLTOALL_BASE, {input}, c10d::ReduceOp::SUM, 0, [&] {
      return under_->alltoall_base(output, input, output_sizes, input_sizes, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override {
    return launch(c10d::OpType::BARRIER, {}, c10d::ReduceOp::SUM, 0,
                  [&] { return under_->barrier(options); });
  }

 private:
  template <class Start>
  WorkPtr launch(c10d::OpType collective, const std::vector<at::Tensor>& inputs,
                 c10d::ReduceOp::RedOpType op, int64_t root, const Start& start) {
    CollectiveCall call(collective);
    call.reduction = op;
    call.root = static_cast<int>(root);
    for (const at::Tensor& input : inputs) {
      if (!input.defined()) continue;  // the backend refuses it
      call.dtype = input.scalar_type();
      call.numel += input.numel();
    }
    const CollectiveLog::Entry entry = log_->called(number_, call);
    try {
      // Starting one may itself wait for other ranks, as NCCL's first does.
      const CollectiveLog::Waiting waiting(*log_, entry);
      return c10::make_intrusive<WatchedWork>(start(), log_, entry);
    } catch (...) {
      log_->refused(entry);
      throw;
    }
  }

  GroupPtr under_;
  std::shared_ptr<CollectiveLog> log_;
  int64_t number_;  ///< in the log
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
