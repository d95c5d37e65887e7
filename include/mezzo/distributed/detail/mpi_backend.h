#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/collective_tensors.h>
#include <mezzo/distributed/detail/mpi_queue.h>
#include <mezzo/distributed/mpi_communicator.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
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

/// Puts each collective together from what MPI is to be given, and queues it.
class MpiBackend final : public CommunicatorBackend,
                         public std::enable_shared_from_this<MpiBackend> {
 public:
  MpiBackend(MPI_Comm communicator, const MpiCommunicatorOptions& options)
      : queue_(communicator, options.check_calls), max_bytes_(options.max_bytes) {
    TORCH_CHECK(max_bytes_ >= 1 && max_bytes_ <= int64_t{1} << 30,
                "MpiCommunicator: `max_bytes` must be 1 to 2^30, but is ", max_bytes_);
  }

  int rank() const override { return queue_.rank(); }
  int size() const override { return queue_.size(); }
  bool serves(c10::DeviceType device) const override { return device == c10::kCPU; }

  inline Work all_reduce(const at::Tensor& tensor, Reduction reduction) override;
  inline Work broadcast(const at::Tensor& tensor, int root) override;
  inline Work all_gather(const at::Tensor& output, const at::Tensor& input) override;
  inline Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                             Reduction reduction) override;
  inline Work barrier() override;

 private:
  class Pending;

  /// Begin and length of each run of elements of which MPI is given `copies` at a time.
  template <class F>
  void for_each_run(int64_t numel, int64_t bytes_each, int copies, F f) const {
    const int64_t longest = std::max<int64_t>(1, max_bytes_ / (bytes_each * copies));
    for (int64_t begin = 0; begin < numel; begin += longest) {
      f(begin, std::min(longest, numel - begin));
    }
  }

  MpiPart reduced_by_mpi(const at::Tensor& run, Reduction reduction, const std::string& context);
  MpiPart reduced_in_float(const at::Tensor& run, Reduction reduction, const std::string& context);
  MpiPart gathered(const at::Tensor& output, const at::Tensor& input, const std::string& context);
  MpiPart scattered_by_mpi(const at::Tensor& output, const at::Tensor& input, Reduction reduction,
                           const std::string& context);
  MpiPart scattered_in_float(const at::Tensor& output, const at::Tensor& input, Reduction reduction,
                             const std::string& context);
  Work launch(const std::shared_ptr<MpiOperation>& operation);

  MpiQueue queue_;
  int64_t max_bytes_;
};

class MpiBackend::Pending final : public Work::Pending {
 public:
  Pending(std::shared_ptr<MpiBackend> backend, std::shared_ptr<MpiOperation> operation)
      : backend_(std::move(backend)), operation_(std::move(operation)) {}

  bool ready() override { return backend_->queue_.ready(*operation_); }
  void wait() override { backend_->queue_.wait(*operation_); }
  std::string name() const override { return backend_->queue_.context(operation_->call); }

 private:
  std::shared_ptr<MpiBackend> backend_;
  std::shared_ptr<MpiOperation> operation_;
};

inline Work MpiBackend::launch(const std::shared_ptr<MpiOperation>& operation) {
  queue_.launch(operation);
  return Work(std::make_unique<Pending>(shared_from_this(), operation));
}

inline Work MpiBackend::all_reduce(const at::Tensor& tensor, Reduction reduction) {
  const c10::NoGradGuard no_grad;
  const auto operation =
      std::make_shared<MpiOperation>(CollectiveCall(Collective::all_reduce, tensor, reduction));
  const std::string context = queue_.context(operation->call);
  const WrittenTensor written(tensor, WrittenTensor::Contents::read);
  const bool in_float = is_low_precision(tensor);
  for_each_run(tensor.numel(), tensor.element_size(), 1, [&](int64_t begin, int64_t length) {
    const at::Tensor run = written.flat().narrow(0, begin, length);
    operation->parts.push_back(in_float ? reduced_in_float(run, reduction, context)
                                        : reduced_by_mpi(run, reduction, context));
  });
  operation->finish = [written] { written.finish(); };
  return launch(operation);
}

inline MpiPart MpiBackend::reduced_by_mpi(const at::Tensor& run, Reduction reduction,
                                          const std::string& context) {
  return {.first =
              [this, run, reduction, context](MPI_Request* request) {
                const at::ScalarType dtype = run.scalar_type();
                check_mpi(MPI_Iallreduce(MPI_IN_PLACE, run.mutable_data_ptr(),
                                         static_cast<int>(run.numel()), MpiReductions::type(dtype),
                                         queue_.reductions().op(dtype, reduction), queue_.first(),
                                         request),
                          "MPI_Iallreduce", context);
              },
          // After the sum: divided before it, the smallest floats would lose their last bits.
          .between =
              [run, reduction, ranks = size()] {
                const c10::NoGradGuard no_grad;
                if (reduction == Reduction::average && ranks > 1) run.mul_(1. / ranks);
              }};
}

/// Each rank reduces its share of the run, rounds it once and gives it to all.
inline MpiPart MpiBackend::reduced_in_float(const at::Tensor& run, Reduction reduction,
                                            const std::string& context) {
  struct Exchange {
    MpiShares whole, rows;
    at::Tensor received;
  };
  const int ranks = size();
  const auto self = static_cast<std::size_t>(rank());
  MpiShares whole(run.numel(), ranks);
  const int own = whole.counts[self];
  const auto exchange = std::make_shared<Exchange>(
      Exchange{whole, MpiShares(int64_t{own} * ranks, ranks), at::Tensor()});

  return {
      .first =
          [=, this](MPI_Request* request) {
            exchange->received = at::empty({ranks, own}, run.options());
            check_mpi(MPI_Ialltoallv(run.const_data_ptr(), exchange->whole.counts.data(),
                                     exchange->whole.offsets.data(), MPI_UINT16_T,
                                     exchange->received.mutable_data_ptr(),
                                     exchange->rows.counts.data(), exchange->rows.offsets.data(),
                                     MPI_UINT16_T, queue_.first(), request),
                      "MPI_Ialltoallv", context);
          },
      .between =
          [=] {
            const c10::NoGradGuard no_grad;
            run.narrow(0, exchange->whole.offsets[self], own)
                .copy_(reduce_rows(exchange->received, reduction));
            exchange->received.reset();
          },
      .second =
          [=, this](MPI_Request* request) {
            check_mpi(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, run.mutable_data_ptr(),
                                      exchange->whole.counts.data(), exchange->whole.offsets.data(),
                                      MPI_UINT16_T, queue_.second(), request),
                      "MPI_Iallgatherv", context);
          }};
}

inline Work MpiBackend::broadcast(const at::Tensor& tensor, int root) {
  const c10::NoGradGuard no_grad;
  const auto operation = std::make_shared<MpiOperation>(
      CollectiveCall(Collective::broadcast, tensor, Reduction::sum, root));
  const std::string context = queue_.context(operation->call);
  const bool mine = root == rank();
  const WrittenTensor written(
      tensor, mine ? WrittenTensor::Contents::read : WrittenTensor::Contents::replaced);
  for_each_run(tensor.numel(), tensor.element_size(), 1, [&](int64_t begin, int64_t length) {
    const at::Tensor run = written.flat().narrow(0, begin, length);
    operation->parts.push_back({.first = [this, run, root, context](MPI_Request* request) {
      check_mpi(MPI_Ibcast(run.mutable_data_ptr(), static_cast<int>(run.nbytes()), MPI_BYTE, root,
                           queue_.first(), request),
                "MPI_Ibcast", context);
    }});
  });
  if (!mine) operation->finish = [written] { written.finish(); };
  return launch(operation);
}

inline Work MpiBackend::all_gather(const at::Tensor& output, const at::Tensor& input) {
  const c10::NoGradGuard no_grad;
  const auto operation =
      std::make_shared<MpiOperation>(CollectiveCall(Collective::all_gather, input));
  const std::string context = queue_.context(operation->call);
  const WrittenTensor written(output, WrittenTensor::Contents::replaced);
  const at::Tensor rows = written.flat().view({size(), input.numel()});
  const at::Tensor row = input.detach().contiguous().view({-1});
  const bool in_place = input.numel() > 0 && row.const_data_ptr() == rows[rank()].const_data_ptr();
  const at::Tensor given = in_place || !row.is_alias_of(rows) ? row : row.clone();
  for_each_run(input.numel(), input.element_size(), size(), [&](int64_t begin, int64_t length) {
    operation->parts.push_back(
        gathered(rows.narrow(1, begin, length), given.narrow(0, begin, length), context));
  });
  operation->finish = [written] { written.finish(); };
  return launch(operation);
}

/// `output` has a row a rank, of which `input` may be this rank's own.
inline MpiPart MpiBackend::gathered(const at::Tensor& output, const at::Tensor& input,
                                    const std::string& context) {
  const bool whole = output.is_contiguous();
  const at::Tensor rows = whole ? output : at::empty(output.sizes(), output.options());
  return {.first =
              [this, rows, input, context](MPI_Request* request) {
                const int bytes = static_cast<int>(input.nbytes());
                const bool in_place = input.const_data_ptr() == rows[rank()].const_data_ptr();
                check_mpi(MPI_Iallgather(in_place ? MPI_IN_PLACE : input.const_data_ptr(), bytes,
                                         MPI_BYTE, rows.mutable_data_ptr(), bytes, MPI_BYTE,
                                         queue_.first(), request),
                          "MPI_Iallgather", context);
              },
          .between =
              [whole, rows, output] {
                const c10::NoGradGuard no_grad;
                if (!whole) output.copy_(rows);
              }};
}

inline Work MpiBackend::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                       Reduction reduction) {
  const c10::NoGradGuard no_grad;
  const auto operation =
      std::make_shared<MpiOperation>(CollectiveCall(Collective::reduce_scatter, input, reduction));
  const std::string context = queue_.context(operation->call);
  const WrittenTensor written(output, WrittenTensor::Contents::replaced,
                              !output.is_alias_of(input));
  const at::Tensor rows = input.detach().contiguous().view({size(), output.numel()});
  const bool in_float = is_low_precision(input);
  for_each_run(output.numel(), input.element_size(), size(), [&](int64_t begin, int64_t length) {
    const at::Tensor to = written.flat().narrow(0, begin, length);
    const at::Tensor from = rows.narrow(1, begin, length).contiguous();
    operation->parts.push_back(in_float ? scattered_in_float(to, from, reduction, context)
                                        : scattered_by_mpi(to, from, reduction, context));
  });
  operation->finish = [written] { written.finish(); };
  return launch(operation);
}

inline MpiPart MpiBackend::scattered_by_mpi(const at::Tensor& output, const at::Tensor& input,
                                            Reduction reduction, const std::string& context) {
  return {.first =
              [this, output, input, reduction, context](MPI_Request* request) {
                const at::ScalarType dtype = output.scalar_type();
                check_mpi(MPI_Ireduce_scatter_block(
                              input.const_data_ptr(), output.mutable_data_ptr(),
                              static_cast<int>(output.numel()), MpiReductions::type(dtype),
                              queue_.reductions().op(dtype, reduction), queue_.first(), request),
                          "MPI_Ireduce_scatter_block", context);
              },
          .between =
              [output, reduction, ranks = size()] {
                const c10::NoGradGuard no_grad;
                if (reduction == Reduction::average) output.mul_(1. / ranks);
              }};
}

inline MpiPart MpiBackend::scattered_in_float(const at::Tensor& output, const at::Tensor& input,
                                              Reduction reduction, const std::string& context) {
  const at::Tensor received = at::empty(input.sizes(), input.options());
  return {.first =
              [this, input, received, context](MPI_Request* request) {
                const int count = static_cast<int>(input.size(1));
                check_mpi(MPI_Ialltoall(input.const_data_ptr(), count, MPI_UINT16_T,
                                        received.mutable_data_ptr(), count, MPI_UINT16_T,
                                        queue_.first(), request),
                          "MPI_Ialltoall", context);
              },
          .between =
              [output, received, reduction] {
                const c10::NoGradGuard no_grad;
                output.copy_(reduce_rows(received, reduction));
              }};
}

inline Work MpiBackend::barrier() {
  const auto operation = std::make_shared<MpiOperation>(CollectiveCall(Collective::barrier));
  operation->parts.push_back(
      {.first = [this, context = queue_.context(operation->call)](MPI_Request* request) {
        check_mpi(MPI_Ibarrier(queue_.first(), request), "MPI_Ibarrier", context);
      }});
  return launch(operation);
}

}  // namespace detail

inline MpiEnvironment::MpiEnvironment(int thread_level) : exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK(!detail::mpi_is_finalized(),
              "MpiEnvironment: MPI has been finalised in this process and cannot be initialised "
              "again; keep one MpiEnvironment for as long as main runs");
  if (detail::mpi_is_initialized()) return;
  int provided = MPI_THREAD_SINGLE;
  detail::check_mpi(MPI_Init_thread(nullptr, nullptr, thread_level, &provided), "MPI_Init_thread",
                    "MpiEnvironment");
  initialised_it_ = true;
  if (provided < thread_level) {
    MPI_Finalize();
    TORCH_CHECK(false, "MpiEnvironment: this MPI library allows thread level ", provided, " where ",
                thread_level, " was asked for; use a library that is built with threads");
  }
}

inline MpiEnvironment::~MpiEnvironment() {
  if (!initialised_it_ || std::uncaught_exceptions() > exceptions_) return;
  if (!detail::mpi_is_finalized()) MPI_Finalize();
}

inline MpiCommunicator::MpiCommunicator(MPI_Comm communicator,
                                        const MpiCommunicatorOptions& options)
    : Communicator(std::make_shared<detail::MpiBackend>(communicator, options)) {}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
