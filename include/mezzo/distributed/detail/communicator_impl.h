#pragma once

#include <c10/util/Exception.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/base/version.h>

#include <memory>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

inline CollectiveRequest::CollectiveRequest(
    std::unique_ptr<detail::PendingCollective> pending) noexcept
    : pending_(std::move(pending)) {}

inline CollectiveRequest::~CollectiveRequest() { warn_if_unwaited(); }

inline CollectiveRequest& CollectiveRequest::operator=(CollectiveRequest&& other) noexcept {
  if (this != &other) {
    warn_if_unwaited();
    pending_ = std::move(other.pending_);
  }
  return *this;
}

inline bool CollectiveRequest::ready() { return pending_ == nullptr || pending_->ready(); }

inline void CollectiveRequest::wait() {
  if (const auto pending = std::move(pending_)) pending->wait();
}

inline void CollectiveRequest::warn_if_unwaited() noexcept {
  if (pending_ == nullptr) return;
  try {
    TORCH_WARN("mezzo: nobody waited for ", pending_->name(),
               ": keep the request that the call returns, and call wait() on it");
  } catch (...) {  // a warning handler may throw; a destructor may not
  }
}

template <class C>
struct AnyCommunicator::Model final : Interface {
  template <class D>
  explicit Model(D&& given) : communicator(std::forward<D>(given)) {}

  int rank() const override { return communicator.rank(); }
  int size() const override { return communicator.size(); }
  bool serves(c10::DeviceType device) const override { return communicator.serves(device); }
  CollectiveRequest all_reduce(const at::Tensor& tensor, Reduction reduction) override {
    return communicator.all_reduce(tensor, reduction);
  }
  CollectiveRequest broadcast(const at::Tensor& tensor, int root) override {
    return communicator.broadcast(tensor, root);
  }
  CollectiveRequest all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return communicator.all_gather(output, input);
  }
  CollectiveRequest reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                   Reduction reduction) override {
    return communicator.reduce_scatter(output, input, reduction);
  }
  CollectiveRequest barrier() override { return communicator.barrier(); }

  C communicator;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
