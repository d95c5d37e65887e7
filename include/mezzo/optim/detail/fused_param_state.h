#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/applied_steps.h>
#include <mezzo/optim/detail/master_state.h>

#include <ATen/core/Tensor.h>
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

// The state of one parameter of a fused optimizer: its master, moments and step count.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What a step reads and writes for one parameter apart from the parameter and its gradient.
/// FusedParamState adds torch's interface.
class FusedParamStateBase : public MasterState {
 public:
  FusedParamStateBase() = default;
  /// Copies all but `weak_param`.
  FusedParamStateBase(const FusedParamStateBase& other) : MasterState(other) {}
  FusedParamStateBase& operator=(const FusedParamStateBase& other) {
    MasterState::operator=(other);
    return *this;
  }
  virtual ~FusedParamStateBase() = default;

  /// Returns the k-th moment, or the last one for larger k.
  virtual at::Tensor& moment(int k) noexcept = 0;
  /// Returns the number of steps applied to the parameter.
  virtual StepCountRef step_count() noexcept = 0;
  /// Weak reference to the parameter, set by the first step. torch finds a state by its parameter's
  /// address, which this reference keeps from being reused.
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> weak_param{};
};

/// Returns a copy of a state as archives hold it: with a float32 master instead of low bits. For a
/// parameter that has changed its dtype or shape the master is the parameter's value.
inline std::unique_ptr<torch::optim::OptimizerParamState> serialized_state(
    const at::Tensor& parameter, const torch::optim::OptimizerParamState& state) {
  auto serialized = state.clone();
  auto* const fused_state = dynamic_cast<FusedParamStateBase*>(serialized.get());
  if (fused_state == nullptr || !fused_state->low_bits.defined()) return serialized;
  const at::Tensor low_bits = std::exchange(fused_state->low_bits, at::Tensor());
  if (fused_state->master.defined()) return serialized;
  const bool matches =
      parameter.scalar_type() == at::kBFloat16 && low_bits.sizes() == parameter.sizes();
  fused_state->master = matches ? combine_with_low_bits(parameter, low_bits)
                                : parameter.detach().to(accum_dtype(parameter),
                                                        /*non_blocking=*/false, /*copy=*/true);
  return serialized;
}

/// A torch state class with an added `step`.
template <class Base = torch::optim::OptimizerParamState>
class StateWithStep : public Base {
  TORCH_ARG(int64_t, step) = 0;
};

/// A fused state with the interface of torch's state classes (CRTP). `Base` is torch's class, with
/// the moments and `step`. `Derived` has `moment(k)` and `kMoments`, the moments' keys in archives.
template <class Derived, class Base>
class FusedParamState : public Base, public FusedParamStateBase {
 public:
  /// Returns the number of applied steps. Synchronizes if a device counts.
  int64_t step() const { return read_step_count(Base::step(), device_count_.tensor); }
  /// Sets the number of applied steps. Writes to the device without synchronizing if a device
  /// counts, and captured graphs follow.
  Derived& step(int64_t step) {
    step_count().set_in_place(step);
    return derived();
  }

  /// Returns the float32 master (WeightStorage::fp32_master).
  const at::Tensor& master() const noexcept { return MasterState::master; }
  at::Tensor& master() noexcept { return MasterState::master; }
  Derived& master(at::Tensor master) {
    MasterState::master = std::move(master);
    return derived();
  }

  /// Returns the int16 low bits of the float32 value (WeightStorage::split_master).
  at::Tensor& low_bits() noexcept { return MasterState::low_bits; }

  StepCountRef step_count() noexcept override { return {Base::step(), device_count_.tensor}; }

  /// Returns a copy of all members, not only those of `Base`.
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<Derived>(derived());
  }

  void serialize(torch::serialize::InputArchive& archive) override {
    for (const auto& [key, tensor] : tensors()) {
      c10::IValue value;
      *tensor = archive.try_read(key, value) ? value.toTensor() : at::Tensor();
    }
    c10::IValue count;
    step(archive.try_read("step", count) ? count.toInt() : derived().default_step());
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step()));
    for (const auto& [key, tensor] : tensors()) {
      if (tensor->defined()) archive.write(key, c10::IValue(*tensor));
    }
  }

  /// Returns all tensors with their archive keys.
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
  /// \throws c10::Error. SGD hides it, since torch's SGD archives have no `step`
  int64_t default_step() const {
    TORCH_CHECK(
        false,
        "The archive of an optimizer lacks \"step\"; it is that of another class of optimizer, or "
        "corrupt: load the archive of an optimizer of the same class");
  }

 private:
  Derived& derived() { return static_cast<Derived&>(*this); }
  const Derived& derived() const { return static_cast<const Derived&>(*this); }

  DeviceStepCount device_count_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
