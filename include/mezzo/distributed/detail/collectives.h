/// \file
/// How mezzo calls the collectives of a c10d backend: averages on every backend, and errors that
/// name the rank and the collective.
#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using GroupPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Returns the reduction's name in errors: "sum", "average", ...
inline const char* name_of(c10d::ReduceOp::RedOpType reduction) {
  switch (reduction) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "average";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    default:
      return "other";
  }
}

/// One rank's call of a collective, as ranks compare it and errors name it. `numel` counts the
/// elements that go in.
struct CollectiveCall {
  c10d::OpType collective;
  at::ScalarType dtype = at::kByte;
  int64_t numel = 0;
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
  int root = 0;

  CollectiveCall(c10d::OpType of) : collective(of) {}  // implicit, for a barrier
  CollectiveCall(c10d::OpType of, const at::Tensor& input,
                 c10d::ReduceOp::RedOpType by = c10d::ReduceOp::SUM, int from = 0)
      : collective(of),
        dtype(input.scalar_type()),
        numel(input.numel()),
        reduction(by),
        root(from) {}

  bool operator==(const CollectiveCall&) const = default;

  std::string name() const {
    using c10d::OpType;
    const std::string of = c10::str(" of ", numel, " ", c10::toString(dtype));
    switch (collective) {
      case OpType::ALLREDUCE:
        return c10::str("all_reduce(", name_of(reduction), ")", of);
      case OpType::BROADCAST:
        return c10::str("broadcast from rank ", root, of);
      case OpType::ALLGATHER:
      case OpType::_ALLGATHER_BASE:
        return "all_gather" + of;
      case OpType::REDUCE_SCATTER:
      case OpType::_REDUCE_SCATTER_BASE:
        return c10::str("reduce_scatter(", name_of(reduction), ")", of);
      case OpType::ALLTOALL:
      case OpType::ALLTOALL_BASE:
        return "all_to_all" + of;
      case OpType::BARRIER:
        return "barrier";
      case OpType::UNKNOWN:
        return "the end of this group";
      default:
        return c10d::opTypeToString(collective) + of;
    }
  }
  std::string name_on(int rank, int size) const {
    return c10::str(name(), " on rank ", rank, " of ", size);
  }
};

inline std::string in_seconds(std::chrono::milliseconds time) {
  const auto tenths = (time.count() + 50) / 100;
  return std::to_string(tenths / 10) + '.' + std::to_string(tenths % 10) + " s";
}

/// Returns `group`. \throws c10::Error if it is null
inline GroupPtr checked(GroupPtr group, const char* caller) {
  TORCH_CHECK(group, caller,
              ": `group` is null; give a c10d backend, such as a MpiBackend, a ProcessGroupNCCL or "
              "process_group->getBackend(torch::kCUDA)");
  return group;
}

/// Returns the backend's name; empty where it has none.
inline std::string name_of(const c10d::Backend& group) {
  try {
    return group.getBackendName();
  } catch (const c10::Error&) {
    return {};
  }
}

/// Returns a device whose tensors the group takes, for messages of mezzo's own.
inline at::Device device_of(const c10d::Backend& group) {
  return name_of(group) == "nccl" ? at::kCUDA : at::kCPU;
}

/// \throws c10::Error where the group is known not to take tensors on `device`
inline void check_device(const std::string& caller, const c10d::Backend& group, at::Device device) {
  const std::string name = name_of(group);
  const bool wrong = (name == "mpi" && !device.is_cpu()) || (name == "nccl" && !device.is_cuda()) ||
                     (name == "gloo" && !device.is_cpu() && !device.is_cuda());
  TORCH_CHECK(!wrong, caller, " on rank ", group.getRank(), ": a tensor is on ", device,
              ", which the group's backend ", name,
              " does not take; move the model (MPI and Gloo take cpu, NCCL takes cuda)");
}

/// Raises the version counter of a tensor that a collective writes.
inline void note_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

/// Divides a sum, so that it is rounded once; multiplied by 1 / ranks, it would be rounded twice.
inline void divide_by(const at::Tensor& sum, int64_t ranks) {
  const c10::NoGradGuard no_grad;
  if (ranks > 1) sum.div_(ranks);
}

/// Returns in float the reduction of `rows`, a row a rank, in the order of the ranks.
inline at::Tensor reduce_rows(const at::Tensor& rows, c10d::ReduceOp::RedOpType op) {
  const c10::NoGradGuard no_grad;
  at::Tensor reduced = rows[0].to(at::kFloat);
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    if (op == c10d::ReduceOp::MAX) {
      const at::Tensor row = rows[rank].to(at::kFloat);
      at::maximum_out(reduced, reduced, row);
    } else if (op == c10d::ReduceOp::MIN) {
      const at::Tensor row = rows[rank].to(at::kFloat);
      at::minimum_out(reduced, reduced, row);
    } else {
      reduced.add_(rows[rank]);  // widened element by element
    }
  }
  if (op == c10d::ReduceOp::AVG) divide_by(reduced, rows.size(0));
  return reduced;
}

/// Returns the result of `f`. An exception of `f` is thrown on as c10::Error, with `context` before
/// its message.
template <class F>
auto with_context(const std::string& context, F f) {
  try {
    return f();
  } catch (...) {
    const std::string words = message_of_current_exception();
    TORCH_CHECK(false, words.starts_with(context) ? "" : context + ": ", words);
  }
}

/// One collective under way, with its name for errors and a function to call when it is done.
class Request {
 public:
  Request(WorkPtr work, std::string name, std::function<void()> after)
      : work_(std::move(work)), name_(std::move(name)), after_(std::move(after)) {}

  /// Returns when the result may be used: tensors on the CPU may be read; of tensors on a GPU the
  /// current stream has been told to wait, and the host has not waited. Later calls do nothing.
  /// \throws c10::Error naming the rank, the collective and what the backend said
  void wait() {
    if (is_over_) return;
    is_over_ = true;
    const bool done = with_context(name_, [&] { return !work_ || work_->wait(); });
    TORCH_CHECK(
        done, name_,
        ": it was aborted: look at what the other ranks say, and begin again from a checkpoint");
    if (after_) after_();
    work_.reset();
    after_ = nullptr;
  }

 private:
  WorkPtr work_;
  std::string name_;
  std::function<void()> after_;  ///< null: nothing
  bool is_over_ = false;
};

/// Collectives under way, in the order of their calls.
class PendingRequests {
 public:
  void add(Request request) { requests_.push_back(std::move(request)); }
  /// Waits for the request that was added as number `index`.
  void wait_for(std::size_t index) { requests_[index].wait(); }
  void wait() {
    for (Request& request : requests_) request.wait();
    requests_.clear();
  }

 private:
  std::vector<Request> requests_;
};

/// Calls `start`, which begins one collective and returns its work.
template <class Start>
Request request(const CollectiveCall& call, const c10d::Backend& group, const Start& start,
                std::function<void()> after = nullptr) {
  std::string name = call.name_on(group.getRank(), group.getSize());
  WorkPtr work = with_context(name, start);
  return {std::move(work), std::move(name), std::move(after)};
}

/// Returns whether the backend averages without losing digits. MpiBackend divides the sum. NCCL
/// multiplies by 1 / ranks as it reads, in the tensor's own dtype, where a third rounded to
/// bfloat16 makes all elements wrong by a thousandth. Other backends have no averages.
inline bool averages(const c10d::Backend& group, const at::Tensor& tensor) {
  const std::string name = name_of(group);
  const int size = group.getSize();
  const bool is_power_of_two = (size & (size - 1)) == 0;
  return name == "mpi" || (name == "nccl" && (is_power_of_two || !is_low_precision(tensor)));
}

/// Each rank's `tensor`, which is contiguous, becomes the sum, the average or the maximum of all.
inline Request all_reduce(const GroupPtr& group, const at::Tensor& tensor,
                          c10d::ReduceOp::RedOpType op) {
  const CollectiveCall call(c10d::OpType::ALLREDUCE, tensor, op);
  const c10::NoGradGuard no_grad;
  const at::Tensor written = tensor.detach();
  if (op == c10d::ReduceOp::AVG && !averages(*group, tensor)) {
    divide_by(written, group->getSize());
    op = c10d::ReduceOp::SUM;
  }
  note_write(tensor);
  return request(call, *group, [&] {
    std::vector<at::Tensor> tensors = {written};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return group->allreduce(tensors, options);
  });
}

/// Each rank's `tensor`, contiguous or not, becomes the root's.
inline Request broadcast(const GroupPtr& group, const at::Tensor& tensor, int root) {
  const c10::NoGradGuard no_grad;
  const at::Tensor flat = tensor.detach().contiguous();
  std::function<void()> after;
  if (root != group->getRank()) {
    note_write(tensor);
    if (!flat.is_alias_of(tensor)) {
      after = [flat, written = tensor.detach()] {
        const c10::NoGradGuard no_grad_then;
        written.copy_(flat);
      };
    }
  }
  return request(
      CollectiveCall(c10d::OpType::BROADCAST, tensor, c10d::ReduceOp::SUM, root), *group,
      [&] {
        std::vector<at::Tensor> tensors = {flat};
        c10d::BroadcastOptions options;
        options.rootRank = root;
        return group->broadcast(tensors, options);
      },
      std::move(after));
}

/// `output`, `size` times as long, becomes the inputs in the order of the ranks. Both are
/// contiguous; `input` may be the rank's own part of `output`.
inline Request all_gather(const GroupPtr& group, const at::Tensor& output,
                          const at::Tensor& input) {
  at::Tensor to = output.detach().view({-1}), from = input.detach().view({-1});
  note_write(output);
  return request(CollectiveCall(c10d::OpType::_ALLGATHER_BASE, input), *group,
                 [&] { return group->_allgather_base(to, from); });
}

/// `output` becomes the sum of the ranks' part number `rank` of `input`, `size` times as long. Both
/// are contiguous; `output` may be that part.
inline Request reduce_scatter(const GroupPtr& group, const at::Tensor& output,
                              const at::Tensor& input) {
  at::Tensor to = output.detach().view({-1}), from = input.detach().view({-1});
  note_write(output);
  return request(CollectiveCall(c10d::OpType::_REDUCE_SCATTER_BASE, input), *group,
                 [&] { return group->_reduce_scatter_base(to, from); });
}

/// Part number r of `output` becomes rank r's part for this rank. Parts are equal.
inline Request all_to_all(const GroupPtr& group, const at::Tensor& output,
                          const at::Tensor& input) {
  at::Tensor to = output.view({-1}), from = input.view({-1});
  std::vector<int64_t> equal;  // no sizes: parts are equal
  return request(CollectiveCall(c10d::OpType::ALLTOALL_BASE, input), *group,
                 [&] { return group->alltoall_base(to, from, equal, equal); });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
