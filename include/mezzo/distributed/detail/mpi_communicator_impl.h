#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_call.h>
#include <mezzo/distributed/detail/mpi_collectives.h>
#include <mezzo/distributed/mpi_communicator.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

inline MpiCommunicator::MpiCommunicator(MPI_Comm communicator,
                                        const MpiCommunicatorOptions& options)
    : collectives_(std::make_shared<detail::MpiCollectives>(communicator, options)) {}

inline int MpiCommunicator::rank() const noexcept { return collectives_->rank(); }
inline int MpiCommunicator::size() const noexcept { return collectives_->size(); }

inline Work MpiCommunicator::all_reduce(const at::Tensor& tensor, Reduction reduction) {
  const detail::CollectiveArguments arguments("all_reduce", *this);
  arguments.check("tensor", tensor, *this);
  arguments.check_written("tensor", tensor);
  arguments.check_reduction(tensor, reduction);
  return collectives_->all_reduce(tensor, reduction);
}

inline Work MpiCommunicator::broadcast(const at::Tensor& tensor, int root) {
  const detail::CollectiveArguments arguments("broadcast", *this);
  arguments.check("tensor", tensor, *this);
  arguments.check_written("tensor", tensor);
  arguments.check_root(root);
  return collectives_->broadcast(tensor, root);
}

inline Work MpiCommunicator::all_gather(const at::Tensor& output, const at::Tensor& input) {
  const detail::CollectiveArguments arguments("all_gather", *this);
  arguments.check("output", output, *this);
  arguments.check("input", input, *this);
  arguments.check_written("output", output);
  arguments.check_parts("output", output, "input", input);
  return collectives_->all_gather(output, input);
}

inline Work MpiCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                            Reduction reduction) {
  const detail::CollectiveArguments arguments("reduce_scatter", *this);
  arguments.check("output", output, *this);
  arguments.check("input", input, *this);
  arguments.check_written("output", output);
  arguments.check_reduced_parts(input, output);
  arguments.check_reduction(input, reduction);
  return collectives_->reduce_scatter(output, input, reduction);
}

inline Work MpiCommunicator::barrier() { return collectives_->barrier(); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
