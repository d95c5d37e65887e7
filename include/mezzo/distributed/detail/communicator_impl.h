#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>

#include <memory>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

inline Work::Work(std::unique_ptr<detail::PendingCollective> pending) noexcept
    : pending_(std::move(pending)) {}

inline Work::~Work() { warn_if_unwaited(); }

inline Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    warn_if_unwaited();
    pending_ = std::move(other.pending_);
  }
  return *this;
}

inline bool Work::ready() { return pending_ == nullptr || pending_->ready(); }

inline void Work::wait() {
  if (const auto pending = std::move(pending_)) pending->wait();
}

inline void Work::warn_if_unwaited() noexcept {
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
  Work all_reduce(const at::Tensor& tensor, Reduction reduction) override {
    return communicator.all_reduce(tensor, reduction);
  }
  Work broadcast(const at::Tensor& tensor, int root) override {
    return communicator.broadcast(tensor, root);
  }
  Work all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return communicator.all_gather(output, input);
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      Reduction reduction) override {
    return communicator.reduce_scatter(output, input, reduction);
  }
  Work barrier() override { return communicator.barrier(); }

  C communicator;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
