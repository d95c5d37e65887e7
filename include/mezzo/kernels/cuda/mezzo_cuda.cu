// The source of mezzo::cuda: the kernels and CudaKernels, which registers itself. Several objects
// of this source link into one program: functions that are not weak are static. (nvcc 13 makes
// functions of an unnamed namespace global.)

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

static_assert(std::is_trivially_copyable_v<GradScalerOptions>, "kernel argument");

/// Adds items to a Metadata, and calls `launch(metadata)` whenever it is full and after the last
/// item.
/// \param push_back  called with (metadata, i) for i in [0, count); returns false if it is full
template <class Metadata, class PushBack, class Launch>
static void launch_in_batches(int elements_per_block, std::size_t count, const PushBack& push_back,
                              const Launch& launch) {
  Metadata metadata(elements_per_block);
  const auto flush = [&] {
    if (metadata.num_blocks() != 0) launch(metadata);
    metadata.clear();
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (push_back(metadata, i)) continue;
    flush();
    push_back(metadata, i);
  }
  flush();
}

/// Gradients and the index of each range's first partial result.
struct GradRanges {
  const std::vector<ContiguousRange>& ranges;
  std::vector<int64_t> first_partials{0};  ///< the last entry is their total number

  explicit GradRanges(const std::vector<ContiguousRange>& grad_ranges) : ranges(grad_ranges) {
    for (const ContiguousRange& range : ranges) {
      const int64_t bytes = range.numel * static_cast<int64_t>(c10::elementSize(range.dtype));
      first_partials.push_back(first_partials.back() +
                               at::ceil_div(bytes, int64_t{kGradElementsPerBlock<char>}));
    }
  }

  /// Calls `launch.operator()<Element>(metadata)` for batches of ranges of each dtype.
  template <class Launch>
  void for_each_batch(const Launch& launch) const {
    launch_batches<float>(launch);
    launch_batches<c10::BFloat16>(launch);
    launch_batches<c10::Half>(launch);
    launch_batches<double>(launch);
  }

 private:
  template <class Element, class Launch>
  void launch_batches(const Launch& launch) const {
    launch_in_batches<GradListMetadata>(
        kGradElementsPerBlock<Element>, ranges.size(),
        [&](GradListMetadata& metadata, std::size_t i) {
          return ranges[i].dtype != c10::CppTypeToScalarType<Element>::value ||
                 metadata.push_back({ranges[i].data, ranges[i].numel, first_partials[i]});
        },
        [&](const GradListMetadata& metadata) { launch.template operator()<Element>(metadata); });
  }
};

static void unscale_and_check_(const std::vector<ContiguousRange>& gradients,
                               const at::Tensor& found_inf, const at::Tensor& inv_scale) {
  const DeviceGuard guard(found_inf.device());
  const Stream stream = current_stream();
  const auto* const inv_scale_data = inv_scale.const_data_ptr<float>();
  auto* const found_inf_data = found_inf.mutable_data_ptr<float>();
  GradRanges(gradients).for_each_batch([&]<class Element>(const GradListMetadata& metadata) {
    launch<unscale_kernel<Element>>(metadata.num_blocks(), kGradThreads, stream, metadata,
                                    inv_scale_data, found_inf_data);
  });
}

static void compute_grad_stats_(const std::vector<ContiguousRange>& gradients,
                                const GradStats& stats) {
  const at::Tensor& inv_scale = stats.inv_scale;
  const DeviceGuard guard(inv_scale.device());
  const Stream stream = current_stream();
  const GradRanges ranges(gradients);
  const int64_t count = ranges.first_partials.back();
  const at::Tensor memory = at::empty({count * static_cast<int64_t>(sizeof(PartialGradStats))},
                                      inv_scale.options().dtype(at::kByte));
  auto* const partials = static_cast<PartialGradStats*>(memory.mutable_data_ptr());
  ranges.for_each_batch([&]<class Element>(const GradListMetadata& metadata) {
    launch<grad_stats_kernel<Element>>(metadata.num_blocks(), kGradThreads, stream, metadata,
                                       partials);
  });
  launch<merge_grad_stats_kernel<kMergeThreads>>(
      1, kMergeThreads, stream, static_cast<const PartialGradStats*>(partials), count,
      inv_scale.const_data_ptr<float>(), stats.found_inf.mutable_data_ptr<float>(),
      stats.norm_sq.mutable_data_ptr<double>(), stats.max_abs.mutable_data_ptr<double>());
}

/// Returns the device address of pinned memory for the next kernel launch on the current stream.
/// Records the stream with the host allocator, which does not reuse the memory until the kernel
/// completes. `address` caches the result; it is null at first.
static double* pinned_address(const at::Tensor& pinned, void*& address) {
  const c10::Device device = current_device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto* const data = pinned.mutable_data_ptr<double>();
  at::getHostAllocator(device.type())
      ->record_event(data, pinned.storage().data_ptr().get_context(), stream);
  if (address == nullptr) address = device_address(data);
  return static_cast<double*>(address);
}

static at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType dtype) {
  const RelaxedCaptureModeGuard relaxed;
  return at::empty(sizes, at::device(at::kCPU).dtype(dtype).pinned_memory(true));
}

static __global__ void update_scale_kernel(const GradScalerOptions options, float* scale,
                                           float* inv_scale, int32_t* growth_tracker,
                                           int32_t* hysteresis_tracker, const float* found_inf) {
  const LossScaleState next =
      options.next({*scale, *growth_tracker, *hysteresis_tracker}, *found_inf != 0.0F);
  *scale = next.scale;
  *inv_scale = compute_inv_scale(next.scale);
  *growth_tracker = next.growth_tracker;
  *hysteresis_tracker = next.hysteresis_tracker;
}

static void update_scale_(const GradScalerOptions& options, const ScaleTensors& tensors,
                          const at::Tensor& found_inf) {
  const DeviceGuard guard(tensors.scale.device());
  const Stream stream = current_stream();
  launch<update_scale_kernel>(1, 1, stream, options, tensors.scale.mutable_data_ptr<float>(),
                              tensors.inv_scale.mutable_data_ptr<float>(),
                              tensors.growth_tracker.mutable_data_ptr<int32_t>(),
                              tensors.hysteresis_tracker.mutable_data_ptr<int32_t>(),
                              found_inf.const_data_ptr<float>());
  // An autograd graph may have saved the scale.
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
  const auto data_or_null = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<double>() : nullptr;
  };
  launch<write_step_values_kernel>(1, 1, current_stream(), scale.const_data_ptr<float>(),
                                   found_inf.const_data_ptr<float>(), data_or_null(norm_sq),
                                   data_or_null(max_abs), pinned_address(values, address));
}

/// Steps the parameters of one functor and weight format.
template <class Functor, class WeightFormat>
static void launch_step(const std::vector<ParamArgs>& params,
                        const std::vector<DeviceGroupArgs>& groups, bool has_extra_moment,
                        const DeviceStepArgs& step_args) {
  const auto push_back = [&](ParamListMetadata& metadata, std::size_t i) {
    const ParamArgs& param = params[i];
    return param.has_extra_moment != has_extra_moment ||
           !matches_format<WeightFormat>(param.storage, param.parameter_dtype) ||
           metadata.push_back(param, groups[param.group]);
  };
  launch_in_batches<ParamListMetadata>(
      kStepElementsPerBlock, params.size(), push_back, [&](const ParamListMetadata& metadata) {
        launch<optimizer_step_kernel<typename WeightFormat::Parameter, Functor, WeightFormat>>(
            metadata.num_blocks(), kStepThreads, current_stream(), metadata, step_args);
      });
}

static void step_adamw8bit_(at::Device device, const std::vector<AdamW8bitParamArgs>& params) {
  const DeviceGuard guard(device);
  const auto step = [&]<class Parameter>() {
    const auto push_back = [&](AdamW8bitListMetadata& metadata, std::size_t i) {
      return params[i].param.parameter_dtype != c10::CppTypeToScalarType<Parameter>::value ||
             metadata.push_back(params[i]);
    };
    launch_in_batches<AdamW8bitListMetadata>(kStepElementsPerBlock, params.size(), push_back,
                                             [&](const AdamW8bitListMetadata& metadata) {
                                               launch<adamw8bit_kernel<Parameter>>(
                                                   metadata.num_blocks(), kStepThreads,
                                                   current_stream(), metadata, DynamicMaps{});
                                             });
  };
  step.template operator()<float>();
  step.template operator()<c10::BFloat16>();
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
  const std::size_t count = state_steps.size();
  for (std::size_t begin = 0; begin < count; begin += StateStepsMetadata::kCapacity) {
    StateStepsMetadata metadata;
    for (std::size_t i = begin; i < count && metadata.size < StateStepsMetadata::kCapacity; ++i) {
      metadata.state_steps[metadata.size++] = state_steps[i];
    }
    launch<increment_state_steps_kernel>(1, kStepThreads, current_stream(), metadata, found_inf);
  }
}

static void step_(at::Device device, OptimizerKind kind, const std::vector<ParamArgs>& params,
                  const std::vector<DeviceGroupArgs>& groups, const DeviceStepArgs& step_args) {
  const DeviceGuard guard(device);
  const auto step = [&]<class Functor>(bool has_extra_moment) {
    for_each_weight_format([&]<class WeightFormat>() {
      launch_step<Functor, WeightFormat>(params, groups, has_extra_moment, step_args);
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

/// Priority 101: before the program's static objects, which may use the kernels.
__attribute__((constructor(101))) static void register_kernels() {
  register_cuda_kernels(kKernels);
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
