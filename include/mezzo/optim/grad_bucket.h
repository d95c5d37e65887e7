/// \file
/// What GradBuckets are made with and made of.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

enum class GradStorage : uint8_t {
  /// Each gradient is the tensor that autograd made. The cheapest in backward.
  in_place,
  /// Each gradient is a part of its bucket's buffer: addresses are stable, and a bucket can be
  /// reduced as one tensor. A first backward pass copies gradients there (8 bytes a float parameter
  /// more), further ones add there as they would anywhere.
  flat
};

/// 25 MiB, as libtorch's own DistributedDataParallel has it.
inline constexpr int64_t kDefaultBucketBytes = int64_t{25} << 20;

struct GradBucketsOptions {
  TORCH_ARG(GradStorage, storage) = GradStorage::in_place;
  /// A bucket holds no more, but one parameter that is larger; > 0.
  TORCH_ARG(int64_t, bucket_bytes) = kDefaultBucketBytes;
  /// Read each gradient for `summarize` as soon as autograd has it, instead of all afterwards. On a
  /// CPU, off is the better default: in place it costs what it saves; with flat storage it rides
  /// along the copy and is nearly free (benchmarks/optim/grad_buckets), but see `summarize` for
  /// what goes unnoticed. Without the target mezzo::cuda, gradients on CUDA are read afterwards all
  /// the same.
  TORCH_ARG(bool, check_during_backward) = false;
  /// Flat storage: a bucket's buffer can be cut into so many equal parts, each of a multiple of 64
  /// bytes: what a reduce-scatter among so many ranks takes; > 0.
  TORCH_ARG(int64_t, parts) = 1;
};

/// Parameters of one device and dtype whose gradients lie together.
struct GradBucket {
  at::Device device;
  at::ScalarType dtype;
  /// Numbers of its parameters in GradBuckets::parameters, in the order in which they lie.
  std::vector<std::size_t> parameters;
  /// Flat storage: the buffer, one dimension; each gradient begins at a multiple of 64 bytes, and
  /// what lies between is zero. Undefined in place.
  at::Tensor flat;
};

/// A dense gradient that there is: `gradient.numel()` elements from `gradient.const_data_ptr()` on,
/// element by element those of the parameter's memory (of a parameter with gaps: of its contiguous
/// form).
struct BucketGradient {
  std::size_t parameter;  ///< its number in GradBuckets::parameters
  std::size_t bucket;     ///< its number in GradBuckets::buckets
  at::Tensor gradient;
};

class GradBuckets;
struct GradientSummary;

namespace detail {

class BucketedGradients;

/// For who stands on the buckets, as an optimizer or a reduction does: it may outlive them.
std::shared_ptr<BucketedGradients> shared(const GradBuckets& buckets) noexcept;

/// What an optimizer asks of the buckets that it stands on. Apart from them, so that a unit with an
/// optimizer compiles no buckets.
class OptimizerBuckets {
 public:
  OptimizerBuckets() = default;
  OptimizerBuckets(const OptimizerBuckets&) = delete;
  OptimizerBuckets& operator=(const OptimizerBuckets&) = delete;
  virtual ~OptimizerBuckets() = default;

  virtual const std::vector<at::Tensor>& parameters() const noexcept = 0;
  virtual void add_parameters(const std::vector<at::Tensor>& parameters) = 0;
  virtual void reattach_gradients() = 0;
  virtual GradientSummary summarize(const at::Tensor& inv_scale) = 0;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
