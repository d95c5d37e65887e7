/// \file
/// LAMB on CUDA: two passes over the parameters of a table. Between them one block for each
/// parameter adds up its norms. The arithmetic of an element is that of the CPU's loops
/// (mezzo/kernels/lamb_element.h). For the norms, up to eight squares of floats are added in float,
/// so a trust ratio is within a millionth of the CPU's. There are no atomics: equal inputs give
/// equal bits. The host does not wait.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/cuda/gradient_summary.cuh>
#include <mezzo/kernels/cuda/optimizer_step.cuh>
#include <mezzo/kernels/lamb_element.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <concepts>
#include <cstdint>
#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Declared here so that merge_block finds it by argument-dependent lookup.
__device__ inline LambNorms shuffle_down(const LambNorms& norms, int lanes) {
  return {cuda::shuffle_down(norms.parameter, lanes), cuda::shuffle_down(norms.update, lanes)};
}

namespace cuda {

/// The streams of one slice, pack by pack, for both passes.
template <class Parameter, class Gradient, class Weights>
struct LambStreams : StepStreams<Parameter, Gradient, LambRule, Weights> {
  using Streams = StepStreams<Parameter, Gradient, LambRule, Weights>;
  using Body = LambBody<Parameter, Gradient, Weights, typename Streams::Lanes>;
  using Streams::kPack;
  using Streams::Streams;
  using typename Streams::Packs;
  using typename Streams::Scalar;

  __device__ void learn_pack(const Body& body, uint32_t number, const RandomKey& key,
                             LambNorms& norms) const {
    Packs packs;
    Streams::template load<StepPass::learn>(packs);
    Scalar parameters[kPack];
    Scalar updates[kPack];
    MEZZO_UNROLL
    for (int i = 0; i < kPack; ++i) {
      body.learn(packs.place(i), number + static_cast<uint32_t>(i), key, parameters[i], updates[i]);
    }
    add_squares(parameters, norms.parameter);
    add_squares(updates, norms.update);
    Streams::template store<StepPass::learn>(packs);
  }

  __device__ void learn_element(int at, const Body& body, uint32_t number, const RandomKey& key,
                                LambNorms& norms) const {
    Scalar parameter;
    Scalar update;
    body.learn(Streams::place(at), number, key, parameter, update);
    add_square(parameter, norms.parameter);
    add_square(update, norms.update);
  }

  __device__ void move_pack(const Body& body, uint32_t number, const RandomKey& key) const {
    Packs packs;
    Streams::template load<StepPass::move>(packs);
    Scalar parameters[kPack];
    MEZZO_UNROLL
    for (int i = 0; i < kPack; ++i) {
      body.move(packs.place(i), number + static_cast<uint32_t>(i), key, parameters[i]);
    }
    Streams::template store<StepPass::move>(packs);
    Streams::store_beside(parameters, body);
  }
};

/// The first pass. Each block writes its part of the norms.
template <class Parameter, class Gradient, class Weights, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    lamb_moments_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, const StepInputs inputs,
                        LambNorms* of_blocks) {
  using Streams = LambStreams<Parameter, Gradient, Weights>;
  const StepSlice slice = table.slice_of(blockIdx.x);
  const Streams streams(slice);
  const auto count = static_cast<int>(slice.end - slice.begin);
  if (is_skipped(inputs)) {
    if (inputs.clear) streams.clear_gradients(count);
    return;
  }
  const auto own = block_step<typename Streams::Body>(table, slice, inputs);
  LambNorms norms;
  const auto number = static_cast<uint32_t>(slice.begin);
  visit_slice(
      streams, count,
      [&](const Streams& here, int at) {
        here.learn_pack(own.body, number + static_cast<uint32_t>(at), own.key, norms);
      },
      [&](int at) {
        streams.learn_element(at, own.body, number + static_cast<uint32_t>(at), own.key, norms);
      });
  if (inputs.clear) streams.clear_gradients(count);
  norms = merge_block<LambNorms, kStepThreads>(norms);
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = norms;
}

/// Adds up the norms of a row's blocks, in a fixed order. One block for each row.
template <class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads, kStepBlocks)
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
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    lamb_parameter_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, const StepInputs inputs,
                          const LambNorms* of_rows) {
  if (is_skipped(inputs)) return;
  using Streams = LambStreams<Parameter, Parameter, Weights>;
  StepSlice slice = table.slice_of(blockIdx.x);
  slice.span.gradient = slice.span.parameter;  // not used, and of another dtype
  const auto own = block_step<typename Streams::Body>(
      table, slice, inputs,
      [&](LambCoefficients& coefficients) { coefficients.adapt(of_rows[slice.row]); });
  const Streams streams(slice);
  const auto number = static_cast<uint32_t>(slice.begin);
  visit_slice(
      streams, static_cast<int>(slice.end - slice.begin),
      [&](const Streams& here, int at) {
        here.move_pack(own.body, number + static_cast<uint32_t>(at), own.key);
      },
      [&](int at) {
        own.body.move(streams.place(at), number + static_cast<uint32_t>(at), own.key);
      });
}

/// Calls `launch_all(of_blocks, of_rows)` with memory for the norms. It launches on the current
/// stream of the current device, in whose order the memory is taken and given back.
template <class Table, class LaunchAll>
void launch_lamb(const PagedTable<Table>& table, const LaunchAll& launch_all) {
  static_assert(kStepArgumentsFit<Table>);
  if (table.blocks() == 0) return;
  const at::Tensor norms = at::empty({(table.blocks() + table.rows()) * int64_t{sizeof(LambNorms)}},
                                     at::TensorOptions().device(current_device()).dtype(at::kByte));
  auto* const of_blocks = static_cast<LambNorms*>(norms.mutable_data_ptr());
  launch_all(of_blocks, of_blocks + table.blocks());
}

/// The overload for LAMB, in three launches.
template <class Parameter, class Gradient, std::same_as<LambRule> Rule, class Weights, class Table>
void launch_optimizer_step(const PagedTable<Table>& table, const StepInputs& inputs,
                           Stream stream) {
  launch_lamb(table, [&](LambNorms* of_blocks, LambNorms* of_rows) {
    launch<lamb_moments_kernel<Parameter, Gradient, Weights, Table>>(
        table.blocks(), kStepThreads, stream, table, inputs, of_blocks);
    launch<lamb_norms_kernel<Table>>(table.rows(), kStepThreads, stream, table, inputs, of_blocks,
                                     of_rows);
    launch<lamb_parameter_kernel<Parameter, Weights, Table>>(table.blocks(), kStepThreads, stream,
                                                             table, inputs, of_rows);
  });
}

}  // namespace cuda
}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
