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
  detail::check_all_reduce(*this, tensor, reduction);
  return collectives_->all_reduce(tensor, reduction);
}

inline Work MpiCommunicator::broadcast(const at::Tensor& tensor, int root) {
  detail::check_broadcast(*this, tensor, root);
  return collectives_->broadcast(tensor, root);
}

inline Work MpiCommunicator::all_gather(const at::Tensor& output, const at::Tensor& input) {
  detail::check_all_gather(*this, output, input);
  return collectives_->all_gather(output, input);
}

inline Work MpiCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                            Reduction reduction) {
  detail::check_reduce_scatter(*this, output, input, reduction);
  return collectives_->reduce_scatter(output, input, reduction);
}

inline Work MpiCommunicator::barrier() { return collectives_->barrier(); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
