#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/optim/detail/dense_memory.h>
#include <mezzo/optim/detail/kept_weights.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/trained_once.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

// Who takes part in a step, and whether it can be done: all is checked before anything is written.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A parameter with a gradient.
template <class Traits>
struct Participant {
  const at::Tensor* parameter;
  at::Tensor gradient;
  const typename Traits::Options* options;
  optim::WeightStorage storage;
  typename Traits::Loop run;
  typename Traits::State* state;  ///< null where nothing is remembered, or nothing yet
  uint64_t number;                ///< in the optimizer
  bool begins = false;            ///< what the state counts begins anew with this step
};

/// A parameter without a gradient, whose average follows it nevertheless.
struct Bystander {
  const at::Tensor* parameter;
  double ema_decay;  ///< 0 where the average that there was goes
  optim::WeightStorage storage;
};

template <class Traits>
struct DeviceParticipants {
  at::Device device;
  std::vector<Participant<Traits>> participants;
};

/// Whether anything is remembered of a parameter: of one that is rounded stochastically at least
/// how many steps there were, for each has random bits of its own.
template <class Traits>
bool keeps_state(const typename Traits::Options& options, optim::WeightStorage storage) {
  return Traits::has_state(options) || options.ema_decay() != 0 ||
         storage != optim::WeightStorage::plain;
}

inline void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient,
                           const OptimizerWords& optimizer) {
  TORCH_CHECK(!parameter.is_inference() || c10::InferenceMode::is_enabled(), optimizer, ": ",
              optimizer.parameter(parameter),
              " was made under c10::InferenceMode, outside of which it cannot be written; make or "
              "load the model outside of it, or step inside of it");
  TORCH_CHECK(gradient.layout() == at::kStrided && parameter.layout() == at::kStrided, optimizer,
              " takes dense parameters and gradients, and the gradient of ",
              optimizer.parameter(parameter), " is ", tensor_words(gradient),
              "; give this parameter to a torch::optim::SGD of its own, which takes sparse ones, "
              "or make the embedding with sparse(false)");
  TORCH_CHECK(gradient.device() == parameter.device() && gradient.sizes() == parameter.sizes(),
              optimizer, ": ", optimizer.parameter(parameter), " has a gradient that is ",
              tensor_words(gradient),
              "; call zero_grad() after the model was moved or resized, and backward() after that");
  TORCH_CHECK(at::has_internal_overlap(parameter) != at::MemOverlap::Yes, optimizer,
              ": several elements of ", optimizer.parameter(parameter),
              " are the same memory, as expand() makes them; give the tensor that was expanded");
}

/// The CPU's loop for what is kept of a parameter; other devices have the same.
template <class Traits>
typename Traits::Loop checked_loop(const typename Traits::Options& options,
                                   optim::WeightStorage storage, const at::Tensor& parameter,
                                   const at::Tensor& gradient, const OptimizerWords& optimizer) {
  check_gradient(parameter, gradient, optimizer);
  const at::ScalarType own = parameter.scalar_type();
  const auto kept = storage == optim::WeightStorage::master ? at::kFloat : own;
  const auto run = Traits::loop(options, storage, kept, gradient.scalar_type(), best_isa());
  TORCH_CHECK(run, optimizer, ": ", optimizer.parameter(parameter), " has a gradient of ",
              dtype_name(gradient.scalar_type()), "; parameters are of float32, float64, bfloat16 ",
              "or float16, and gradients of the same dtype, for float32 also of bfloat16 or ",
              "float16, and for float64 of float32: cast the model before its optimizer is made");
  return run;
}

/// Makes `device`'s entry the last.
template <class Traits>
void select_device(std::vector<DeviceParticipants<Traits>>& all, at::Device device) {
  for (DeviceParticipants<Traits>& one : all) {
    if (one.device != device) continue;
    std::swap(one, all.back());
    return;
  }
  all.push_back({device, {}});
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
