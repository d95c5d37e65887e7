#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/c10d_communicator.h>
#include <mezzo/distributed/detail/collective_call.h>
#include <mezzo/distributed/detail/low_precision_sums.h>
#include <mezzo/distributed/detail/written_tensor.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What `f` returns; what it throws, as c10::Error with `context` before its words.
template <class F>
auto with_context(const std::string& context, F f) {
  try {
    return f();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, context, ": ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    TORCH_CHECK(false, context, ": ", error.what());
  }
}

/// One of c10d's works, with the tensors that it reads and writes.
class C10dPending final : public PendingCollective {
 public:
  C10dPending(c10::intrusive_ptr<c10d::Work> work, std::string name, at::Tensor input,
              std::optional<WrittenTensor> written, std::function<void()> after)
      : work_(std::move(work)),
        name_(std::move(name)),
        input_(std::move(input)),
        written_(std::move(written)),
        after_(std::move(after)) {}

  bool ready() override { return !work_ || work_->isCompleted(); }

  void wait() override {
    const bool done = with_context(name_, [&] { return !work_ || work_->wait(); });
    TORCH_CHECK(done, name_, ": it was aborted");
    const c10::NoGradGuard no_grad;
    if (after_) after_();
    if (written_) written_->finish();
  }

  std::string name() const override { return name_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::string name_;
  at::Tensor input_;
  std::optional<WrittenTensor> written_;
  std::function<void()> after_;  ///< null: nothing is left to do once it is there
};

/// A process group or a backend: two classes of c10d's with the same calls and no common base.
class C10dGroup {
 public:
  using Group =
      std::variant<c10::intrusive_ptr<c10d::ProcessGroup>, c10::intrusive_ptr<c10d::Backend>>;

  C10dGroup(Group group, std::vector<c10::DeviceType> devices)
      : group_(std::move(group)), devices_(std::move(devices)) {
    TORCH_CHECK(std::visit([](auto& g) { return bool(g); }, group_),
                "C10dCommunicator: `group` is null");
    TORCH_CHECK(!devices_.empty(),
                "C10dCommunicator: `devices` is empty; name those that the group can take, such as "
                "{torch::kCUDA} for NCCL");
    rank_ = std::visit([](auto& g) { return g->getRank(); }, group_);
    size_ = std::visit([](auto& g) { return g->getSize(); }, group_);
    try {
      is_nccl_ = std::visit([](auto& g) { return g->getBackendName(); }, group_) == "nccl";
    } catch (const c10::Error&) {  // a backend need not have a name
    }
  }

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const std::vector<c10::DeviceType>& devices() const noexcept { return devices_; }

  /// NCCL alone knows averages: it multiplies by 1 / ranks as it reads, in the tensors' own dtype.
  /// A third rounded to bfloat16 is wrong by a thousandth for all elements alike, so there, as with
  /// other backends, values are divided before they are sent.
  bool averages(at::ScalarType dtype) const noexcept {
    const bool is_power_of_two = (size_ & (size_ - 1)) == 0;
    return is_nccl_ && (is_power_of_two || dtype == at::kFloat || dtype == at::kDouble);
  }

  c10d::ReduceOp op(at::ScalarType dtype, Reduction reduction) const {
    if (reduction == Reduction::max) return c10d::ReduceOp::MAX;
    const bool averages_here = reduction == Reduction::average && averages(dtype);
    return averages_here ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  }

  /// Starts one: `start` is given the group or backend, and returns its work; `after` makes of what
  /// has come what is written.
  template <class Start>
  Work launch(const CollectiveCall& call, const at::Tensor& input,
              std::optional<WrittenTensor> written, Start start,
              std::function<void()> after = nullptr) {
    std::string name = c10::str(call.name(), " on rank ", rank_, " of ", size_);
    auto work = with_context(name, [&] { return std::visit(start, group_); });
    return Work(std::make_unique<C10dPending>(std::move(work), std::move(name), input,
                                              std::move(written), std::move(after)));
  }

 private:
  Group group_;
  std::vector<c10::DeviceType> devices_;
  int rank_ = 0;
  int size_ = 0;
  bool is_nccl_ = false;
};

}  // namespace detail

template <class Group>
requires(std::derived_from<Group, c10d::ProcessGroup> || std::derived_from<Group, c10d::Backend>)
    C10dCommunicator::C10dCommunicator(c10::intrusive_ptr<Group> group,
                                       std::vector<c10::DeviceType> devices) {
  using Base = std::conditional_t<std::derived_from<Group, c10d::ProcessGroup>, c10d::ProcessGroup,
                                  c10d::Backend>;
  group_ = std::make_shared<detail::C10dGroup>(c10::intrusive_ptr<Base>(std::move(group)),
                                               std::move(devices));
}

inline int C10dCommunicator::rank() const { return group_->rank(); }
inline int C10dCommunicator::size() const { return group_->size(); }

inline bool C10dCommunicator::serves(c10::DeviceType device) const noexcept {
  const auto& devices = group_->devices();
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

inline Work C10dCommunicator::all_reduce(const at::Tensor& tensor, Reduction reduction) {
  detail::check_all_reduce(*this, tensor, reduction);
  const c10::NoGradGuard no_grad;
  const detail::WrittenTensor written(tensor, detail::WrittenTensor::Contents::read);
  if (reduction == Reduction::average && !group_->averages(tensor.scalar_type())) {
    written.flat().mul_(1. / size());
  }
  return group_->launch(
      {detail::Collective::all_reduce, tensor.scalar_type(), tensor.numel(), reduction}, {},
      written, [&](const auto& group) {
        std::vector<at::Tensor> tensors = {written.flat()};
        c10d::AllreduceOptions options;
        options.reduceOp = group_->op(tensor.scalar_type(), reduction);
        return group->allreduce(tensors, options);
      });
}

inline Work C10dCommunicator::broadcast(const at::Tensor& tensor, int root) {
  detail::check_broadcast(*this, tensor, root);
  const c10::NoGradGuard no_grad;
  const detail::WrittenTensor written(tensor, detail::WrittenTensor::Contents::read);
  // The root's own is only read, and stays as it is for autograd too.
  std::optional<detail::WrittenTensor> to_finish;
  if (root != rank()) to_finish = written;
  return group_->launch(
      {detail::Collective::broadcast, tensor.scalar_type(), tensor.numel(), Reduction::sum, root},
      written.flat(), to_finish, [&](const auto& group) {
        std::vector<at::Tensor> tensors = {written.flat()};
        c10d::BroadcastOptions options;
        options.rootRank = root;
        return group->broadcast(tensors, options);
      });
}

inline Work C10dCommunicator::all_gather(const at::Tensor& output, const at::Tensor& input) {
  detail::check_all_gather(*this, output, input);
  const c10::NoGradGuard no_grad;
  const detail::WrittenTensor written(output, detail::WrittenTensor::Contents::replaced);
  at::Tensor given = input.detach().contiguous().view({-1});
  if (given.is_alias_of(written.flat())) given = given.clone();
  return group_->launch({detail::Collective::all_gather, input.scalar_type(), input.numel()}, given,
                        written, [&](const auto& group) {
                          at::Tensor to = written.flat();
                          return group->_allgather_base(to, given);
                        });
}

inline Work C10dCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                             Reduction reduction) {
  detail::check_reduce_scatter(*this, output, input, reduction);
  const c10::NoGradGuard no_grad;
  const detail::WrittenTensor written(output, detail::WrittenTensor::Contents::replaced,
                                      !output.is_alias_of(input));
  at::Tensor given = input.detach().contiguous().view({-1});
  const detail::CollectiveCall call{detail::Collective::reduce_scatter, input.scalar_type(),
                                    input.numel(), reduction};
  if (output.scalar_type() != input.scalar_type()) {
    // No backend reduces into another dtype: each rank adds up its part itself.
    at::Tensor rows = at::empty({size(), output.numel()}, given.options());
    return group_->launch(
        call, given, written,
        [&](const auto& group) {
          std::vector<int64_t> equal_parts;
          at::Tensor received = rows.view({-1});
          return group->alltoall_base(received, given, equal_parts, equal_parts);
        },
        [rows, reduction, written] { written.flat().copy_(detail::reduce_rows(rows, reduction)); });
  }
  if (reduction == Reduction::average && !group_->averages(input.scalar_type())) {
    given = given.mul(1. / size());
  }
  return group_->launch(call, given, written, [&](const auto& group) {
    at::Tensor to = written.flat();
    c10d::ReduceScatterOptions options;
    options.reduceOp = group_->op(input.scalar_type(), reduction);
    return group->_reduce_scatter_base(to, given, options);
  });
}

inline Work C10dCommunicator::barrier() {
  return group_->launch({detail::Collective::barrier}, {}, std::nullopt,
                        [](const auto& group) { return group->barrier(); });
}

inline c10::intrusive_ptr<c10d::Store> rendezvous(const ProcessGroupEnvironment& environment,
                                                  std::chrono::milliseconds timeout) {
  const std::string context =
      c10::str("mezzo::rendezvous: rank ", environment.rank, " of ", environment.world_size, " at ",
               environment.master_addr, ":", environment.master_port);
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.isServer = environment.rank == 0;
  options.numWorkers = static_cast<std::size_t>(environment.world_size);
  options.timeout = timeout;
  return detail::with_context(context, [&]() -> c10::intrusive_ptr<c10d::Store> {
    return c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
  });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
