#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/compress_loops.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/work_chunks.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/all.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

// Compression of whole gradient buffers, which are contiguous tensors of equal length. On the CPU,
// each function is one pass over its inputs and outputs; on other devices it uses ATen's ops.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Runs `work(chunk)` over `count` elements on libtorch's threads; true if it returned true.
template <class Work>
bool any_chunk(int64_t count, const Work& work) {
  WorkChunks chunks(kThreadGrain);
  chunks.add(0, count);
  return chunks.any(work);
}

inline const char* read_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<const char*>(tensor.const_data_ptr()) + element * tensor.element_size();
}

inline char* write_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + element * tensor.element_size();
}

/// The factors on an element that is sent. Residuals do not carry the loss scale. `scale` has one
/// element of the gradients' dtype, on the CPU or on their device; undefined means 1.
struct CompressFactors {
  double value = 1.;
  at::Tensor scale = {};
};

/// ATen versions of the three passes, for any device: the same results, by several kernels each.
struct AtenCompress {
  static void narrow(const at::Tensor& to, const at::Tensor& from, double factor) {
    at::Tensor out = to;
    at::mul_out(out, from, at::scalar_tensor(factor, from.scalar_type()));
  }

  static void narrow_with_residual(const at::Tensor& to, const at::Tensor& from,
                                   const at::Tensor& residual, const CompressFactors& factors) {
    const at::Tensor scale =
        factors.scale.defined() ? factors.scale : at::scalar_tensor(1., from.scalar_type());
    const at::Tensor waits = from == 0;
    const at::Tensor wanted = at::where(waits, from, from * factors.value + residual * scale);
    to.copy_(wanted);
    const at::Tensor lost = (wanted - to.to(from.scalar_type())) / scale;
    residual.copy_(at::where(waits, residual, at::where(at::isfinite(lost), lost, 0.)));
  }

  static at::Tensor widen(const at::Tensor& to, const at::Tensor& from, double factor) {
    to.copy_(from);
    if (factor != 1.) to.mul_(factor);
    return at::isfinite(to).all();
  }
};

/// Computes to = from * factor, rounded. `to` is bfloat16 or half, `from` float or double. For
/// float, reads 4 bytes per element and writes 2.
inline void narrow_into(const at::Tensor& to, const at::Tensor& from, double factor) {
  if (!from.is_cpu()) return AtenCompress::narrow(to, from, factor);
  const CompressLoops loops = compress_loops(from.scalar_type(), to.scalar_type(), best_isa());
  char* const target = write_at(to, 0);
  any_chunk(from.numel(), [&](const WorkChunks::Chunk& s) {
    loops.narrow(read_at(from, s.begin), target + s.begin * to.element_size(), s.count, factor);
    return false;
  });
  bump_version(to);
}

/// Computes to = from * factor + residual, rounded. The rounding error becomes the new residual,
/// which has the dtype of `from`. If `from` is 0, 0 is sent and the residual stays; an inf or NaN
/// leaves a residual of 0. For float, reads 8 bytes per element and writes 6.
inline void narrow_into(const at::Tensor& to, const at::Tensor& from, const at::Tensor& residual,
                        const CompressFactors& factors) {
  if (!from.is_cpu()) return AtenCompress::narrow_with_residual(to, from, residual, factors);
  const CompressLoops loops = compress_loops(from.scalar_type(), to.scalar_type(), best_isa());
  const double scale = factors.scale.defined() ? factors.scale.item<double>() : 1.;
  const ResidualFactors by{factors.value, scale, 1. / scale};
  char* const target = write_at(to, 0);
  char* const left = write_at(residual, 0);
  any_chunk(from.numel(), [&](const WorkChunks::Chunk& s) {
    loops.narrow_with_residual(read_at(from, s.begin), left + s.begin * residual.element_size(),
                               target + s.begin * to.element_size(), s.count, &by);
    return false;
  });
  bump_version(to);
  bump_version(residual);
}

/// Computes to = from * factor. `to` is float or double, `from` bfloat16 or half. For float, reads
/// 2 bytes per element and writes 4. \returns a bool of one element on the same device: whether all
/// results are finite
inline at::Tensor widen_into(const at::Tensor& to, const at::Tensor& from, double factor) {
  if (!to.is_cpu()) return AtenCompress::widen(to, from, factor);
  const CompressLoops loops = compress_loops(to.scalar_type(), from.scalar_type(), best_isa());
  char* const target = write_at(to, 0);
  const bool found = any_chunk(to.numel(), [&](const WorkChunks::Chunk& s) {
    return loops.widen(read_at(from, s.begin), target + s.begin * to.element_size(), s.count,
                       factor);
  });
  bump_version(to);
  return at::scalar_tensor(!found, at::kBool);
}

/// Returns a bool of one element on the device of `tensor`: whether all elements are finite.
inline at::Tensor all_finite(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return at::isfinite(tensor).all();
  return at::scalar_tensor(!any_nonfinite_cpu({tensor}), at::kBool);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
