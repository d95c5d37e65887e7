#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/work.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor that a collective writes, and the contiguous memory that is written for it: its own or
/// a copy.
class WrittenTensor {
 public:
  enum class Contents : uint8_t { read, replaced };

  WrittenTensor(const at::Tensor& tensor, Contents contents, bool own_memory = true)
      : tensor_(tensor.detach()), original_(tensor) {
    if (tensor_.is_contiguous() && own_memory) {
      flat_ = tensor_.view({-1});
    } else if (contents == Contents::read) {
      flat_ = tensor_.clone(at::MemoryFormat::Contiguous).view({-1});
    } else {
      flat_ = at::empty({tensor_.numel()}, tensor_.options());
    }
  }

  const at::Tensor& flat() const { return flat_; }

  void finish() const {
    if (!flat_.is_alias_of(tensor_)) {
      tensor_.copy_(flat_.view(tensor_.sizes()));
    } else if (!original_.is_inference()) {
      original_.unsafeGetTensorImpl()->bump_version();  // nothing that autograd knows of wrote it
    }
  }

 private:
  at::Tensor tensor_;
  at::Tensor original_;
  at::Tensor flat_;
};

/// Makes the ranks' sum what `reduction` wants: divided where it is an average. Divided, and not
/// multiplied by 1 / ranks, so that it is rounded once.
inline void finish_sum(const at::Tensor& sum, Reduction reduction, int64_t ranks) {
  const c10::NoGradGuard no_grad;
  if (reduction == Reduction::average && ranks > 1) sum.div_(ranks);
}

/// Received from each rank, a row a rank: added up in float in the order of the ranks, the average
/// of that, or their maximum.
inline at::Tensor reduce_rows(const at::Tensor& rows, Reduction reduction) {
  at::Tensor reduced = rows[0].to(at::kFloat);
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    const at::Tensor row = rows[rank].to(at::kFloat);
    if (reduction == Reduction::max) {
      at::maximum_out(reduced, reduced, row);
    } else {
      reduced.add_(row);
    }
  }
  finish_sum(reduced, reduction, rows.size(0));
  return reduced;
}

/// What every communicator checks at the call, in the same words.
class CollectiveArguments {
 public:
  CollectiveArguments(const char* collective, const Communicator& communicator)
      : collective_(collective),
        communicator_(communicator),
        rank_(communicator.rank()),
        size_(communicator.size()) {}

  void check(const char* argument, const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.defined(), collective_, " on rank ", rank_, ": `", argument,
                "` is undefined; give it a value before the call, on every rank");
    TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg(),
                collective_, " on rank ", rank_, ": `", argument,
                "` must be a dense tensor, but is ", tensor_words(tensor),
                tensor.is_conj() || tensor.is_neg() ? " and a conjugate or negative view" : "",
                "; give tensor.to_dense(), resolve_conj() or resolve_neg()");
    TORCH_CHECK(
        communicator_.serves(tensor.device().type()), collective_, " on rank ", rank_, ": `",
        argument, "` is on ", tensor.device(),
        ", which this communicator does not serve; move it (MPI takes cpu, NCCL takes cuda)");
  }

  void check_written(const char* argument, const at::Tensor& tensor) const {
    TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, collective_, " on rank ",
                rank_, ": elements of `", argument,
                "` share memory and cannot be written; clone() it");
  }

  /// The `whole` is the `part` of each rank.
  void check_parts(const char* whole_name, const at::Tensor& whole, const char* part_name,
                   const at::Tensor& part) const {
    TORCH_CHECK(whole.scalar_type() == part.scalar_type(), collective_, " on rank ", rank_, ": `",
                whole_name, "` is ", whole.scalar_type(), " and `", part_name, "` ",
                part.scalar_type(), "; they must be of one dtype");
    check_part_sizes(whole_name, whole, part_name, part);
  }

  void check_part_sizes(const char* whole_name, const at::Tensor& whole, const char* part_name,
                        const at::Tensor& part) const {
    TORCH_CHECK(whole.device() == part.device(), collective_, " on rank ", rank_, ": `", whole_name,
                "` is on ", whole.device(), " and `", part_name, "` on ", part.device(),
                "; move both to one device");
    TORCH_CHECK(whole.numel() == part.numel() * size_, collective_, " on rank ", rank_, ": `",
                whole_name, "` must have ", size_, " times the ", part.numel(), " elements of `",
                part_name, "`, one part a rank, but has ", whole.numel(),
                "; size it by communicator.size()");
  }

  /// The same of what is reduced. Sums of bfloat16 and half may also be wanted in float, as they
  /// are before they are rounded.
  void check_reduced_parts(const at::Tensor& input, const at::Tensor& output) const {
    if (is_low_precision(input) && output.scalar_type() == at::kFloat) {
      check_part_sizes("input", input, "output", output);
    } else {
      check_parts("input", input, "output", output);
    }
  }

  void check_root(int root) const {
    TORCH_CHECK(root >= 0 && root < size_, collective_, " on rank ", rank_,
                ": `root` must be 0 to ", size_ - 1, ", but is ", root);
  }

  /// Sums are of numbers, averages of floating ones, maxima of what has an order.
  void check_reduction(const at::Tensor& tensor, Reduction reduction) const {
    const at::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(dtype != at::kBool || reduction == Reduction::max, collective_, " on rank ", rank_,
                ": bools have no sum; take Reduction::max for \"or\", or count in int64");
    const bool number = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                        dtype == at::kBFloat16 || dtype == at::kByte || dtype == at::kChar ||
                        dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
    TORCH_CHECK(number || dtype == at::kBool, collective_, " on rank ", rank_, ": ", dtype,
                " cannot be reduced; cast it to float or an integer dtype");
    TORCH_CHECK(reduction != Reduction::average || at::isFloatingType(dtype), collective_,
                " on rank ", rank_, ": ", dtype,
                " has no average; cast it to float, or take Reduction::sum and divide");
  }

 private:
  const char* collective_;
  const Communicator& communicator_;
  int rank_;
  int size_;
};

/// Collectives under way, let go of without a warning where a pass threw.
class PendingRequests {
 public:
  PendingRequests() = default;
  ~PendingRequests() {
    for (Work& request : requests_) request.abandon();
  }
  PendingRequests(const PendingRequests&) = delete;
  PendingRequests& operator=(const PendingRequests&) = delete;

  void add(Work request) { requests_.push_back(std::move(request)); }
  void poll() {
    for (Work& request : requests_) request.ready();
  }
  /// For the one that was added as number `index`.
  void wait_for(std::size_t index) { requests_[index].wait(); }
  void wait() {
    for (Work& request : requests_) request.wait();
    requests_.clear();
  }

 private:
  std::vector<Work> requests_;
};

}  // namespace detail

inline Communicator::Communicator(std::shared_ptr<CommunicatorBackend> backend)
    : backend_(std::move(backend)) {
  TORCH_CHECK(backend_ != nullptr,
              "Communicator: `backend` is null; give a std::make_shared of a CommunicatorBackend");
}

template <class Start>
Work Communicator::launch(const detail::CollectiveCall& call, const Start& start) {
  if (log_ == nullptr) return start();
  const detail::CollectiveLog::Entry entry = log_->called(number_, call);
  try {
    // Starting one may itself wait for other ranks, as NCCL's first does.
    const detail::CollectiveLog::Waiting waiting(*log_, entry);
    return Work(std::make_unique<detail::LoggedPending>(start(), log_, entry, rank(), size()));
  } catch (...) {
    log_->refused(entry);
    throw;
  }
}

inline Work Communicator::all_reduce(const at::Tensor& tensor, Reduction reduction) {
  const detail::CollectiveArguments arguments("all_reduce", *this);
  arguments.check("tensor", tensor);
  arguments.check_written("tensor", tensor);
  arguments.check_reduction(tensor, reduction);
  return launch({detail::Collective::all_reduce, tensor, reduction},
                [&] { return backend_->all_reduce(tensor, reduction); });
}

inline Work Communicator::broadcast(const at::Tensor& tensor, int root) {
  const detail::CollectiveArguments arguments("broadcast", *this);
  arguments.check("tensor", tensor);
  arguments.check_written("tensor", tensor);
  arguments.check_root(root);
  return launch({detail::Collective::broadcast, tensor, Reduction::sum, root},
                [&] { return backend_->broadcast(tensor, root); });
}

inline Work Communicator::all_gather(const at::Tensor& output, const at::Tensor& input) {
  const detail::CollectiveArguments arguments("all_gather", *this);
  arguments.check("output", output);
  arguments.check("input", input);
  arguments.check_written("output", output);
  arguments.check_parts("output", output, "input", input);
  return launch({detail::Collective::all_gather, input},
                [&] { return backend_->all_gather(output, input); });
}

inline Work Communicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                         Reduction reduction) {
  const detail::CollectiveArguments arguments("reduce_scatter", *this);
  arguments.check("output", output);
  arguments.check("input", input);
  arguments.check_written("output", output);
  arguments.check_reduced_parts(input, output);
  arguments.check_reduction(input, reduction);
  return launch({detail::Collective::reduce_scatter, input, reduction},
                [&] { return backend_->reduce_scatter(output, input, reduction); });
}

inline Work Communicator::barrier() {
  return launch({detail::Collective::barrier}, [&] { return backend_->barrier(); });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
