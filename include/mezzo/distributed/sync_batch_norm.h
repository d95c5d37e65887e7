/// \file
/// Batch normalisation over the batches of all ranks.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <ostream>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// `torch::nn::BatchNorm1d`, 2d and 3d whose mean and variance in training are those of the batches
/// of all ranks together, as `torch.nn.SyncBatchNorm`: each rank's part of the batch is too small
/// for a variance of its own.
///
/// \code
///   struct NetImpl : torch::nn::Module {
///     explicit NetImpl(const mezzo::Communicator& statistics)
///         : norm(torch::nn::BatchNormOptions(64), statistics) { register_module("norm", norm); }
///     mezzo::SyncBatchNorm norm;
///   };
/// \endcode
///
/// It has BatchNorm's options, parameters and buffers, by their names: either one's state dict is
/// the other's. The input is [N, C] or [N, C, ...], of a floating dtype, with C `num_features`; N
/// and what follows C may differ from rank to rank, and N may be 0 where it is not on all. The
/// output has the input's dtype.
///
/// Statistics, and what is computed from them, are in float (double for double), whatever the
/// dtypes of input and weights, under autocast too: half loses a mean of many values. One
/// all-gather of 2 C + 1 numbers in forward, one all-reduce of 2 C in backward; ranks' means and
/// variances are joined as Chan, Golub and LeVeque do (1979), in the order of the ranks, so that
/// all ranks get the same bits. Gradients of weight and bias are those of this rank's part, for
/// DataParallel to average with the others'. In evaluation, with running statistics, it is
/// BatchNorm and calls nobody.
///
/// All ranks run forward, and backward, of the same SyncBatchNorms in the same order. Give them a
/// communicator that nothing else uses (`mezzo::MpiCommunicator statistics(MPI_COMM_WORLD)` beside
/// the one for DataParallel): backward calls it between the buckets of gradients, which ranks may
/// fill in different orders. Host syncs: none of its own on a GPU; with `momentum(std::nullopt)`
/// one in forward, as in torch.
///
/// \throws c10::Error for an input of another shape or of a device that the communicator does not
/// serve; in training, if one rank alone has a single value for a channel; in backward, if its own
/// gradient is wanted (`create_graph`)
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm_options, Communicator communicator);

  at::Tensor forward(const at::Tensor& input);

  // Declared inline, or every unit would hold the class's vtable.
  inline void pretty_print(std::ostream& stream) const override;

 protected:
  inline void _check_input_dim(const at::Tensor& input) override;

 private:
  at::Tensor normalise(const at::Tensor& input);
  double momentum_of_this_batch();

  Communicator communicator_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/sync_batch_norm_impl.h>  // IWYU pragma: export
