/// \file
/// Collectives through libtorch's process groups: NCCL on GPUs, and whatever else speaks c10d.
#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/c10d_collectives.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/communicator_impl.h>
#include <mezzo/distributed/process_group_environment.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Where the processes of `environment` meet: libtorch's TCPStore, whose server rank 0 is. Returns
/// when all have come.
/// \throws c10::Error naming rank and address, if they have not within `timeout`
c10::intrusive_ptr<c10d::Store> rendezvous(
    const ProcessGroupEnvironment& environment,
    std::chrono::milliseconds timeout = std::chrono::minutes(5));

/// A process group or a backend of c10d as a Communicator. distributed/nccl_communicator.h makes
/// one of NCCL's.
///
/// `wait` is c10d's: of tensors on a GPU the current stream waits, not the host. bfloat16 and half
/// are added up as the backend does it; only their reduce_scatter into float is an all-to-all and
/// a sum on each rank, for no backend reduces into another dtype. Whether all ranks call the same
/// is the backend's to check (NCCL's: TORCH_DISTRIBUTED_DEBUG=DETAIL), and so are timeouts. Tensors
/// with gaps are copied.
class C10dCommunicator : public Communicator {
 public:
  /// `devices`: those whose tensors the group can take, as the caller knows.
  /// \throws c10::Error if the group is null or `devices` is empty
  template <class Group>
  requires(std::derived_from<Group, c10d::ProcessGroup> || std::derived_from<Group, c10d::Backend>)
      C10dCommunicator(c10::intrusive_ptr<Group> group, std::vector<c10::DeviceType> devices);
};

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
class C10dPending final : public Work::Pending {
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
    TORCH_CHECK(
        done, name_,
        ": it was aborted: look at what the other ranks say, and begin again from a checkpoint");
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

/// Collectives through a process group or a backend: two classes of c10d's with the same calls and
/// no common base.
class C10dBackend final : public CommunicatorBackend {
 public:
  using Group =
      std::variant<c10::intrusive_ptr<c10d::ProcessGroup>, c10::intrusive_ptr<c10d::Backend>>;

  C10dBackend(Group group, std::vector<c10::DeviceType> devices)
      : group_(std::move(group)), devices_(std::move(devices)) {
    TORCH_CHECK(std::visit([](auto& g) { return bool(g); }, group_),
                "C10dCommunicator: `group` is null; make the process group first");
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

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool serves(c10::DeviceType device) const override {
    return std::find(devices_.begin(), devices_.end(), device) != devices_.end();
  }

  Work all_reduce(const at::Tensor& tensor, Reduction reduction) override {
    const c10::NoGradGuard no_grad;
    const WrittenTensor written(tensor, WrittenTensor::Contents::read);
    if (divides_before(tensor, reduction)) written.flat().div_(size_);
    return launch({Collective::all_reduce, tensor, reduction}, {}, written, [&](const auto& group) {
      std::vector<at::Tensor> tensors = {written.flat()};
      c10d::AllreduceOptions options;
      options.reduceOp = op(tensor, reduction);
      return group->allreduce(tensors, options);
    });
  }

  Work broadcast(const at::Tensor& tensor, int root) override {
    const c10::NoGradGuard no_grad;
    const WrittenTensor written(tensor, WrittenTensor::Contents::read);
    // The root's own is only read, and stays as it is for autograd too.
    std::optional<WrittenTensor> to_finish;
    if (root != rank_) to_finish = written;
    return launch({Collective::broadcast, tensor, Reduction::sum, root}, written.flat(), to_finish,
                  [&](const auto& group) {
                    std::vector<at::Tensor> tensors = {written.flat()};
                    c10d::BroadcastOptions options;
                    options.rootRank = root;
                    return group->broadcast(tensors, options);
                  });
  }

  Work all_gather(const at::Tensor& output, const at::Tensor& input) override {
    const c10::NoGradGuard no_grad;
    const WrittenTensor written(output, WrittenTensor::Contents::replaced);
    at::Tensor given = input.detach().contiguous().view({-1});
    if (given.is_alias_of(written.flat())) given = given.clone();
    return launch({Collective::all_gather, input}, given, written, [&](const auto& group) {
      at::Tensor to = written.flat();
      return all_gather_single(*group, to, given);
    });
  }

  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      Reduction reduction) override {
    const c10::NoGradGuard no_grad;
    const WrittenTensor written(output, WrittenTensor::Contents::replaced,
                                !output.is_alias_of(input));
    at::Tensor given = input.detach().contiguous().view({-1});
    const CollectiveCall call(Collective::reduce_scatter, input, reduction);
    if (output.scalar_type() != input.scalar_type()) {
      // No backend reduces into another dtype: each rank adds up its part itself.
      const at::Tensor rows = at::empty({size_, output.numel()}, given.options());
      return launch(
          call, given, written,
          [&](const auto& group) {
            at::Tensor received = rows.view({-1});
            return all_to_all_single(*group, received, given);
          },
          [rows, reduction, written] { written.flat().copy_(reduce_rows(rows, reduction)); });
    }
    if (divides_before(input, reduction)) given = given.div(size_);
    return launch(call, given, written, [&](const auto& group) {
      at::Tensor to = written.flat();
      c10d::ReduceScatterOptions options;
      options.reduceOp = op(input, reduction);
      return reduce_scatter_single(*group, to, given, options);
    });
  }

  Work barrier() override {
    return launch({Collective::barrier}, {}, std::nullopt,
                  [](const auto& group) { return group->barrier(); });
  }

 private:
  /// NCCL alone knows averages: it multiplies by 1 / ranks as it reads, in the tensor's own dtype.
  /// A third rounded to bfloat16 is wrong by a thousandth for all elements alike, so there, as with
  /// other backends, values are divided before they are sent.
  bool divides_before(const at::Tensor& tensor, Reduction reduction) const {
    const bool is_power_of_two = (size_ & (size_ - 1)) == 0;
    const bool nccl_does = is_nccl_ && (is_power_of_two || !is_low_precision(tensor));
    return reduction == Reduction::average && !nccl_does;
  }

  c10d::ReduceOp op(const at::Tensor& tensor, Reduction reduction) const {
    if (reduction == Reduction::max) return c10d::ReduceOp::MAX;
    if (reduction == Reduction::sum || divides_before(tensor, reduction)) {
      return c10d::ReduceOp::SUM;
    }
    return c10d::ReduceOp::AVG;
  }

  /// Starts one: `start` is given the group or backend, and returns its work; `after` makes of what
  /// has come what is written.
  template <class Start>
  Work launch(const CollectiveCall& call, const at::Tensor& input,
              std::optional<WrittenTensor> written, Start start,
              std::function<void()> after = nullptr) {
    std::string name = call.name_on(rank_, size_);
    auto work = with_context(name, [&] { return std::visit(start, group_); });
    return Work(std::make_unique<C10dPending>(std::move(work), std::move(name), input,
                                              std::move(written), std::move(after)));
  }

  Group group_;
  std::vector<c10::DeviceType> devices_;
  int rank_ = 0;
  int size_ = 0;
  bool is_nccl_ = false;
};

/// The one of the two classes that `group` is a kind of.
template <class Group>
C10dBackend::Group as_c10d_group(c10::intrusive_ptr<Group> group) {
  using Base = std::conditional_t<std::derived_from<Group, c10d::ProcessGroup>, c10d::ProcessGroup,
                                  c10d::Backend>;
  return c10::intrusive_ptr<Base>(std::move(group));
}

}  // namespace detail

template <class Group>
requires(std::derived_from<Group, c10d::ProcessGroup> || std::derived_from<Group, c10d::Backend>)
    C10dCommunicator::C10dCommunicator(c10::intrusive_ptr<Group> group,
                                       std::vector<c10::DeviceType> devices)
    : Communicator(std::make_shared<detail::C10dBackend>(detail::as_c10d_group(std::move(group)),
                                                         std::move(devices))) {}

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
