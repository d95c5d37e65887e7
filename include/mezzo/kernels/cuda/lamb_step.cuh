/// \file
/// LAMB on CUDA: two passes over the parameters of a table, and between them one block for each
/// that adds up its norms. The arithmetic of an element is that of the CPU's loops
/// (mezzo/kernels/lamb_element.h). No atomics: the same numbers give the same bits. Nothing waits.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/lamb_element.h>
#include <mezzo/kernels/cuda/gradient_summary.cuh>
#include <mezzo/kernels/cuda/optimizer_step.cuh>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <concepts>
#include <cstdint>
#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Here for merge_block, which finds it by its argument.
__device__ inline LambNorms shuffle_down(const LambNorms& norms, int lanes) {
  return {cuda::shuffle_down(norms.parameter, lanes), cuda::shuffle_down(norms.update, lanes)};
}

namespace cuda {

/// The streams of one slice, pack by pack, in either pass.
template <class Parameter, class Gradient, class Weights>
struct LambStreams : StepStreams<Parameter, Gradient, LambRule, Weights> {
  using Streams = StepStreams<Parameter, Gradient, LambRule, Weights>;
  using Body = LambBody<Parameter, Gradient, Weights, typename Streams::Lanes>;
  using Place = typename Body::Place;
  using Streams::base;
  using Streams::is_aligned;
  using Streams::kReadsLowHalf;
  using Streams::kWritesHalves;
  using Streams::Streams;
  using typename Streams::Scalar;
  using typename Streams::Stored;
  using typename Streams::StoredGradient;
  using typename Streams::StoredMoment;

  __device__ void learn_pack(int64_t at, int count, const Body& body, uint32_t number,
                             const RandomKey& key, bool clear, LambNorms& norms) const {
    const bool is_whole = is_aligned && count == kStepPack;
    StepPack<StoredGradient> gradients;
    StepPack<Stored> parameters;
    StepPack<StoredMoment> means;
    StepPack<StoredMoment> squares;
    StepPack<uint16_t> low_half_or_copy;
    load_pack(base.gradient + at, count, is_whole, gradients);
    load_pack(base.parameter + at, count, is_whole, parameters);
    load_pack(base.moments[0] + at, count, is_whole, means);
    load_pack(base.moments[1] + at, count, is_whole, squares);
    if (kReadsLowHalf) load_pack(base.low_half_or_copy + at, count, is_whole, low_half_or_copy);
    MEZZO_UNROLL
    for (int i = 0; i < kStepPack; ++i) {
      const Place place{&parameters.element[i],
                        &gradients.element[i],
                        {&means.element[i], &squares.element[i]},
                        &low_half_or_copy.element[i],
                        nullptr,
                        /*has_low_half_or_copy=*/kReadsLowHalf,
                        /*has_average=*/false};
      Scalar parameter;
      Scalar update;
      body.learn(place, number + static_cast<uint32_t>(i), key, parameter, update);
      if (i < count) {
        const auto wide_parameter = static_cast<double>(parameter);
        const auto wide_update = static_cast<double>(update);
        norms.parameter = ::fma(wide_parameter, wide_parameter, norms.parameter);
        norms.update = ::fma(wide_update, wide_update, norms.update);
      }
    }
    store_pack(means, count, is_whole, base.moments[0] + at);
    store_pack(squares, count, is_whole, base.moments[1] + at);
    if (clear) store_pack(gradients, count, is_whole, base.gradient + at);
  }

  __device__ void move_pack(int64_t at, int count, const Body& body, uint32_t number,
                            const RandomKey& key) const {
    const bool is_whole = is_aligned && count == kStepPack;
    StepPack<Stored> parameters;
    StepPack<StoredMoment> means;
    StepPack<StoredMoment> squares;
    StepPack<uint16_t> low_half_or_copy;
    StepPack<Scalar> average;
    load_pack(base.parameter + at, count, is_whole, parameters);
    load_pack(base.moments[0] + at, count, is_whole, means);
    load_pack(base.moments[1] + at, count, is_whole, squares);
    if (kReadsLowHalf) load_pack(base.low_half_or_copy + at, count, is_whole, low_half_or_copy);
    if (base.has_average) load_pack(base.average + at, count, is_whole, average);
    MEZZO_UNROLL
    for (int i = 0; i < kStepPack; ++i) {
      const Place place{&parameters.element[i],
                        nullptr,
                        {&means.element[i], &squares.element[i]},
                        &low_half_or_copy.element[i],
                        &average.element[i],
                        base.has_low_half_or_copy,
                        base.has_average};
      body.move(place, number + static_cast<uint32_t>(i), key);
    }
    store_pack(parameters, count, is_whole, base.parameter + at);
    if (kWritesHalves && base.has_low_half_or_copy)
      store_pack(low_half_or_copy, count, is_whole, base.low_half_or_copy + at);
    if (base.has_average) store_pack(average, count, is_whole, base.average + at);
  }
};

/// Calls `work(at, count)` for each of the thread's packs in a slice of `count` elements.
template <class Work>
__device__ void for_each_pack(int64_t count, const Work& work) {
  constexpr int64_t kStride = int64_t{kStepThreads} * kStepPack;
  for (int64_t at = int64_t{threadIdx.x} * kStepPack; at < count; at += kStride) {
    work(at, static_cast<int>(count - at < kStepPack ? count - at : kStepPack));
  }
}

/// What thread 0 works out for its block: the coefficients of a step of the slice's row. A block's
/// elements have one random key, as in optimizer_step_kernel.
template <class Table>
__device__ void prepare_lamb(const Table& table, const StepSlice& slice, const StepInputs& inputs,
                             LambCoefficients& coefficients, StepUse& use, RandomKey& key) {
  use = use_of_slice(table, slice, inputs);
  const auto& group = table.group(slice.group);
  coefficients = group.constants.at(group.lr * inputs.lr_factor(), static_cast<int64_t>(use.step));
  key = random_key(use.seed, use.step, use.parameter, static_cast<uint64_t>(slice.begin >> 32));
}

__device__ inline bool is_skipped(const StepInputs& inputs) {
  return inputs.found_inf != nullptr && *inputs.found_inf != 0.0F;
}

/// The first pass; each block leaves its part of the norms.
template <class Parameter, class Gradient, class Weights, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads)
    lamb_moments_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, const StepInputs inputs,
                        LambNorms* of_blocks) {
  using Streams = LambStreams<Parameter, Gradient, Weights>;
  const StepSlice slice = table.slice_of(blockIdx.x);
  const Streams streams(slice);
  const int64_t count = slice.end - slice.begin;
  if (is_skipped(inputs)) {
    if (!inputs.clear) return;
    for_each_pack(count, [&](int64_t at, int size) { streams.clear_pack(at, size); });
    return;
  }
  MEZZO_SHARED(LambCoefficients, coefficients);
  MEZZO_SHARED(StepUse, use);
  MEZZO_SHARED(RandomKey, key);
  if (threadIdx.x == 0) prepare_lamb(table, slice, inputs, coefficients, use, key);
  __syncthreads();
  const typename Streams::Body body(coefficients, use);
  LambNorms norms;
  for_each_pack(count, [&](int64_t at, int size) {
    streams.learn_pack(at, size, body, static_cast<uint32_t>(slice.begin + at), key, inputs.clear,
                       norms);
  });
  norms = merge_block<LambNorms, kStepThreads>(norms);
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = norms;
}

/// One block for each row: the norms of its blocks as one, in an order that is fixed.
template <class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads)
    lamb_norms_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, const StepInputs inputs,
                      const LambNorms* of_blocks, LambNorms* of_rows) {
  if (is_skipped(inputs)) return;
  const auto row = static_cast<int>(blockIdx.x);
  LambNorms norms;
  const int64_t end = table.end_block(row);
  for (int64_t i = table.first_block(row) + threadIdx.x; i < end; i += kStepThreads) {
    norms.merge(of_blocks[i]);
  }
  norms = merge_block<LambNorms, kStepThreads>(norms);
  if (threadIdx.x == 0) of_rows[row] = norms;
}

/// The second pass.
template <class Parameter, class Weights, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads)
    lamb_parameter_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, const StepInputs inputs,
                          const LambNorms* of_rows) {
  if (is_skipped(inputs)) return;
  using Streams = LambStreams<Parameter, Parameter, Weights>;
  StepSlice slice = table.slice_of(blockIdx.x);
  slice.span.gradient = slice.span.parameter;  // not used, and of another dtype
  MEZZO_SHARED(LambCoefficients, coefficients);
  MEZZO_SHARED(StepUse, use);
  MEZZO_SHARED(RandomKey, key);
  if (threadIdx.x == 0) {
    prepare_lamb(table, slice, inputs, coefficients, use, key);
    coefficients.adapt(of_rows[slice.row]);
  }
  __syncthreads();
  const Streams streams(slice);
  const typename Streams::Body body(coefficients, use);
  for_each_pack(slice.end - slice.begin, [&](int64_t at, int size) {
    streams.move_pack(at, size, body, static_cast<uint32_t>(slice.begin + at), key);
  });
}

/// The overload for LAMB: three launches on `stream`, which is the current one of the current
/// device, as the norms' memory is taken there and given back in its order.
template <class Parameter, class Gradient, std::same_as<LambRule> Rule, class Weights, class Table>
void launch_optimizer_step(const PagedTable<Table>& table, const StepInputs& inputs,
                           Stream stream) {
  static_assert(sizeof(table) + sizeof(StepInputs) + 2 * sizeof(LambNorms*) <= 32764);
  if (table.blocks() == 0) return;
  const at::Tensor norms = at::empty({(table.blocks() + table.rows()) * int64_t{sizeof(LambNorms)}},
                                     at::TensorOptions().device(current_device()).dtype(at::kByte));
  auto* const of_blocks = static_cast<LambNorms*>(norms.mutable_data_ptr());
  LambNorms* const of_rows = of_blocks + table.blocks();
  launch<lamb_moments_kernel<Parameter, Gradient, Weights, Table>>(
      table.blocks(), kStepThreads, stream, table, inputs, of_blocks);
  launch<lamb_norms_kernel<Table>>(table.rows(), kStepThreads, stream, table, inputs, of_blocks,
                                   of_rows);
  launch<lamb_parameter_kernel<Parameter, Weights, Table>>(table.blocks(), kStepThreads, stream,
                                                           table, inputs, of_rows);
}

}  // namespace cuda
}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
