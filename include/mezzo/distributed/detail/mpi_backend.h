#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/communicator_impl.h>
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
#include <memory>
#include <optional>
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

  Work all_reduce(const at::Tensor& tensor, Reduction reduction) override {
    const c10::NoGradGuard no_grad;
    const WrittenTensor written(tensor, WrittenTensor::Contents::read);
    const bool in_float = is_low_precision(tensor);
    return launch({Collective::all_reduce, tensor, reduction}, tensor.numel(),
                  tensor.element_size(), written, [&](int64_t begin, int64_t length) {
                    const at::Tensor run = written.flat().narrow(0, begin, length);
                    return in_float ? reduced_in_float(run, reduction)
                                    : reduced_by_mpi(run, reduction);
                  });
  }

  Work broadcast(const at::Tensor& tensor, int root) override {
    const c10::NoGradGuard no_grad;
    const bool mine = root == rank();
    const WrittenTensor written(
        tensor, mine ? WrittenTensor::Contents::read : WrittenTensor::Contents::replaced);
    return launch({Collective::broadcast, tensor, Reduction::sum, root}, tensor.numel(),
                  tensor.element_size(), mine ? std::nullopt : std::optional(written),
                  [&](int64_t begin, int64_t length) {
                    const at::Tensor run = written.flat().narrow(0, begin, length);
                    const auto start = [this, run, root](MPI_Request* request) {
                      return MPI_Ibcast(run.mutable_data_ptr(), static_cast<int>(run.nbytes()),
                                        MPI_BYTE, root, queue_.first(), request);
                    };
                    return MpiPart{.first = {"MPI_Ibcast", start}};
                  });
  }

  Work all_gather(const at::Tensor& output, const at::Tensor& input) override {
    const c10::NoGradGuard no_grad;
    const WrittenTensor written(output, WrittenTensor::Contents::replaced);
    const at::Tensor rows = written.flat().view({size(), input.numel()});
    const at::Tensor row = input.detach().contiguous().view({-1});
    const bool in_place =
        input.numel() > 0 && row.const_data_ptr() == rows[rank()].const_data_ptr();
    const at::Tensor given = in_place || !row.is_alias_of(rows) ? row : row.clone();
    return launch({Collective::all_gather, input}, input.numel(), input.element_size() * size(),
                  written, [&](int64_t begin, int64_t length) {
                    return gathered(rows.narrow(1, begin, length), given.narrow(0, begin, length));
                  });
  }

  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      Reduction reduction) override {
    const c10::NoGradGuard no_grad;
    const WrittenTensor written(output, WrittenTensor::Contents::replaced,
                                !output.is_alias_of(input));
    const at::Tensor rows = input.detach().contiguous().view({size(), output.numel()});
    const bool in_float = is_low_precision(input);
    return launch({Collective::reduce_scatter, input, reduction}, output.numel(),
                  input.element_size() * size(), written, [&](int64_t begin, int64_t length) {
                    const at::Tensor to = written.flat().narrow(0, begin, length);
                    const at::Tensor from = rows.narrow(1, begin, length).contiguous();
                    return in_float ? scattered_in_float(to, from, reduction)
                                    : scattered_by_mpi(to, from, reduction);
                  });
  }

  Work barrier() override {
    return launch({Collective::barrier}, /*numel=*/1, /*bytes_each=*/1, std::nullopt,
                  [this](int64_t /*begin*/, int64_t /*length*/) {
                    const auto start = [this](MPI_Request* request) {
                      return MPI_Ibarrier(queue_.first(), request);
                    };
                    return MpiPart{.first = {"MPI_Ibarrier", start}};
                  });
  }

 private:
  class Pending final : public Work::Pending {
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

  /// Queues a collective of `numel` elements, of which MPI is given as many at a time as
  /// `max_bytes` allows: `part(begin, length)` says what it does with those. `written` is what the
  /// collective writes on this rank, if it writes.
  template <class MakePart>
  Work launch(const CollectiveCall& call, int64_t numel, int64_t bytes_each,
              std::optional<WrittenTensor> written, const MakePart& part) {
    auto operation = std::make_shared<MpiOperation>(call);
    const int64_t longest = std::max<int64_t>(1, max_bytes_ / bytes_each);
    for (int64_t begin = 0; begin < numel; begin += longest) {
      operation->parts.push_back(part(begin, std::min(longest, numel - begin)));
    }
    if (written) operation->finish = [written = *std::move(written)] { written.finish(); };
    queue_.launch(operation);
    return Work(std::make_unique<Pending>(shared_from_this(), std::move(operation)));
  }

  MpiPart reduced_by_mpi(const at::Tensor& run, Reduction reduction) {
    const auto start = [this, run, reduction](MPI_Request* request) {
      const at::ScalarType dtype = run.scalar_type();
      return MPI_Iallreduce(MPI_IN_PLACE, run.mutable_data_ptr(), static_cast<int>(run.numel()),
                            MpiReductions::type(dtype), queue_.reductions().op(dtype, reduction),
                            queue_.first(), request);
    };
    // After the sum: divided before it, the smallest floats would lose their last bits.
    const auto divide = [run, reduction, ranks = size()] { finish_sum(run, reduction, ranks); };
    return {.first = {"MPI_Iallreduce", start}, .between = divide};
  }

  /// Each rank reduces its share of the run, rounds it once and gives it to all.
  MpiPart reduced_in_float(const at::Tensor& run, Reduction reduction) {
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

    const auto exchange_shares = [=, this](MPI_Request* request) {
      exchange->received = at::empty({ranks, own}, run.options());
      return MPI_Ialltoallv(run.const_data_ptr(), exchange->whole.counts.data(),
                            exchange->whole.offsets.data(), MPI_UINT16_T,
                            exchange->received.mutable_data_ptr(), exchange->rows.counts.data(),
                            exchange->rows.offsets.data(), MPI_UINT16_T, queue_.first(), request);
    };
    const auto reduce = [=] {
      const c10::NoGradGuard no_grad;
      run.narrow(0, exchange->whole.offsets[self], own)
          .copy_(reduce_rows(exchange->received, reduction));
      exchange->received.reset();
    };
    const auto gather = [=, this](MPI_Request* request) {
      return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, run.mutable_data_ptr(),
                             exchange->whole.counts.data(), exchange->whole.offsets.data(),
                             MPI_UINT16_T, queue_.second(), request);
    };
    return {.first = {"MPI_Ialltoallv", exchange_shares},
            .between = reduce,
            .second = {"MPI_Iallgatherv", gather}};
  }

  /// `output` has a row a rank, of which `input` may be this rank's own.
  MpiPart gathered(const at::Tensor& output, const at::Tensor& input) {
    const bool whole = output.is_contiguous();
    const at::Tensor rows = whole ? output : at::empty(output.sizes(), output.options());
    const auto start = [this, rows, input](MPI_Request* request) {
      const int bytes = static_cast<int>(input.nbytes());
      const bool in_place = input.const_data_ptr() == rows[rank()].const_data_ptr();
      return MPI_Iallgather(in_place ? MPI_IN_PLACE : input.const_data_ptr(), bytes, MPI_BYTE,
                            rows.mutable_data_ptr(), bytes, MPI_BYTE, queue_.first(), request);
    };
    const auto copy = [whole, rows, output] {
      const c10::NoGradGuard no_grad;
      if (!whole) output.copy_(rows);
    };
    return {.first = {"MPI_Iallgather", start}, .between = copy};
  }

  MpiPart scattered_by_mpi(const at::Tensor& output, const at::Tensor& input, Reduction reduction) {
    const auto start = [this, output, input, reduction](MPI_Request* request) {
      const at::ScalarType dtype = output.scalar_type();
      return MPI_Ireduce_scatter_block(input.const_data_ptr(), output.mutable_data_ptr(),
                                       static_cast<int>(output.numel()), MpiReductions::type(dtype),
                                       queue_.reductions().op(dtype, reduction), queue_.first(),
                                       request);
    };
    const auto divide = [output, reduction, ranks = size()] {
      finish_sum(output, reduction, ranks);
    };
    return {.first = {"MPI_Ireduce_scatter_block", start}, .between = divide};
  }

  MpiPart scattered_in_float(const at::Tensor& output, const at::Tensor& input,
                             Reduction reduction) {
    const at::Tensor received = at::empty(input.sizes(), input.options());
    const auto start = [this, input, received](MPI_Request* request) {
      const int count = static_cast<int>(input.size(1));
      return MPI_Ialltoall(input.const_data_ptr(), count, MPI_UINT16_T, received.mutable_data_ptr(),
                           count, MPI_UINT16_T, queue_.first(), request);
    };
    const auto reduce = [output, received, reduction] {
      const c10::NoGradGuard no_grad;
      output.copy_(reduce_rows(received, reduction));
    };
    return {.first = {"MPI_Ialltoall", start}, .between = reduce};
  }

  MpiQueue queue_;
  int64_t max_bytes_;
};

}  // namespace detail

inline MpiCommunicator::MpiCommunicator(MPI_Comm communicator,
                                        const MpiCommunicatorOptions& options)
    : Communicator(std::make_shared<detail::MpiBackend>(communicator, options)) {}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
