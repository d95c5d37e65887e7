#pragma once

#ifndef MEZZO_WITH_CUDA
#error "mezzo's CUDA kernels come with the target mezzo::cuda, which defines MEZZO_WITH_CUDA"
#endif

#include <mezzo/base/detail/system.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// The functions of mezzo/kernels/cuda/mezzo_cuda.cu that host code calls. That file is the source
// of the target mezzo::cuda, which is linked into each program and shared library. The functions
// have hidden visibility, so that a shared library calls its own. The definitions are weak, since
// two static libraries of one program may both contain them. The declarations must not be weak: the
// linker would then leave the definitions in their archive, and calls would go to null. All
// functions run on the current stream of their tensors' device, and none waits.
#define MEZZO_CUDA_LAUNCHER MEZZO_HIDDEN

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

struct LossScale;
struct Verdict;

namespace detail {

// Callers include the headers of the arguments (step_use.h, launch_table.h).
struct AdamW8bitStep;
enum class CudaRule : std::uint8_t;
struct ScaleTensors;
struct Stretch;
struct StepInputs;
struct StepRow;
struct StepGroup;

}  // namespace detail

namespace detail::cuda {

/// Multiplies gradients (on one device, of any floating dtypes) by `inv_scale` in place and sets
/// `found_inf` to 1 if a product is inf or NaN; both are floats of one element on that device.
MEZZO_CUDA_LAUNCHER void unscale_and_check_(const std::vector<Stretch>& gradients,
                                            const at::Tensor& found_inf,
                                            const at::Tensor& inv_scale);

/// Summarises gradients (on one device, of any floating dtypes) times the verdict's inv_scale into
/// its other numbers, a float and two doubles on that device. Two launches for one dtype, and one
/// more for every 300 stretches beyond the first 300; gradients next to each other in one buffer
/// are one stretch.
MEZZO_CUDA_LAUNCHER void summarize_(const std::vector<Stretch>& gradients, const Verdict& verdict);

/// LossScale::next on the device, in one launch; found_inf is a float of one element there.
MEZZO_CUDA_LAUNCHER void update_scale_(const LossScale& rule, const ScaleTensors& tensors,
                                       const at::Tensor& found_inf);

/// Takes one step of a rule over parameters of one device. One launch for each combination of
/// parameters' dtype, variant and weight storage, and one more for every 300 parameters or 8 groups
/// beyond the first. `groups[row.group]` has a row's numbers and the rule's constants; all pointers
/// are of the device. Does not change step counts.
MEZZO_CUDA_LAUNCHER void step_(at::Device device, CudaRule rule, const std::vector<StepRow>& rows,
                               const std::vector<StepGroup>& groups, const StepInputs& inputs);

/// Takes the steps of an AdamW8bit's parameters of one device. One launch for each dtype, and one
/// more for every 150 parameters beyond the first.
MEZZO_CUDA_LAUNCHER void step_adamw8bit_(at::Device device,
                                         const std::vector<AdamW8bitStep>& steps);

/// Writes four tensors of one element into `letter`, four doubles in pinned memory, in one launch.
/// `scale` and `found_inf` are floats, the other two doubles or undefined, for which 0 is written.
/// The host may read `letter` once an event that is recorded after this call has come. `address` is
/// null in a letter's first call and keeps its address on the device for the next.
MEZZO_CUDA_LAUNCHER void write_letter_(const at::Tensor& scale, const at::Tensor& found_inf,
                                       const at::Tensor& sum_of_squares, const at::Tensor& max_abs,
                                       const at::Tensor& letter, void*& address);

/// Adds 1 to each counter, unless `found_inf` points to a value other than 0 (null means 0). One
/// launch for each 480 counters.
MEZZO_CUDA_LAUNCHER void count_steps_(at::Device device, const std::vector<float*>& counters,
                                      const float* found_inf);

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#undef MEZZO_CUDA_LAUNCHER
