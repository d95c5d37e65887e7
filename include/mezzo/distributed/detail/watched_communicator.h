#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/collective_call.h>
#include <mezzo/distributed/detail/collective_log.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A communicator that writes into a log what is called and waited for.
class WatchedCommunicator {
 public:
  WatchedCommunicator(AnyCommunicator under, std::shared_ptr<CollectiveLog> log)
      : under_(std::move(under)), log_(std::move(log)), number_(log_->add_communicator()) {}

  int rank() const { return under_.rank(); }
  int size() const { return under_.size(); }
  bool serves(c10::DeviceType device) const { return under_.serves(device); }

  Work all_reduce(const at::Tensor& tensor, Reduction reduction) {
    return launch({Collective::all_reduce, dtype(tensor), numel(tensor), reduction},
                  [&] { return under_.all_reduce(tensor, reduction); });
  }
  Work broadcast(const at::Tensor& tensor, int root) {
    return launch({Collective::broadcast, dtype(tensor), numel(tensor), Reduction::sum, root},
                  [&] { return under_.broadcast(tensor, root); });
  }
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return launch({Collective::all_gather, dtype(input), numel(input)},
                  [&] { return under_.all_gather(output, input); });
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, Reduction reduction) {
    return launch({Collective::reduce_scatter, dtype(input), numel(input), reduction},
                  [&] { return under_.reduce_scatter(output, input, reduction); });
  }
  Work barrier() {
    return launch({Collective::barrier}, [&] { return under_.barrier(); });
  }

 private:
  class Pending final : public PendingCollective {
   public:
    Pending(Work under, std::shared_ptr<CollectiveLog> log, const CollectiveLog::Entry& entry,
            int rank, int size)
        : under_(std::move(under)), log_(std::move(log)), entry_(entry), rank_(rank), size_(size) {}
    ~Pending() override { under_.abandon(); }  // who holds this one has warned
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;

    bool ready() override { return under_.ready(); }
    void wait() override {
      const CollectiveLog::Waiting waiting(*log_, entry_);
      under_.wait();
    }
    std::string name() const override {
      return c10::str(entry_.call.name(), " on rank ", rank_, " of ", size_);
    }

   private:
    Work under_;
    std::shared_ptr<CollectiveLog> log_;
    CollectiveLog::Entry entry_;
    int rank_;
    int size_;
  };

  // What is undefined the communicator under it will refuse.
  static at::ScalarType dtype(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.scalar_type() : at::kByte;
  }
  static int64_t numel(const at::Tensor& tensor) { return tensor.defined() ? tensor.numel() : 0; }

  /// Starting one may itself wait for other ranks, as NCCL's first does.
  template <class Start>
  Work launch(const CollectiveCall& call, const Start& start) {
    const CollectiveLog::Entry entry = log_->called(number_, call);
    try {
      const CollectiveLog::Waiting waiting(*log_, entry);
      return Work(std::make_unique<Pending>(start(), log_, entry, rank(), size()));
    } catch (...) {
      log_->refused(entry);
      throw;
    }
  }

  AnyCommunicator under_;
  std::shared_ptr<CollectiveLog> log_;
  int64_t number_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
