#pragma once

#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/archive_keys.h>
#include <mezzo/optim/detail/step_count.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A state of libtorch's with the count of steps that it lacks.
template <class Base = torch::optim::OptimizerParamState>
class CountedState : public Base {
  TORCH_ARG(int64_t, step) = 0;
};

/// What every optimizer of mezzo's may keep of a parameter, beside what lies in `Base`: libtorch's
/// state of that optimizer, where there is one, with the host's count of steps.
template <class Own, class Base>
class ParamState : public Base {
  /// With WeightStorage::master the float that the parameter is rounded from.
  TORCH_ARG(at::Tensor, master);
  /// With ema_decay: the weights' average.
  TORCH_ARG(at::Tensor, ema);

 public:
  using LibtorchState = Base;

  ParamState() = default;
  explicit ParamState(const Base& state) : Base(state) {}

  /// How many steps were applied; waits for the parameter's device.
  int64_t step() const { return steps_counted(Base::step(), device_count_.tensor()); }
  /// Where a device counts it is written there, without waiting, and captured graphs go on from it.
  Own& step(int64_t step) {
    count().overwrite(step);
    return static_cast<Own&>(*this);
  }

  StepCount count() noexcept { return {Base::step(), device_count_.tensor()}; }
  /// With WeightStorage::split_master, int16: see join_halves.
  at::Tensor& lower_half() noexcept { return lower_half_; }
  /// Of the parameter, when `master` or `lower_half` last agreed with it.
  WriteStamp& stamp() noexcept { return stamp_; }

  /// Waits for devices that count steps.
  /// \throws c10::Error, as libtorch's does, if a moment is undefined
  friend bool operator==(const ParamState& left,
                         const ParamState& right) requires std::equality_comparable<Base> {
    const auto is_same = [](const at::Tensor& a, const at::Tensor& b) {
      return a.defined() == b.defined() && (!a.defined() || a.equal(b));
    };
    const Base left_base = left.with_count();
    const Base right_base = right.with_count();
    return left_base == right_base && left_base.step() == right_base.step() &&
           is_same(left.master_, right.master_) && is_same(left.ema_, right.ema_) &&
           is_same(left.lower_half_, right.lower_half_);
  }

  /// A copy with all that is here; libtorch's clone would keep only its own part.
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<Own>(static_cast<const Own&>(*this));
  }

 protected:
  void read_kept(torch::serialize::InputArchive& archive) {
    read_tensor_if_there(archive, "master", master_);
    read_tensor_if_there(archive, "ema", ema_);
  }
  void write_kept(torch::serialize::OutputArchive& archive) const {
    write_tensor_if_defined(archive, "master", master_);
    write_tensor_if_defined(archive, "ema", ema_);
  }

 private:
  /// libtorch's part, with the count where a device has it.
  Base with_count() const {
    Base base(static_cast<const Base&>(*this));
    base.step(step());
    return base;
  }

  DeviceCount device_count_;
  at::Tensor lower_half_;
  WriteStamp stamp_;
};

/// The state in `slot` as mezzo's: made where there is none, and taken over from one of libtorch's,
/// as whoever copies the states of a `torch::optim` optimizer leaves there.
template <class State>
State& own_state(std::unique_ptr<torch::optim::OptimizerParamState>& slot, const char* optimizer) {
  using Plain = typename State::LibtorchState;
  if (!slot) slot = std::make_unique<State>();
  if (auto* const own = dynamic_cast<State*>(slot.get())) return *own;
  if constexpr (std::constructible_from<State, const Plain&>) {
    if (const auto* const plain = dynamic_cast<const Plain*>(slot.get())) {
      auto own = std::make_unique<State>(*plain);
      State& taken = *own;
      slot = std::move(own);
      return taken;
    }
  }
  TORCH_CHECK(false, optimizer, ": the state of a parameter is not a mezzo::optim::", optimizer,
              "ParamState; copy states between optimizers of the same kind alone");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
