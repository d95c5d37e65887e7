#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/kernels/step_args.h>
#include <mezzo/optim/detail/applied_steps.h>
#include <mezzo/optim/detail/optimizer_description.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

// FusedParamStateBase: the state of one parameter from step to step, namely its weights in more
// bits than the model has, its moments and its count of steps.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- Weights beside the parameter --------------------------------------------------------------

/// The value of a parameter in more bits than the parameter has.
struct MasterState {
  /// With WeightStorage::fp32_master, and in a MasterWeights: the float tensor that the parameter
  /// is rounded from.
  at::Tensor master{};
  /// With WeightStorage::split_master, int16: see combine_low_bits.
  at::Tensor low_bits{};
  /// The version of a master that a caller has been given, after mezzo's last write to it: with
  /// another version the caller has written it.
  std::optional<int64_t> exposed_version{};

  /// Prepares the master to be given to a caller, with the parameter's gradient as its own until
  /// the next step.
  void show(const at::Tensor& parameter) {
    master.mutable_grad() = parameter.grad();
    exposed_version = master._version();
  }
  /// Called after a step has written the master or has been skipped.
  void end_step() {
    if (!master.defined()) return;
    if (master.grad().defined()) master.mutable_grad() = at::Tensor();
    if (exposed_version) exposed_version = master._version();
  }
};

// A float's bits as a bfloat16 and the rest; see weight_formats.h.
inline at::Tensor get_high_bits(const at::Tensor& floats) {
  return floats.view(at::kInt).add(0x8000).bitwise_right_shift(16).to(at::kShort);
}
inline at::Tensor get_low_bits(const at::Tensor& floats) {
  return floats.view(at::kInt).to(at::kShort);
}
inline at::Tensor combine_with_low_bits(const at::Tensor& parameter, const at::Tensor& low_bits) {
  const at::Tensor high = parameter.detach().view(at::kShort).to(at::kInt);
  const at::Tensor magnitude = high.bitwise_and(0x7FFF);
  const at::Tensor bits = low_bits.to(parameter.device(), at::kInt);
  const at::Tensor is_stale = magnitude.eq(0)
                                  .logical_and(bits.lt(0))
                                  .logical_or(magnitude.eq(0x7F80).logical_and(bits.gt(0)));
  return high.bitwise_left_shift(16).add(bits.masked_fill(is_stale, 0)).view(at::kFloat);
}

/// Returns, element by element, whether a step would have rounded `master` to the 16-bit
/// `parameter`, whichever way it breaks ties.
inline at::Tensor is_rounded_from(const at::Tensor& master, const at::Tensor& parameter) {
  const at::Tensor value = parameter.detach();
  at::Tensor is_nearest = master.to(value.scalar_type()).eq(value);
  if (value.scalar_type() != at::kBFloat16) return is_nearest;
  return is_nearest.logical_or(get_high_bits(master).eq(value.view(at::kShort)));
}

/// Returns the storage of `parameter`: the one that its group's options want, if it has 16 bits.
/// \throws c10::Error where the storage is for bfloat16 and the parameter is of half
inline optim::WeightStorage select_weight_storage(const at::Tensor& parameter,
                                                  optim::WeightStorage wanted,
                                                  const OptimizerDescription& optimizer) {
  using optim::WeightStorage;
  const at::ScalarType dtype = parameter.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return WeightStorage::plain;
  const bool is_for_bfloat16 =
      wanted == WeightStorage::split_master || wanted == WeightStorage::stochastic_rounding;
  TORCH_CHECK(dtype == at::kBFloat16 || !is_for_bfloat16, optimizer, ": WeightStorage::",
              wanted == WeightStorage::stochastic_rounding ? "stochastic_rounding" : "split_master",
              " takes parameters of bfloat16, not ", optimizer.describe(parameter),
              "; use WeightStorage::fp32_master for a float16 model");
  if (wanted == WeightStorage::plain) {
    warn_rounded_weights(parameter, optimizer,
                         "WeightStorage::fp32_master, or stochastic_rounding for bfloat16");
  }
  return wanted;
}

/// Returns the dtype of moments.
inline at::ScalarType moment_dtype(const at::Tensor& parameter, optim::WeightStorage storage) {
  const bool has_floats =
      storage == optim::WeightStorage::fp32_master || storage == optim::WeightStorage::split_master;
  return has_floats ? accum_dtype(parameter) : parameter.scalar_type();
}

/// \throws c10::Error where `master_state`, which may come from a file, is of another model
inline void check_state_shape(const at::Tensor& master_state, const char* what,
                              const at::Tensor& parameter, const OptimizerDescription& optimizer) {
  TORCH_CHECK(!master_state.defined() || master_state.sizes() == parameter.sizes(), optimizer,
              ": the state of ", optimizer.describe(parameter), " has ", what, " of the shape ",
              master_state.sizes(),
              "; it is another model's, or older than a resize of the parameter: load the model's "
              "own file, or begin anew with "
              "optimizer.state().erase(parameter.unsafeGetTensorImpl())");
}

/// Makes the master, if there is none, and brings it to where the parameter is. A caller who has
/// written the master since it was shown has written the parameter too.
inline void prepare_master(const at::Tensor& parameter, MasterState& master_state) {
  const at::Tensor before = master_state.master;
  if (!before.defined()) {
    check_not_capturing(parameter.device(), "a float master");
    master_state.master = parameter.detach().to(at::kFloat);
  } else if (master_state.exposed_version && *master_state.exposed_version != before._version()) {
    parameter.detach().copy_(before);
    clear_autocast_cache();
    master_state.exposed_version = before._version();
  }
  master_state.master =
      with_strides_of(parameter, master_state.master.to(parameter.device(), at::kFloat));
  if (!master_state.master.is_same(before)) master_state.exposed_version.reset();
}

/// Makes the parameter's value the master at elements where the parameter does not have the bits
/// that the master rounds to: somebody has written the parameter. mezzo's loops do so by
/// themselves. Writes in place: a caller may hold the master.
inline void update_master_from_param(const at::Tensor& parameter, MasterState& master_state) {
  const at::Tensor value = parameter.detach();
  const at::Tensor rounded = master_state.master.to(value.scalar_type());
  const at::Tensor is_rounded = rounded.view(at::kShort).eq(value.view(at::kShort));
  master_state.master.copy_(at::where(is_rounded, master_state.master, value.to(at::kFloat)));
  if (master_state.exposed_version) master_state.exposed_version = master_state.master._version();
}

/// Makes the lower half: from the master if a file has brought one, otherwise of zeros. Whether the
/// parameter has been written since does not show: what is left below is less than a digit.
inline void prepare_low_bits(const at::Tensor& parameter, MasterState& master_state) {
  if (master_state.master.defined()) {
    check_not_capturing(parameter.device(), "the low bits of weights");
    const at::Tensor master = master_state.master.to(parameter.device(), at::kFloat);
    const at::Tensor is_current = is_rounded_from(master, parameter);
    const at::Tensor high_bits = parameter.detach().view(at::kShort);
    high_bits.copy_(at::where(is_current, get_high_bits(master), high_bits));  // ties may differ
    clear_autocast_cache();
    master_state.low_bits = get_low_bits(master).masked_fill(is_current.logical_not(), 0);
    master_state.master = at::Tensor();
  } else if (!master_state.low_bits.defined() ||
             master_state.low_bits.sizes() != parameter.sizes()) {
    check_not_capturing(parameter.device(), "the low bits of weights");
    master_state.low_bits =
        at::zeros_like(parameter, parameter.options().dtype(at::kShort).requires_grad(false),
                       at::MemoryFormat::Preserve);
  }
  master_state.low_bits = with_strides_of(parameter, master_state.low_bits.to(parameter.device()));
}

// --- Slots and states --------------------------------------------------------------------------

/// Everything that a step reads and writes for one parameter beside the parameter and its gradient.
/// Users and files see it as a state class of libtorch's kind.
class FusedParamStateBase : public MasterState {
 public:
  FusedParamStateBase() = default;
  /// Copies all but the owner: a copy may be another parameter's.
  FusedParamStateBase(const FusedParamStateBase& other) : MasterState(other) {}
  FusedParamStateBase& operator=(const FusedParamStateBase& other) {
    MasterState::operator=(other);
    return *this;
  }
  virtual ~FusedParamStateBase() = default;

  /// Returns the k-th moment; the last one where there are fewer.
  virtual at::Tensor& moment(int k) noexcept = 0;
  /// Returns the number of steps applied to the parameter.
  virtual StepCount step_count() noexcept = 0;
  /// The parameter, once a step has found this fused_state. libtorch finds a state by the address
  /// of its parameter, which no other tensor gets while this reference lives.
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> owner{};
};

/// Returns a copy of the state of `weights` as files have it: with a whole master in place of a
/// split one. Weights that have another dtype or shape by now are their own master.
inline std::unique_ptr<torch::optim::OptimizerParamState> serialized_state(
    const at::Tensor& weights, const torch::optim::OptimizerParamState& state) {
  auto serialized = state.clone();
  auto* const fused_state = dynamic_cast<FusedParamStateBase*>(serialized.get());
  if (fused_state == nullptr || !fused_state->low_bits.defined()) return serialized;
  const at::Tensor low_bits = std::exchange(fused_state->low_bits, at::Tensor());
  if (fused_state->master.defined()) return serialized;
  const bool fits = weights.scalar_type() == at::kBFloat16 && low_bits.sizes() == weights.sizes();
  fused_state->master = fits ? combine_with_low_bits(weights, low_bits)
                             : weights.detach().to(accum_dtype(weights), /*non_blocking=*/false,
                                                   /*copy=*/true);
  return serialized;
}

/// A state of libtorch's with the count of steps that it lacks.
template <class Base = torch::optim::OptimizerParamState>
class CountedState : public Base {
  TORCH_ARG(int64_t, step) = 0;
};

/// A fused_state as a state class of libtorch's kind. `Base` is libtorch's class, where there is
/// one, with the moments and the host's count of steps. `Derived` adds `moment(k)`, and `kMoments`,
/// the moments' keys in a file.
template <class Derived, class Base>
class FusedParamState : public Base, public FusedParamStateBase {
 public:
  /// Returns how many steps were applied; waits for the parameter's device.
  int64_t step() const { return read_step_count(Base::step(), device_count_.tensor); }
  /// Sets the count. Where a device counts it is written there, without waiting, and captured
  /// graphs go on from it.
  Derived& step(int64_t step) {
    step_count().overwrite(step);
    return derived();
  }

  /// Returns the float tensor that the parameter is rounded from, with WeightStorage::fp32_master.
  const at::Tensor& master() const noexcept { return MasterState::master; }
  at::Tensor& master() noexcept { return MasterState::master; }
  Derived& master(at::Tensor master) {
    MasterState::master = std::move(master);
    return derived();
  }

  /// Returns the bits that the parameter lacks, as int16, with WeightStorage::split_master.
  at::Tensor& low_bits() noexcept { return MasterState::low_bits; }

  StepCount step_count() noexcept override { return {Base::step(), device_count_.tensor}; }

  /// Returns a copy of the whole state; libtorch's clone would copy only its own part.
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<Derived>(derived());
  }

  void serialize(torch::serialize::InputArchive& archive) override {
    for (const auto& [key, tensor] : tensors()) {
      c10::IValue value;
      *tensor = archive.try_read(key, value) ? value.toTensor() : at::Tensor();
    }
    c10::IValue count;
    step(archive.try_read("step", count) ? count.toInt() : derived().step_without_count());
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step()));
    for (const auto& [key, tensor] : tensors()) {
      if (tensor->defined()) archive.write(key, c10::IValue(*tensor));
    }
  }

  /// Returns all tensors with their keys in files, which hold no lower half.
  std::vector<std::pair<const char*, at::Tensor*>> tensors() const {
    auto& self = const_cast<FusedParamState&>(*this);
    std::vector<std::pair<const char*, at::Tensor*>> all{{"master", &self.master()},
                                                         {"low_bits", &self.low_bits()}};
    for (int k = 0; k < static_cast<int>(Derived::kMoments.size()); ++k) {
      all.emplace_back(Derived::kMoments[static_cast<std::size_t>(k)], &self.moment(k));
    }
    return all;
  }

 protected:
  /// \throws c10::Error: only a file of libtorch's SGD lacks the count
  int64_t step_without_count() const {
    TORCH_CHECK(
        false,
        "The archive of an optimizer lacks \"step\"; it is that of another class of optimizer, or "
        "damaged: load the file of an optimizer of the same class");
  }

 private:
  Derived& derived() { return static_cast<Derived&>(*this); }
  const Derived& derived() const { return static_cast<const Derived&>(*this); }

  DeviceStepCount device_count_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
