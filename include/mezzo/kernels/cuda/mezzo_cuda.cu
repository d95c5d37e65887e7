// The one source of mezzo::cuda: the kernels, and the functions through which host code reaches
// them, which register themselves. Two objects with all of this link into one program: what
// is not weak is static. (nvcc 13 makes the functions of an unnamed namespace global.)

#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/block8.h>
#include <mezzo/kernels/cuda/adamw8bit_step.cuh>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/cuda/gradients.cuh>
#include <mezzo/kernels/cuda/optimizer_step.cuh>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/devices.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/kernels/launch_table.h>
#include <mezzo/kernels/lion_element.h>
#include <mezzo/kernels/sgd_element.h>
#include <mezzo/kernels/step_use.h>
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
  const std::vector<Stretch>& stretches;
  std::vector<int64_t> first_partials{0};

  explicit GradientRows(const std::vector<Stretch>& all) : stretches(all) {
    for (const Stretch& stretch : stretches) {
      const int64_t bytes = stretch.count * static_cast<int64_t>(c10::elementSize(stretch.dtype));
      const int64_t blocks = GradientTable::blocks_of(bytes, kGradientBlock<char>);
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
    GradientTable table(kGradientBlock<Element>);
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

static void unscale_and_check_(const std::vector<Stretch>& gradients, const at::Tensor& found_inf,
                               const at::Tensor& inv_scale) {
  const DeviceGuard guard(found_inf.device());
  const Stream stream = current_stream();
  const auto* const factor = inv_scale.const_data_ptr<float>();
  auto* const found = found_inf.mutable_data_ptr<float>();
  GradientRows(gradients).for_tables([&]<class Element>(const GradientTable& table) {
    launch<unscale_kernel<Element>>(table.blocks(), kGradientThreads, stream, table, factor, found);
  });
}

static void summarize_(const std::vector<Stretch>& gradients, const Verdict& verdict) {
  const at::Tensor& inv_scale = verdict.inv_scale;
  const DeviceGuard guard(inv_scale.device());
  const Stream stream = current_stream();
  const GradientRows rows(gradients);
  const int64_t count = rows.first_partials.back();
  const at::Tensor memory = at::empty({count * static_cast<int64_t>(sizeof(GradientPartial))},
                                      inv_scale.options().dtype(at::kByte));
  auto* const partials = static_cast<GradientPartial*>(memory.mutable_data_ptr());
  rows.for_tables([&]<class Element>(const GradientTable& table) {
    launch<summary_kernel<Element>>(table.blocks(), kGradientThreads, stream, table, partials);
  });
  launch<finish_summary_kernel<kFinishThreads>>(
      1, kFinishThreads, stream, static_cast<const GradientPartial*>(partials), count,
      inv_scale.const_data_ptr<float>(), verdict.found_inf.mutable_data_ptr<float>(),
      verdict.sum_of_squares.mutable_data_ptr<double>(),
      verdict.max_abs.mutable_data_ptr<double>());
}

/// Returns the device address of pinned memory for a kernel that is launched next on the current
/// stream. Records the stream with the host allocator, which does not reuse the memory until the
/// kernel completes. `address` caches the result; it is null at first.
static double* pinned_place(const at::Tensor& pinned, void*& address) {
  const c10::Device device = current_device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto* const place = pinned.mutable_data_ptr<double>();
  at::getHostAllocator(device.type())
      ->record_event(place, pinned.storage().data_ptr().get_context(), stream);
  if (address == nullptr) address = address_on_device(place);
  return static_cast<double*>(address);
}

static at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType dtype) {
  const InCaptureToo allowed;
  return at::empty(sizes, at::device(at::kCPU).dtype(dtype).pinned_memory(true));
}

static __global__ void update_scale_kernel(const GradScalerOptions rule, float* scale,
                                           float* inverse, int32_t* growth_tracker,
                                           int32_t* hysteresis_tracker, const float* found_inf) {
  const LossScaleState next =
      rule.next({*scale, *growth_tracker, *hysteresis_tracker}, *found_inf != 0.0F);
  *scale = next.scale;
  *inverse = inverse_scale(next.scale);
  *growth_tracker = next.growth_tracker;
  *hysteresis_tracker = next.hysteresis_tracker;
}

static void update_scale_(const GradScalerOptions& rule, const ScaleTensors& tensors,
                          const at::Tensor& found_inf) {
  const DeviceGuard guard(tensors.scale.device());
  const Stream stream = current_stream();
  launch<update_scale_kernel>(
      1, 1, stream, rule, tensors.scale.mutable_data_ptr<float>(),
      tensors.inverse.mutable_data_ptr<float>(), tensors.growth_tracker.mutable_data_ptr<int32_t>(),
      tensors.hysteresis_tracker.mutable_data_ptr<int32_t>(), found_inf.const_data_ptr<float>());
  // A graph may still hold the scale for its backward.
  tensors.scale.unsafeGetTensorImpl()->bump_version();
}

static __global__ void write_letter_kernel(const float* scale, const float* found_inf,
                                           const double* sum_of_squares, const double* max_abs,
                                           double* letter) {
  letter[0] = *scale;
  letter[1] = *found_inf;
  letter[2] = sum_of_squares == nullptr ? 0.0 : *sum_of_squares;
  letter[3] = max_abs == nullptr ? 0.0 : *max_abs;
}

static void write_letter_(const at::Tensor& scale, const at::Tensor& found_inf,
                          const at::Tensor& sum_of_squares, const at::Tensor& max_abs,
                          const at::Tensor& letter, void*& address) {
  const DeviceGuard guard(scale.device());
  const auto number_of = [](const at::Tensor& number) {
    return number.defined() ? number.const_data_ptr<double>() : nullptr;
  };
  launch<write_letter_kernel>(1, 1, current_stream(), scale.const_data_ptr<float>(),
                              found_inf.const_data_ptr<float>(), number_of(sum_of_squares),
                              number_of(max_abs), pinned_place(letter, address));
}

/// Launches a step over the rows with one variant and one way of keeping weights, as many at a time
/// as a table holds.
template <class Rule, class Weights>
static void step_rows(const std::vector<StepRow>& rows, const std::vector<StepGroup>& groups,
                      bool variant, const StepInputs& inputs) {
  StepTable table(kStepBlock);
  const auto launch_table = [&] {
    if (table.blocks() != 0) {
      launch<optimizer_step_kernel<typename Weights::Parameter, Rule, Weights>>(
          table.blocks(), kStepThreads, current_stream(), table, inputs);
    }
    table.clear();
  };
  for (const StepRow& row : rows) {
    if (row.variant != variant || !keeps_as<Weights>(row.storage, row.parameter_dtype)) continue;
    const StepGroup& group = groups[row.group];
    if (table.push_back(row, group)) continue;
    launch_table();
    table.push_back(row, group);
  }
  launch_table();
}

static void step_adamw8bit_(at::Device device, const std::vector<AdamW8bitStep>& steps) {
  const DeviceGuard guard(device);
  const auto step_all = [&]<class Parameter>() {
    AdamW8bitTable table(kStepBlock);
    const auto launch_steps = [&] {
      if (table.blocks() != 0) {
        launch<adamw8bit_kernel<Parameter>>(table.blocks(), kStepThreads, current_stream(), table,
                                            Block8Maps{});
      }
      table.clear();
    };
    for (const AdamW8bitStep& step : steps) {
      if (step.parameter_dtype != c10::CppTypeToScalarType<Parameter>::value) continue;
      if (table.full()) launch_steps();
      table.push_back(step);
    }
    launch_steps();
  };
  step_all.template operator()<float>();
  step_all.template operator()<c10::BFloat16>();
}

static uint64_t capture_on(at::Device device) {
  if (!has_captures(device)) return 0;
  const DeviceGuard guard(device);
  return capture_id();
}

static int exchange_capture_mode(at::Device device, int mode) {
  return has_captures(device) ? set_capture_mode(mode) : mode;
}

static void count_steps_(at::Device device, const std::vector<float*>& counters,
                         const float* found_inf) {
  const DeviceGuard guard(device);
  for (std::size_t begin = 0; begin < counters.size(); begin += CounterTable::kCapacity) {
    CounterTable table;
    for (std::size_t i = begin; i < counters.size() && table.size < CounterTable::kCapacity; ++i) {
      table.counter[table.size++] = counters[i];
    }
    launch<count_steps_kernel>(1, kStepThreads, current_stream(), table, found_inf);
  }
}

static void step_(at::Device device, CudaRule rule, const std::vector<StepRow>& rows,
                  const std::vector<StepGroup>& groups, const StepInputs& inputs) {
  const DeviceGuard guard(device);
  const auto step = [&]<class Rule>(bool variant) {
    for_each_weights(
        [&]<class Weights>() { step_rows<Rule, Weights>(rows, groups, variant, inputs); });
  };
  switch (rule) {
    case CudaRule::adam:
      step.template operator()<AdamRule<false>>(false);
      return step.template operator()<AdamRule<true>>(true);
    case CudaRule::sgd:
      step.template operator()<SgdRule<false>>(false);
      return step.template operator()<SgdRule<true>>(true);
    case CudaRule::lion:
      return step.template operator()<LionRule>(false);
  }
}

static constexpr CudaKernels kKernels{.serves = &serves,
                                      .capture_on = &capture_on,
                                      .exchange_capture_mode = &exchange_capture_mode,
                                      .empty_pinned = &empty_pinned,
                                      .unscale_and_check_ = &unscale_and_check_,
                                      .summarize_ = &summarize_,
                                      .update_scale_ = &update_scale_,
                                      .step_ = &step_,
                                      .step_adamw8bit_ = &step_adamw8bit_,
                                      .write_letter_ = &write_letter_,
                                      .count_steps_ = &count_steps_};

/// Runs before static objects of the program, which may use the kernels.
__attribute__((constructor(101))) static void register_kernels() {
  register_cuda_kernels(kKernels);
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
