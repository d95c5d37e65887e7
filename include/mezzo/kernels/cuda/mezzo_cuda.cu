// The one source of mezzo::cuda: the kernels, and the functions through which host code reaches
// them, which register themselves. Two objects with all of this link into one program: what
// is not weak is static. (nvcc 13 makes the functions of an unnamed namespace global.)

#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/adam_functor.h>
#include <mezzo/kernels/blockwise_quant.h>
#include <mezzo/kernels/cuda/adamw8bit_step.cuh>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/cuda/gradients.cuh>
#include <mezzo/kernels/cuda/optimizer_step.cuh>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/grad_stats.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/kernels/lion_functor.h>
#include <mezzo/kernels/multi_tensor_metadata.h>
#include <mezzo/kernels/sgd_functor.h>
#include <mezzo/kernels/step_args.h>
#include <mezzo/kernels/update_scale.h>
#include <mezzo/kernels/weight_formats.h>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

static_assert(std::is_trivially_copyable_v<GradScalerOptions>, "a kernel takes it by value");

/// Gradients as rows: their memory, and the index of each stretch's first partial result. The last
/// entry of `first_partials` is the number of all.
struct GradientRows {
  const std::vector<ContiguousRange>& stretches;
  std::vector<int64_t> first_partials{0};

  explicit GradientRows(const std::vector<ContiguousRange>& all) : stretches(all) {
    for (const ContiguousRange& stretch : stretches) {
      const int64_t bytes = stretch.count * static_cast<int64_t>(c10::elementSize(stretch.dtype));
      const int64_t blocks = GradListMetadata::num_blocks_for(bytes, kGradElementsPerBlock<char>);
      first_partials.push_back(first_partials.back() + blocks);
    }
  }

  /// Calls `launch.operator()<Element>(table)` for each dtype, with as many rows at a time as a
  /// table holds.
  template <class Launch>
  void for_tables(const Launch& launch) const {
    for_tables_of<float>(launch);
    for_tables_of<c10::BFloat16>(launch);
    for_tables_of<c10::Half>(launch);
    for_tables_of<double>(launch);
  }

 private:
  template <class Element, class Launch>
  void for_tables_of(const Launch& launch) const {
    GradListMetadata table(kGradElementsPerBlock<Element>);
    const auto launch_table = [&] {
      launch.template operator()<Element>(table);
      table.clear();
    };
    for (std::size_t i = 0; i < stretches.size(); ++i) {
      if (stretches[i].dtype != c10::CppTypeToScalarType<Element>::value) continue;
      if (table.full()) launch_table();
      table.push_back({stretches[i].data, stretches[i].count, first_partials[i]});
    }
    if (!table.empty()) launch_table();
  }
};

static void unscale_and_check_(const std::vector<ContiguousRange>& gradients,
                               const at::Tensor& found_inf, const at::Tensor& inv_scale) {
  const DeviceGuard guard(found_inf.device());
  const Stream stream = current_stream();
  const auto* const factor = inv_scale.const_data_ptr<float>();
  auto* const found = found_inf.mutable_data_ptr<float>();
  GradientRows(gradients).for_tables([&]<class Element>(const GradListMetadata& table) {
    launch<unscale_kernel<Element>>(table.num_blocks(), kGradThreads, stream, table, factor, found);
  });
}

static void compute_grad_stats_(const std::vector<ContiguousRange>& gradients,
                                const GradStats& stats) {
  const at::Tensor& inv_scale = stats.inv_scale;
  const DeviceGuard guard(inv_scale.device());
  const Stream stream = current_stream();
  const GradientRows rows(gradients);
  const int64_t count = rows.first_partials.back();
  const at::Tensor memory = at::empty({count * static_cast<int64_t>(sizeof(PartialGradStats))},
                                      inv_scale.options().dtype(at::kByte));
  auto* const partials = static_cast<PartialGradStats*>(memory.mutable_data_ptr());
  rows.for_tables([&]<class Element>(const GradListMetadata& table) {
    launch<grad_stats_kernel<Element>>(table.num_blocks(), kGradThreads, stream, table, partials);
  });
  launch<merge_grad_stats_kernel<kMergeThreads>>(
      1, kMergeThreads, stream, static_cast<const PartialGradStats*>(partials), count,
      inv_scale.const_data_ptr<float>(), stats.found_inf.mutable_data_ptr<float>(),
      stats.norm_sq.mutable_data_ptr<double>(), stats.max_abs.mutable_data_ptr<double>());
}

/// Returns the device address of pinned memory for a kernel that is launched next on the current
/// stream. Records the stream with the host allocator, which does not reuse the memory until the
/// kernel completes. `address` caches the result; it is null at first.
static double* pinned_address(const at::Tensor& pinned, void*& address) {
  const c10::Device device = current_device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto* const place = pinned.mutable_data_ptr<double>();
  at::getHostAllocator(device.type())
      ->record_event(place, pinned.storage().data_ptr().get_context(), stream);
  if (address == nullptr) address = device_address(place);
  return static_cast<double*>(address);
}

static at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType dtype) {
  const RelaxedCaptureModeGuard allowed;
  return at::empty(sizes, at::device(at::kCPU).dtype(dtype).pinned_memory(true));
}

static __global__ void update_scale_kernel(const GradScalerOptions options, float* scale,
                                           float* inverse, int32_t* growth_tracker,
                                           int32_t* hysteresis_tracker, const float* found_inf) {
  const LossScaleState next =
      options.next({*scale, *growth_tracker, *hysteresis_tracker}, *found_inf != 0.0F);
  *scale = next.scale;
  *inverse = inverse_scale(next.scale);
  *growth_tracker = next.growth_tracker;
  *hysteresis_tracker = next.hysteresis_tracker;
}

static void update_scale_(const GradScalerOptions& options, const ScaleTensors& tensors,
                          const at::Tensor& found_inf) {
  const DeviceGuard guard(tensors.scale.device());
  const Stream stream = current_stream();
  launch<update_scale_kernel>(
      1, 1, stream, options, tensors.scale.mutable_data_ptr<float>(),
      tensors.inverse.mutable_data_ptr<float>(), tensors.growth_tracker.mutable_data_ptr<int32_t>(),
      tensors.hysteresis_tracker.mutable_data_ptr<int32_t>(), found_inf.const_data_ptr<float>());
  // A graph may still hold the scale for its backward.
  tensors.scale.unsafeGetTensorImpl()->bump_version();
}

static __global__ void write_step_values_kernel(const float* scale, const float* found_inf,
                                                const double* norm_sq, const double* max_abs,
                                                double* values) {
  values[0] = *scale;
  values[1] = *found_inf;
  values[2] = norm_sq == nullptr ? 0.0 : *norm_sq;
  values[3] = max_abs == nullptr ? 0.0 : *max_abs;
}

static void write_step_values_(const at::Tensor& scale, const at::Tensor& found_inf,
                               const at::Tensor& norm_sq, const at::Tensor& max_abs,
                               const at::Tensor& values, void*& address) {
  const DeviceGuard guard(scale.device());
  const auto data_or_null = [](const at::Tensor& number) {
    return number.defined() ? number.const_data_ptr<double>() : nullptr;
  };
  launch<write_step_values_kernel>(1, 1, current_stream(), scale.const_data_ptr<float>(),
                                   found_inf.const_data_ptr<float>(), data_or_null(norm_sq),
                                   data_or_null(max_abs), pinned_address(values, address));
}

/// Launches a step over the rows with one variant and one way of keeping weights, as many at a time
/// as a table holds.
template <class Functor, class WeightFormat>
static void launch_step(const std::vector<ParamArgs>& rows,
                        const std::vector<DeviceGroupArgs>& groups, bool has_extra_moment,
                        const DeviceStepArgs& step_args) {
  ParamListMetadata table(kStepElementsPerBlock);
  const auto launch_table = [&] {
    if (table.num_blocks() != 0) {
      launch<optimizer_step_kernel<typename WeightFormat::Parameter, Functor, WeightFormat>>(
          table.num_blocks(), kStepThreads, current_stream(), table, step_args);
    }
    table.clear();
  };
  for (const ParamArgs& row : rows) {
    if (row.has_extra_moment != has_extra_moment ||
        !matches_format<WeightFormat>(row.storage, row.parameter_dtype))
      continue;
    const DeviceGroupArgs& group = groups[row.group];
    if (table.push_back(row, group)) continue;
    launch_table();
    table.push_back(row, group);
  }
  launch_table();
}

static void step_adamw8bit_(at::Device device, const std::vector<AdamW8bitParamArgs>& steps) {
  const DeviceGuard guard(device);
  const auto step_all = [&]<class Parameter>() {
    AdamW8bitListMetadata table(kStepElementsPerBlock);
    const auto launch_steps = [&] {
      if (table.num_blocks() != 0) {
        launch<adamw8bit_kernel<Parameter>>(table.num_blocks(), kStepThreads, current_stream(),
                                            table, DynamicMaps{});
      }
      table.clear();
    };
    for (const AdamW8bitParamArgs& step : steps) {
      if (step.parameter_dtype != c10::CppTypeToScalarType<Parameter>::value) continue;
      if (table.full()) launch_steps();
      table.push_back(step);
    }
    launch_steps();
  };
  step_all.template operator()<float>();
  step_all.template operator()<c10::BFloat16>();
}

static uint64_t current_capture_id(at::Device device) {
  if (!has_captures(device)) return 0;
  const DeviceGuard guard(device);
  return capture_id();
}

static int exchange_capture_mode(at::Device device, int mode) {
  return has_captures(device) ? exchange_thread_capture_mode(mode) : mode;
}

static void increment_state_steps_(at::Device device, const std::vector<float*>& state_steps,
                                   const float* found_inf) {
  const DeviceGuard guard(device);
  for (std::size_t begin = 0; begin < state_steps.size(); begin += StateStepsMetadata::kCapacity) {
    StateStepsMetadata table;
    for (std::size_t i = begin;
         i < state_steps.size() && table.size < StateStepsMetadata::kCapacity; ++i) {
      table.counter[table.size++] = state_steps[i];
    }
    launch<increment_state_steps_kernel>(1, kStepThreads, current_stream(), table, found_inf);
  }
}

static void step_(at::Device device, OptimizerKind kind, const std::vector<ParamArgs>& rows,
                  const std::vector<DeviceGroupArgs>& groups, const DeviceStepArgs& step_args) {
  const DeviceGuard guard(device);
  const auto step = [&]<class Functor>(bool has_extra_moment) {
    for_each_weight_format([&]<class WeightFormat>() {
      launch_step<Functor, WeightFormat>(rows, groups, has_extra_moment, step_args);
    });
  };
  switch (kind) {
    case OptimizerKind::adam:
      step.template operator()<AdamFunctor<false>>(false);
      return step.template operator()<AdamFunctor<true>>(true);
    case OptimizerKind::sgd:
      step.template operator()<SgdFunctor<false>>(false);
      return step.template operator()<SgdFunctor<true>>(true);
    case OptimizerKind::lion:
      return step.template operator()<LionFunctor>(false);
  }
}

static constexpr CudaKernels kKernels{.supports = &supports,
                                      .current_capture_id = &current_capture_id,
                                      .exchange_capture_mode = &exchange_capture_mode,
                                      .empty_pinned = &empty_pinned,
                                      .unscale_and_check_ = &unscale_and_check_,
                                      .compute_grad_stats_ = &compute_grad_stats_,
                                      .update_scale_ = &update_scale_,
                                      .step_ = &step_,
                                      .step_adamw8bit_ = &step_adamw8bit_,
                                      .write_step_values_ = &write_step_values_,
                                      .increment_state_steps_ = &increment_state_steps_};

/// Runs before static objects of the program, which may use the kernels.
__attribute__((constructor(101))) static void register_kernels() {
  register_cuda_kernels(kKernels);
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
