#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/mpi_thread.h>
#include <mezzo/distributed/mpi_backend.h>
#include <mezzo/distributed/watchdog_options.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// `numel` elements as equal as can be among the ranks, in the form of MPI's v-collectives.
struct MpiShares {
  MpiShares(int64_t numel, int ranks) {
    int begin = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      counts.push_back(static_cast<int>(numel / ranks + (rank < numel % ranks ? 1 : 0)));
      offsets.push_back(begin);
      begin += counts.back();
    }
  }
  std::vector<int> counts;
  std::vector<int> offsets;
};

/// Checks the arguments of one call; errors name the collective and the rank.
class MpiArguments {
 public:
  MpiArguments(const char* collective, const c10d::Backend& group)
      : collective_(collective), rank_(group.getRank()), size_(group.getSize()) {}

  const at::Tensor& one(const std::vector<at::Tensor>& tensors) const {
    TORCH_CHECK(tensors.size() == 1, collective_, " on rank ", rank_,
                ": takes one tensor, but was given ", tensors.size());
    return tensors[0];
  }

  void check(const char* argument, const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.defined(), collective_, " on rank ", rank_, ": `", argument,
                "` is undefined; give it a value before the call, on every rank");
    TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
                    tensor.is_contiguous(),
                collective_, " on rank ", rank_, ": `", argument,
                "` must be a dense and contiguous tensor, but is ", tensor_words(tensor),
                " with strides ",
                tensor.layout() == at::kStrided ? tensor.strides() : at::IntArrayRef(),
                "; give tensor.to_dense(), contiguous(), resolve_conj() or resolve_neg()");
    TORCH_CHECK(tensor.is_cpu(), collective_, " on rank ", rank_, ": `", argument, "` is on ",
                tensor.device(), ", and MPI takes tensors on the CPU; move it there");
  }

  /// `whole` is `part` times the number of ranks.
  void check_parts(const char* whole_name, const at::Tensor& whole, const char* part_name,
                   const at::Tensor& part) const {
    check(whole_name, whole);
    check(part_name, part);
    TORCH_CHECK(whole.scalar_type() == part.scalar_type(), collective_, " on rank ", rank_, ": `",
                whole_name, "` is ", whole.scalar_type(), " and `", part_name, "` ",
                part.scalar_type(), "; they must be of one dtype");
    TORCH_CHECK(whole.numel() == part.numel() * size_, collective_, " on rank ", rank_, ": `",
                whole_name, "` must have ", size_, " times the ", part.numel(), " elements of `",
                part_name, "`, one part a rank, but has ", whole.numel(),
                "; size it by group->getSize()");
  }

  void check_root(int64_t root) const {
    TORCH_CHECK(root >= 0 && root < size_, collective_, " on rank ", rank_,
                ": `rootRank` must be 0 to ", size_ - 1, ", but is ", root);
  }

  /// Numbers have sums, floating ones averages, and what has an order a maximum.
  void check_reduction(at::ScalarType dtype, c10d::ReduceOp::RedOpType op) const {
    using c10d::ReduceOp;
    const bool is_extremum = op == ReduceOp::MAX || op == ReduceOp::MIN;
    TORCH_CHECK(is_extremum || op == ReduceOp::SUM || op == ReduceOp::AVG, collective_, " on rank ",
                rank_, ": MPI's reductions here are SUM, AVG, MIN and MAX");
    TORCH_CHECK(dtype != at::kBool || is_extremum, collective_, " on rank ", rank_,
                ": bools have no sum; take MAX for \"or\", or count in int64");
    const bool number = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                        dtype == at::kBFloat16 || dtype == at::kByte || dtype == at::kChar ||
                        dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
    TORCH_CHECK(number || dtype == at::kBool, collective_, " on rank ", rank_, ": ", dtype,
                " cannot be reduced; cast it to float or an integer dtype");
    TORCH_CHECK(op != ReduceOp::AVG || at::isFloatingType(dtype), collective_, " on rank ", rank_,
                ": ", dtype, " has no average; cast it to float, or take SUM and divide");
  }

 private:
  const char* collective_;
  int rank_;
  int size_;
};

/// Each rank reduces its share of `run` in float, rounds it once and gives it to all.
inline void all_reduce_in_float(const at::Tensor& run, c10d::ReduceOp::RedOpType op,
                                const MpiThread& mpi, const std::string& name) {
  const int ranks = mpi.size();
  const auto self = static_cast<std::size_t>(mpi.rank());
  const MpiShares whole(run.numel(), ranks);
  const int own = whole.counts[self];
  const MpiShares rows(int64_t{own} * ranks, ranks);
  const at::Tensor received = at::empty({ranks, own}, run.options());
  check_mpi(MPI_Alltoallv(run.const_data_ptr(), whole.counts.data(), whole.offsets.data(),
                          MPI_UINT16_T, received.mutable_data_ptr(), rows.counts.data(),
                          rows.offsets.data(), MPI_UINT16_T, mpi.communicator()),
            "MPI_Alltoallv", name);
  run.narrow(0, whole.offsets[self], own).copy_(reduce_rows(received, op));
  check_mpi(
      MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, run.mutable_data_ptr(),
                     whole.counts.data(), whole.offsets.data(), MPI_UINT16_T, mpi.communicator()),
      "MPI_Allgatherv", name);
}

}  // namespace detail

inline MpiEnvironment::MpiEnvironment() : exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK(!detail::mpi_is_finalized(),
              "MpiEnvironment: MPI has been finalised in this process and cannot be initialised "
              "again; keep one MpiEnvironment for as long as main runs");
  if (detail::mpi_is_initialized()) return;
  int provided = MPI_THREAD_SINGLE;
  detail::check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided),
                    "MPI_Init_thread", "MpiEnvironment");
  initialised_it_ = true;
  detail::MpiThreads::all().set_is_awaited(true);
  if (provided < MPI_THREAD_MULTIPLE) {
    MPI_Finalize();
    TORCH_CHECK(false,
                "MpiEnvironment: this MPI library has no MPI_THREAD_MULTIPLE; use a library "
                "that is built with threads");
  }
}

inline MpiEnvironment::~MpiEnvironment() {
  if (!initialised_it_ || std::uncaught_exceptions() > exceptions_) return;
  if (detail::mpi_is_finalized()) return;
  const std::string trouble = detail::MpiThreads::all().wait_for_end(std::chrono::seconds(30));
  if (!trouble.empty()) {
    std::cerr << "mezzo: MpiEnvironment ends, but " + trouble + ". MPI_Abort ends all ranks\n"
              << std::flush;
    std::this_thread::sleep_for(std::chrono::seconds(2));  // in which they say where they are
    MPI_Abort(MPI_COMM_WORLD, kWatchdogExitStatus);
  }
  MPI_Finalize();
}

inline MpiBackend::MpiBackend(MPI_Comm communicator, const MpiBackendOptions& options)
    : MpiBackend(std::make_shared<detail::MpiThread>(communicator, options.check_calls), options) {}

inline MpiBackend::MpiBackend(std::shared_ptr<detail::MpiThread> thread,
                              const MpiBackendOptions& options)
    : Backend(thread->rank(), thread->size()),
      thread_(std::move(thread)),
      max_bytes_(options.max_bytes) {
  TORCH_CHECK(max_bytes_ >= 1 && max_bytes_ <= int64_t{1} << 30,
              "MpiBackend: `max_bytes` must be 1 to 2^30, but is ", max_bytes_);
  thread_->start();
}

inline MpiBackend::~MpiBackend() { thread_->close(); }

template <class Run>
MpiBackend::WorkPtr MpiBackend::launch(const detail::CollectiveCall& call,
                                       std::vector<at::Tensor> results, int64_t numel,
                                       int64_t bytes_each, Run run) {
  for (const at::Tensor& result : results) detail::note_write(result);
  const int64_t longest = std::max<int64_t>(1, max_bytes_ / bytes_each);
  return thread_->launch(call, std::move(results),
                         [numel, longest, run = std::move(run)](const std::string& name) {
                           for (int64_t begin = 0; begin < numel; begin += longest) {
                             run(begin, std::min(longest, numel - begin), name);
                           }
                         });
}

inline MpiBackend::WorkPtr MpiBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                 const c10d::AllreduceOptions& options) {
  const detail::MpiArguments arguments("all_reduce", *this);
  const at::Tensor tensor = arguments.one(tensors);
  const c10d::ReduceOp::RedOpType op = options.reduceOp;
  arguments.check("tensor", tensor);
  arguments.check_reduction(tensor.scalar_type(), op);
  return launch({c10d::OpType::ALLREDUCE, tensor, op}, tensors, tensor.numel(),
                tensor.element_size(),
                [mpi = thread_.get(), flat = tensor.detach().view({-1}), op](
                    int64_t begin, int64_t length, const std::string& name) {
                  const at::Tensor run = flat.narrow(0, begin, length);
                  if (detail::is_low_precision(run)) {
                    return detail::all_reduce_in_float(run, op, *mpi, name);
                  }
                  const at::ScalarType dtype = run.scalar_type();
                  detail::check_mpi(MPI_Allreduce(MPI_IN_PLACE, run.mutable_data_ptr(),
                                                  static_cast<int>(length), detail::mpi_type(dtype),
                                                  detail::mpi_op(dtype, op), mpi->communicator()),
                                    "MPI_Allreduce", name);
                  // After the sum: divided before it, the smallest floats would lose their last
                  // bits.
                  if (op == c10d::ReduceOp::AVG) detail::divide_by(run, mpi->size());
                });
}

inline MpiBackend::WorkPtr MpiBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                 const c10d::BroadcastOptions& options) {
  const detail::MpiArguments arguments("broadcast", *this);
  const at::Tensor tensor = arguments.one(tensors);
  const int root = static_cast<int>(options.rootRank);
  arguments.check("tensor", tensor);
  arguments.check_root(options.rootRank);
  const bool writes = root != rank_;
  auto work =
      launch({c10d::OpType::BROADCAST, tensor, c10d::ReduceOp::SUM, root},
             writes ? tensors : std::vector<at::Tensor>(), tensor.numel(), tensor.element_size(),
             [mpi = thread_.get(), flat = tensor.detach().view({-1}), root](
                 int64_t begin, int64_t length, const std::string& name) {
               const at::Tensor run = flat.narrow(0, begin, length);
               detail::check_mpi(MPI_Bcast(run.mutable_data_ptr(), static_cast<int>(run.nbytes()),
                                           MPI_BYTE, root, mpi->communicator()),
                                 "MPI_Bcast", name);
             });
  return work;
}

inline MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::AllgatherOptions& /*options*/) {
  detail::MpiArguments("all_gather", *this).check_parts("output", output, "input", input);
  const at::Tensor rows = output.detach().view({size_, input.numel()});
  const at::Tensor row = input.detach().view({-1});
  const bool in_place = row.numel() > 0 && row.const_data_ptr() == rows[rank_].const_data_ptr();
  const at::Tensor given = in_place || !row.is_alias_of(rows) ? row : row.clone();
  return launch(
      {c10d::OpType::_ALLGATHER_BASE, input}, {output}, input.numel(), input.element_size() * size_,
      [mpi = thread_.get(), rows, given](int64_t begin, int64_t length, const std::string& name) {
        const at::Tensor part = rows.narrow(1, begin, length);
        const at::Tensor to =
            part.is_contiguous() ? part : at::empty_like(part, at::MemoryFormat::Contiguous);
        const at::Tensor from = given.narrow(0, begin, length);
        const int bytes = static_cast<int>(from.nbytes());
        const bool is_own = from.const_data_ptr() == to[mpi->rank()].const_data_ptr();
        detail::check_mpi(
            MPI_Allgather(is_own ? MPI_IN_PLACE : from.const_data_ptr(), bytes, MPI_BYTE,
                          to.mutable_data_ptr(), bytes, MPI_BYTE, mpi->communicator()),
            "MPI_Allgather", name);
        if (!part.is_contiguous()) part.copy_(to);
      });
}

inline MpiBackend::WorkPtr MpiBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::AllgatherOptions& /*options*/) {
  const detail::MpiArguments arguments("all_gather", *this);
  const at::Tensor input = arguments.one(inputs);
  TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == static_cast<std::size_t>(size_),
              "all_gather on rank ", rank_, ": `outputs` must be one list of ", size_,
              " tensors, one a rank");
  arguments.check("input", input);
  for (const at::Tensor& output : outputs[0]) {
    arguments.check("output", output);
    TORCH_CHECK(output.numel() == input.numel() && output.scalar_type() == input.scalar_type(),
                "all_gather on rank ", rank_, ": each of `outputs` must be like `input`, ",
                detail::tensor_words(input), ", but one is ", detail::tensor_words(output));
  }
  const at::Tensor row = input.detach().contiguous().view({-1});
  return launch({c10d::OpType::ALLGATHER, input}, outputs[0], input.numel(),
                input.element_size() * size_,
                [mpi = thread_.get(), row, to = outputs[0]](int64_t begin, int64_t length,
                                                            const std::string& name) {
                  const at::Tensor all = at::empty({mpi->size(), length}, row.options());
                  const at::Tensor from = row.narrow(0, begin, length);
                  const int bytes = static_cast<int>(from.nbytes());
                  detail::check_mpi(
                      MPI_Allgather(from.const_data_ptr(), bytes, MPI_BYTE, all.mutable_data_ptr(),
                                    bytes, MPI_BYTE, mpi->communicator()),
                      "MPI_Allgather", name);
                  for (int rank = 0; rank < mpi->size(); ++rank) {
                    to[static_cast<std::size_t>(rank)]
                        .detach()
                        .view({-1})
                        .narrow(0, begin, length)
                        .copy_(all[rank]);
                  }
                });
}

inline MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const detail::MpiArguments arguments("reduce_scatter", *this);
  const c10d::ReduceOp::RedOpType op = options.reduceOp;
  arguments.check_parts("input", input, "output", output);
  arguments.check_reduction(input.scalar_type(), op);
  return launch(
      {c10d::OpType::_REDUCE_SCATTER_BASE, input, op}, {output}, output.numel(),
      input.element_size() * size_,
      [mpi = thread_.get(), to = output.detach().view({-1}),
       rows = input.detach().view({size_, output.numel()}),
       op](int64_t begin, int64_t length, const std::string& name) {
        const at::ScalarType dtype = rows.scalar_type();
        const at::Tensor from = rows.narrow(1, begin, length).contiguous();
        const int count = static_cast<int>(length);
        if (detail::is_low_precision(from)) {
          const at::Tensor received = at::empty_like(from);
          detail::check_mpi(
              MPI_Alltoall(from.const_data_ptr(), count, MPI_UINT16_T, received.mutable_data_ptr(),
                           count, MPI_UINT16_T, mpi->communicator()),
              "MPI_Alltoall", name);
          to.narrow(0, begin, length).copy_(detail::reduce_rows(received, op));
          return;
        }
        // Not into a part of the input itself, which MPI forbids.
        const at::Tensor sum = at::empty({length}, from.options());
        detail::check_mpi(MPI_Reduce_scatter_block(from.const_data_ptr(), sum.mutable_data_ptr(),
                                                   count, detail::mpi_type(dtype),
                                                   detail::mpi_op(dtype, op), mpi->communicator()),
                          "MPI_Reduce_scatter_block", name);
        if (op == c10d::ReduceOp::AVG) detail::divide_by(sum, mpi->size());
        to.narrow(0, begin, length).copy_(sum);
      });
}

inline MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                     std::vector<int64_t>& output_sizes,
                                                     std::vector<int64_t>& input_sizes,
                                                     const c10d::AllToAllOptions& /*options*/) {
  const detail::MpiArguments arguments("all_to_all", *this);
  TORCH_CHECK(output_sizes.empty() && input_sizes.empty(), "all_to_all on rank ", rank_,
              ": MPI's parts here are equal; leave the lists of sizes empty");
  arguments.check("output", output);
  arguments.check("input", input);
  TORCH_CHECK(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() &&
                  input.numel() % size_ == 0 && !output.is_alias_of(input),
              "all_to_all on rank ", rank_, ": `output` and `input` must be two tensors of one ",
              "dtype and a multiple of ", size_, " elements, but are ",
              detail::tensor_words(output), " and ", detail::tensor_words(input));
  const int64_t part = input.numel() / size_;
  return launch({c10d::OpType::ALLTOALL_BASE, input}, {output}, part, input.element_size() * size_,
                [mpi = thread_.get(), rows = output.detach().view({size_, part}),
                 given = input.detach().view({size_, part})](int64_t begin, int64_t length,
                                                             const std::string& name) {
                  const at::Tensor from = given.narrow(1, begin, length).contiguous();
                  const at::Tensor to = rows.narrow(1, begin, length);
                  const bool is_whole = to.is_contiguous();
                  const at::Tensor received = is_whole ? to : at::empty(to.sizes(), to.options());
                  const int bytes = static_cast<int>(length * from.element_size());
                  detail::check_mpi(MPI_Alltoall(from.const_data_ptr(), bytes, MPI_BYTE,
                                                 received.mutable_data_ptr(), bytes, MPI_BYTE,
                                                 mpi->communicator()),
                                    "MPI_Alltoall", name);
                  if (!is_whole) to.copy_(received);
                });
}

inline MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& /*options*/) {
  return launch(c10d::OpType::BARRIER, {}, /*numel=*/1, /*bytes_each=*/1,
                [mpi = thread_.get()](int64_t, int64_t, const std::string& name) {
                  detail::check_mpi(MPI_Barrier(mpi->communicator()), "MPI_Barrier", name);
                });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
