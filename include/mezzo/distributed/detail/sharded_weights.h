#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/distributed/grad_buckets.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/optim/detail/param_slot.h>
#include <mezzo/optim/detail/trained_once.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gives every rank the values of rank 0's parameters; returns those that are to be trained, of all
/// groups in their order.
inline std::vector<at::Tensor> start_groups_alike(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const Communicator& communicator) {
  std::vector<at::Tensor> trained;
  NamedTensors named;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (std::size_t i = 0; i < groups[group].params().size(); ++i) {
      const at::Tensor& parameter = groups[group].params()[i];
      TORCH_CHECK(communicator.serves(parameter.device().type()), "ShardedOptimizer: parameter ", i,
                  " of group ", group, " (", tensor_words(parameter),
                  ") is on a device that `communicator` does not serve; move the model (MPI takes "
                  "cpu, NCCL takes cuda)");
      named.emplace_back(c10::str("parameter ", i, " of group ", group), parameter);
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
  }
  refuse_duplicates(trained, {"ShardedOptimizer", groups});
  broadcast_parameters(named, communicator);
  return trained;
}

/// What is this rank's of `flat`, one of `size()` equal parts.
inline at::Tensor own_part(const at::Tensor& flat, const Communicator& communicator) {
  const int64_t length = flat.numel() / communicator.size();
  return flat.narrow(0, communicator.rank() * length, length);
}

/// Every rank gets the sum of its own part of every bucket. The other parts become zero: gradients
/// that a further pass adds to them are summed then, and what was summed is not summed again.
class ShardExchange : public BucketExchange {
 public:
  ShardExchange(BucketedGradients& gradients, Communicator communicator)
      : gradients_(gradients), communicator_(std::move(communicator)) {}

  ~ShardExchange() override {
    for (Scatter& scatter : under_way_) scatter.request.abandon();
  }

  void begin(std::size_t bucket) override {
    if (communicator_.size() == 1) return;
    const at::Tensor& flat = gradients_.buckets()[bucket].flat;
    under_way_.push_back(
        {flat, communicator_.reduce_scatter(own_part(flat, communicator_), flat, Reduction::sum)});
  }
  /// Ends what is done, so that the transport can let go of the memory that it took for it.
  void poll() override {
    while (!under_way_.empty() && under_way_.front().request.ready()) end_first();
  }
  void finish() override {
    while (!under_way_.empty()) end_first();
    has_summed_ = true;
  }

  /// Whether a backward pass has ended with sums since this was last set to false.
  bool has_summed() const noexcept { return has_summed_; }
  void set_has_summed(bool has_summed) noexcept { has_summed_ = has_summed; }

 private:
  struct Scatter {
    at::Tensor flat;
    Work request;
  };

  void end_first() {
    Scatter& first = under_way_.front();
    first.request.wait();
    const int64_t length = first.flat.numel() / communicator_.size();
    const int64_t begin = communicator_.rank() * length;
    first.flat.narrow(0, 0, begin).zero_();
    first.flat.narrow(0, begin + length, first.flat.numel() - begin - length).zero_();
    under_way_.pop_front();
  }

  BucketedGradients& gradients_;
  Communicator communicator_;
  std::deque<Scatter> under_way_;
  bool has_summed_ = false;
};

/// What lies in this rank's part of a bucket of one parameter.
struct ShardSlice {
  std::size_t parameter;  ///< its number in the buckets
  std::size_t bucket;
  int64_t begin;         ///< where the slice begins in the parameter's memory, in elements
  at::Tensor weights;    ///< one dimension, with a version counter of its own
  at::Tensor gradients;  ///< likewise
};

/// Elements `begin` to `begin + count` of a buffer, which count their own changes alone.
inline at::Tensor stretch_of(const at::Tensor& flat, int64_t begin, int64_t count) {
  at::Tensor stretch = at::empty({0}, flat.options());
  return stretch.set_(flat.storage(), begin, {count}, {1});
}

/// The parameters of flat buckets in buffers of the same layout, so that one all-gather a bucket
/// brings every rank what the ranks made of their parts.
class ShardedWeights {
 public:
  /// Moves the parameters there, values kept.
  ShardedWeights(std::shared_ptr<BucketedGradients> gradients, Communicator communicator)
      : gradients_(std::move(gradients)),
        communicator_(std::move(communicator)),
        bucket_of_(parameters().size()),
        stamps_(parameters().size()),
        slice_of_(parameters().size()) {
    const c10::InferenceMode no_inference(false);
    const c10::NoGradGuard no_grad;
    for (std::size_t bucket = 0; bucket < gradients_->buckets().size(); ++bucket) {
      const GradBucket& like = gradients_->buckets()[bucket];
      const at::ScalarType dtype = parameters()[like.parameters.front()].scalar_type();
      flats_.push_back(at::zeros({like.flat.numel()}, like.flat.options().dtype(dtype)));
      for (const std::size_t number : like.parameters) {
        bucket_of_[number] = bucket;
        add_slice(number, bucket);
        settle(number);  // bucket by bucket: what parameters leave behind is free for the next one
      }
    }
  }

  const std::vector<ShardSlice>& slices() const noexcept { return slices_; }
  const std::vector<at::Tensor>& parameters() const noexcept { return gradients_->parameters(); }

  /// Takes stock of the weights as they are now: what others have written to a parameter, or given
  /// it as memory, lies in the buffers afterwards, and slices show by their versions that somebody
  /// wrote. \throws c10::Error if a parameter is no longer of the dtype, device and shape it was of
  void settle() {
    const c10::NoGradGuard no_grad;
    for (std::size_t number = 0; number < parameters().size(); ++number) settle(number);
  }

  /// The slices of all ranks become the weights of all ranks. Waits for them.
  void gather() {
    const c10::NoGradGuard no_grad;
    if (communicator_.size() > 1) {
      PendingRequests requests;
      for (const at::Tensor& flat : flats_) {
        requests.add(communicator_.all_gather(flat, own_part(flat, communicator_)));
      }
      requests.wait();
    }
    for (std::size_t number = 0; number < parameters().size(); ++number) {
      parameters()[number].unsafeGetTensorImpl()->bump_version();
      stamps_[number] = WriteStamp::of(parameters()[number]);
    }
  }

  int64_t bytes() const {
    int64_t bytes = 0;
    for (const at::Tensor& flat : flats_) bytes += static_cast<int64_t>(flat.nbytes());
    return bytes;
  }

 private:
  /// A parameter without elements is rank 0's, so that one rank keeps its state.
  void add_slice(std::size_t number, std::size_t bucket) {
    const at::Tensor& place = gradients_->place(number);
    const at::Tensor own = own_part(flats_[bucket], communicator_);
    const int64_t first = place.storage_offset();
    const int64_t begin = std::max(first, own.storage_offset());
    const int64_t end = std::min(first + place.numel(), own.storage_offset() + own.numel());
    if (place.numel() == 0 ? communicator_.rank() != 0 : begin >= end) return;
    const int64_t count = place.numel() == 0 ? 0 : end - begin;
    slice_of_[number] = stretch_of(flats_[bucket], begin, count);
    slices_.push_back({number, bucket, begin - first, slice_of_[number],
                       stretch_of(gradients_->buckets()[bucket].flat, begin, count)});
  }

  void settle(std::size_t number) {
    const at::Tensor& parameter = parameters()[number];
    if (stamps_[number].is_current(parameter)) return;
    if (!is_in_place(number)) move_to_place(number);
    if (slice_of_[number].defined()) slice_of_[number].unsafeGetTensorImpl()->bump_version();
    stamps_[number] = WriteStamp::of(parameter);
  }

  bool is_in_place(std::size_t number) const {
    const at::Tensor& parameter = parameters()[number];
    const at::Tensor& place = gradients_->place(number);
    const at::Tensor& flat = flats_[bucket_of_[number]];
    TORCH_CHECK(
        parameter.scalar_type() == flat.scalar_type() && parameter.device() == flat.device() &&
            parameter.sizes() == place.sizes(),
        "ShardedOptimizer: ", parameter_words(number, parameter), " was ",
        tensor_words(place.to(flat.scalar_type())),
        " when the optimizer was made; cast and move the model first, then make the optimizer");
    const auto* const buffer = static_cast<const char*>(flat.const_data_ptr());
    return parameter.const_data_ptr() == buffer + place.storage_offset() * flat.element_size() &&
           same_layout(parameter, place);
  }

  /// Into memory that is a storage of its own as far as anybody can see: a file of the model would
  /// otherwise hold the whole buffer once for each parameter.
  void move_to_place(std::size_t number) {
    const at::Tensor& parameter = parameters()[number];
    const at::Tensor& place = gradients_->place(number);
    const at::Tensor& flat = flats_[bucket_of_[number]];
    auto* const memory =
        static_cast<char*>(flat.mutable_data_ptr()) + place.storage_offset() * flat.element_size();
    const auto keeps_buffer = [flat](void*) {};
    const at::Tensor own = at::from_blob(memory, place.sizes(), place.strides(), keeps_buffer,
                                         flat.options(), flat.device());
    own.copy_(parameter.detach());
    parameter.set_data(own);
  }

  std::shared_ptr<BucketedGradients> gradients_;
  Communicator communicator_;
  std::vector<at::Tensor> flats_;       // a bucket
  std::vector<std::size_t> bucket_of_;  // a parameter
  std::vector<WriteStamp> stamps_;      // likewise, of when it last agreed with the buffers
  std::vector<ShardSlice> slices_;      // of parameters that have one
  std::vector<at::Tensor> slice_of_;    // a parameter: the weights of its slice, or undefined
};

/// What a state keeps an element of for each of the parameter's: the master, and every moment that
/// the optimizer has under some options.
inline std::vector<at::Tensor*> kept_tensors(ParamSlot& state) {
  constexpr int kMostMoments = 3;
  std::vector<at::Tensor*> kept{&state.master};
  for (int k = 0; k < kMostMoments; ++k) {
    at::Tensor* const moment = &state.moment(k);
    if (std::find(kept.begin(), kept.end(), moment) == kept.end()) kept.push_back(moment);
  }
  return kept;
}

/// Of the ranks' numbers, a row a rank, in the order of the ranks: the same bits on all of them,
/// whatever a library's sum makes of another instruction set.
inline at::Tensor sum_of_rows(const at::Tensor& numbers) {
  if (!numbers.is_cpu()) return numbers.sum();
  at::Tensor sum = numbers[0].clone();
  for (int64_t rank = 1; rank < numbers.size(0); ++rank) sum.add_(numbers[rank]);
  return sum;
}

/// What the ranks have found in their parts of the gradients, as one: an inf of one of them, the
/// sum of all squares, the largest magnitude. One collective; waits for no device.
inline Verdict agreed(const Verdict& own, Communicator& communicator) {
  if (communicator.size() == 1) return own;
  const auto wide = own.sum_of_squares.scalar_type();
  const at::Tensor row = at::stack({own.found_inf.to(wide), own.sum_of_squares, own.max_abs});
  const at::Tensor rows = at::empty({communicator.size(), row.numel()}, row.options());
  communicator.all_gather(rows, row).wait();
  return {own.inv_scale, rows.select(1, 0).amax().to(own.found_inf.scalar_type()),
          sum_of_rows(rows.select(1, 1)), rows.select(1, 2).amax()};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
