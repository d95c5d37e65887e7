// The one source of mezzo::cuda: the kernels, and the functions through which host code reaches
// them. Two objects with all of this link into one program: what is not weak is static. (nvcc 13
// makes the functions of an unnamed namespace global.)

#include <mezzo/base/detail/capture.h>  // which declares capture_on
#include <mezzo/base/loss_scale.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/adamw8bit_step.h>
#include <mezzo/kernels/cuda/adamw8bit_step.cuh>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/cuda/gradient_summary.cuh>
#include <mezzo/kernels/cuda/optimizer_step.cuh>
#include <mezzo/kernels/cuda/unscale.cuh>
#include <mezzo/kernels/cuda_launch.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/lion_element.h>
#include <mezzo/kernels/optimizer_step_table.h>
#include <mezzo/kernels/sgd_element.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/update_scale.h>

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

static_assert(std::is_trivially_copyable_v<LossScale>, "a kernel takes it by value");

template <class Element>
static bool is_of(const Stretch& stretch) {
  return stretch.dtype == c10::CppTypeToScalarType<Element>::value;
}

/// Launches a kernel over the stretches of `Element`'s dtype, as many at a time as a table holds.
template <class Element>
static void unscale_dtype(const std::vector<Stretch>& stretches, const float* inv_scale,
                          float* found_inf, Stream stream) {
  GradientTable table(kElementsPerBlock<Element>);
  const auto launch = [&] {
    cuda::launch<unscale_kernel<Element>>(table.blocks(), kUnscaleThreads, stream, table, inv_scale,
                                          found_inf);
    table.clear();
  };
  for (const Stretch& stretch : stretches) {
    if (!is_of<Element>(stretch)) continue;
    if (table.full()) launch();
    table.push_back({stretch.data, stretch.count});
  }
  if (!table.empty()) launch();
}

/// Launches the summary of the stretches of `Element`'s dtype, as many at a time as a table holds.
template <class Element>
static void summarize_dtype(const std::vector<Stretch>& stretches,
                            const std::vector<int64_t>& first_partials, GradientPartial* partials,
                            Stream stream) {
  SummaryTable table(kSummaryBlock<Element>);
  const auto launch_table = [&] {
    launch<summary_kernel<Element>>(table.blocks(), kSummaryThreads, stream, table, partials);
    table.clear();
  };
  for (std::size_t i = 0; i < stretches.size(); ++i) {
    if (!is_of<Element>(stretches[i])) continue;
    if (table.full()) launch_table();
    table.push_back({stretches[i].data, stretches[i].count, first_partials[i]});
  }
  if (!table.empty()) launch_table();
}

/// Returns the index of each stretch's first partial result and, as the last entry, their number.
static std::vector<int64_t> partial_offsets(const std::vector<Stretch>& stretches) {
  std::vector<int64_t> offsets{0};
  for (const Stretch& stretch : stretches) {
    const int64_t bytes = stretch.count * static_cast<int64_t>(c10::elementSize(stretch.dtype));
    offsets.push_back(offsets.back() + SummaryTable::blocks_of(bytes, kSummaryBlock<char>));
  }
  return offsets;
}

__attribute__((weak)) void unscale_and_check_(const std::vector<at::Tensor>& gradients,
                                              const at::Tensor& found_inf,
                                              const at::Tensor& inv_scale) {
  const DenseGradients dense(gradients);
  const DeviceGuard guard(found_inf.device());
  const Stream stream = current_stream();
  const auto* const factor = inv_scale.const_data_ptr<float>();
  auto* const found = found_inf.mutable_data_ptr<float>();
  const std::vector<Stretch> stretches = dense.stretches();
  unscale_dtype<float>(stretches, factor, found, stream);
  unscale_dtype<c10::BFloat16>(stretches, factor, found, stream);
  unscale_dtype<c10::Half>(stretches, factor, found, stream);
  unscale_dtype<double>(stretches, factor, found, stream);
  dense.written();
}

__attribute__((weak)) void summarize_(const std::vector<at::Tensor>& gradients,
                                      const at::Tensor& inv_scale, const at::Tensor& found_inf,
                                      const at::Tensor& sum_of_squares, const at::Tensor& max_abs) {
  const DeviceGuard guard(inv_scale.device());
  const Stream stream = current_stream();
  Stretches memory;
  for (const at::Tensor& gradient : gradients) {
    memory.add(gradient, const_cast<void*>(gradient.const_data_ptr()));
  }
  const std::vector<Stretch>& stretches = memory.all();
  const std::vector<int64_t> offsets = partial_offsets(stretches);
  const int64_t count = offsets.back();
  const at::Tensor memory_of_partials =
      at::empty({count * static_cast<int64_t>(sizeof(GradientPartial))},
                inv_scale.options().dtype(at::kByte));
  auto* const partials = static_cast<GradientPartial*>(memory_of_partials.mutable_data_ptr());
  summarize_dtype<float>(stretches, offsets, partials, stream);
  summarize_dtype<c10::BFloat16>(stretches, offsets, partials, stream);
  summarize_dtype<c10::Half>(stretches, offsets, partials, stream);
  summarize_dtype<double>(stretches, offsets, partials, stream);
  launch<finish_summary_kernel<kFinishThreads>>(
      1, kFinishThreads, stream, static_cast<const GradientPartial*>(partials), count,
      inv_scale.const_data_ptr<float>(),
      SummaryOutputs{found_inf.mutable_data_ptr<float>(), sum_of_squares.mutable_data_ptr<double>(),
                     max_abs.mutable_data_ptr<double>()});
}

/// Returns the device's address of pinned memory, for a kernel that writes it and is launched next
/// on the current stream; null for an undefined tensor. Tells the memory's allocator of the stream:
/// memory that is freed before the kernel is done is given to nobody until then.
template <class Number>
static Number* pinned_place(const at::Tensor& pinned) {
  if (!pinned.defined()) return nullptr;
  const c10::Device device = current_device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto* const place = pinned.mutable_data_ptr<Number>();
  at::getHostAllocator(device.type())
      ->record_event(place, pinned.storage().data_ptr().get_context(), stream);
  return static_cast<Number*>(address_on_device(place));
}

__attribute__((weak)) at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType dtype) {
  const InCaptureToo allowed;
  return at::empty(sizes, at::device(at::kCPU).dtype(dtype).pinned_memory(true));
}

__attribute__((weak)) void update_scale_(const LossScale& rule, const ScaleTensors& tensors,
                                         const at::Tensor& found_inf) {
  const DeviceGuard guard(tensors.scale.device());
  const Stream stream = current_stream();
  launch<update_scale_kernel>(
      1, 1, stream, rule, tensors.scale.mutable_data_ptr<float>(),
      tensors.inverse.mutable_data_ptr<float>(), tensors.growth_tracker.mutable_data_ptr<int32_t>(),
      tensors.hysteresis_left.mutable_data_ptr<int32_t>(), found_inf.const_data_ptr<float>());
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

__attribute__((weak)) void write_letter_(const at::Tensor& scale, const at::Tensor& found_inf,
                                         const at::Tensor& sum_of_squares,
                                         const at::Tensor& max_abs, const at::Tensor& letter) {
  const DeviceGuard guard(scale.device());
  const auto number_of = [](const at::Tensor& number) {
    return number.defined() ? number.const_data_ptr<double>() : nullptr;
  };
  launch<write_letter_kernel>(1, 1, current_stream(), scale.const_data_ptr<float>(),
                              found_inf.const_data_ptr<float>(), number_of(sum_of_squares),
                              number_of(max_abs), pinned_place<double>(letter));
}

/// What all launches of a step have in common.
struct StepTarget {
  Stream stream;
  const StepInputs& inputs;
};

template <class Weights>
static bool keeps_as(const StepRow& row) {
  using optim::WeightStorage;
  return Weights::kIsSplit == (row.storage == WeightStorage::split_master) &&
         Weights::kIsStochastic == (row.storage == WeightStorage::stochastic) &&
         row.parameter_dtype == c10::CppTypeToScalarType<typename Weights::Parameter>::value;
}

/// Launches a step over the rows with one dtype of parameters, one variant and one weight storage,
/// as many at a time as a table holds.
template <class Parameter, class Rule, class Weights = PlainWeights<Parameter>>
static void step_rows(const std::vector<StepRow>& rows,
                      const std::vector<StepGroup<typename Rule::Constants>>& groups, bool variant,
                      const StepTarget& target) {
  using Table = DeviceStepTable<typename Rule::Constants>;
  static_assert(kStepArgumentsFit<Table>);
  Table table(kStepBlock);
  const auto launch_table = [&] {
    if (table.blocks() != 0) {
      launch<optimizer_step_kernel<Parameter, Rule, Weights, Table>>(
          table.blocks(), kStepThreads, target.stream, table, target.inputs);
    }
    table.clear();
  };
  for (const StepRow& row : rows) {
    if (row.variant != variant || !keeps_as<Weights>(row)) continue;
    const auto& group = groups[static_cast<std::size_t>(row.group)];
    if (table.push_back(row, group)) continue;
    launch_table();
    table.push_back(row, group);
  }
  if (!table.empty()) launch_table();
}

/// Steps rows of the dtypes and weight storages for which the CPU has loops too.
template <class Rule>
static void step_all_dtypes(const std::vector<StepRow>& rows,
                            const std::vector<StepGroup<typename Rule::Constants>>& groups,
                            bool variant, const StepTarget& target) {
  using c10::BFloat16;
  using c10::Half;
  step_rows<float, Rule>(rows, groups, variant, target);
  step_rows<double, Rule>(rows, groups, variant, target);
  step_rows<BFloat16, Rule>(rows, groups, variant, target);
  step_rows<BFloat16, Rule, SplitWeights>(rows, groups, variant, target);
  step_rows<BFloat16, Rule, StochasticWeights>(rows, groups, variant, target);
  step_rows<Half, Rule>(rows, groups, variant, target);
}

__attribute__((weak)) void step_adamw8bit_(at::Device device, const AdamW8bitStep& step) {
  if (step.span.count == 0) return;
  const DeviceGuard guard(device);
  const auto launch_kernel = [&]<class Parameter>() {
    launch<adamw8bit_kernel<Parameter>>((step.span.count + kStepBlock - 1) / kStepBlock,
                                        kStepThreads, current_stream(), step, Block8Maps{});
  };
  if (step.parameter_dtype == at::kFloat) {
    launch_kernel.template operator()<float>();
  } else {
    launch_kernel.template operator()<c10::BFloat16>();
  }
}

__attribute__((weak)) uint64_t capture_on(at::Device device) {
  const DeviceGuard guard(device);
  return capture_id();
}

__attribute__((weak)) void count_steps_(at::Device device, const std::vector<float*>& counters,
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

/// `Rule` steps the rows without a variant, `Variants` the others.
template <class Rule, class... Variants>
static void step_by_rule(const std::vector<StepRow>& rows,
                         const std::vector<StepGroup<StepNumbers>>& groups,
                         const StepTarget& target) {
  using Constants = typename Rule::Constants;
  std::vector<StepGroup<Constants>> own;
  for (const StepGroup<StepNumbers>& group : groups) {
    own.push_back({group.constants.as<Constants>(), group.lr, group.seed});
  }
  step_all_dtypes<Rule>(rows, own, /*variant=*/false, target);
  (step_all_dtypes<Variants>(rows, own, /*variant=*/true, target), ...);
}

__attribute__((weak)) void step_(at::Device device, CudaRule rule, const std::vector<StepRow>& rows,
                                 const std::vector<StepGroup<StepNumbers>>& groups,
                                 const StepInputs& inputs) {
  const DeviceGuard guard(device);
  const StepTarget target{current_stream(), inputs};
  switch (rule) {
    case CudaRule::adam:
      return step_by_rule<AdamRule<false>, AdamRule<true>>(rows, groups, target);
    case CudaRule::sgd:
      return step_by_rule<SgdRule<false>, SgdRule<true>>(rows, groups, target);
    case CudaRule::lion:
      return step_by_rule<LionRule>(rows, groups, target);
  }
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
