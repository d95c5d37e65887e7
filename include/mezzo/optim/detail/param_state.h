#pragma once

#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/step_count.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <tuple>
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
  friend bool operator==(const ParamState& left, const ParamState& right) {
    return left.step() == right.step() && tensors(left.own()) == tensors(right.own()) &&
           is_same(left.lower_half_, right.lower_half_);
  }

  /// A copy with all that is here; libtorch's clone would keep only its own part.
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<Own>(own());
  }

  void serialize(torch::serialize::InputArchive& archive) override {
    std::apply(
        [&](const auto&... tensor) {
          (read_tensor_if_there(archive, tensor.key, tensor.value), ...);
        },
        tensors(own()));
    c10::IValue count;
    step(archive.try_read("step", count) ? count.toInt() : own().step_without_count());
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step()));
    std::apply(
        [&](const auto&... tensor) {
          (write_tensor_if_defined(archive, tensor.key, tensor.value), ...);
        },
        tensors(own()));
  }

 protected:
  /// Of a file that has none, as one of libtorch's SGD.
  int64_t step_without_count() const {
    TORCH_CHECK(
        false,
        "The archive of an optimizer lacks \"step\"; it is that of another class of optimizer, or "
        "damaged: load the file of an optimizer of the same class");
  }

 private:
  Own& own() { return static_cast<Own&>(*this); }
  const Own& own() const { return static_cast<const Own&>(*this); }

  /// What a file has: the moments, and what is kept of weights.
  template <class Self>
  static auto tensors(Self& self) {
    return std::tuple_cat(MemberTable::of(self), std::tuple{member("master", self.master())});
  }

  DeviceCount device_count_;
  at::Tensor lower_half_;
  WriteStamp stamp_;
};

/// The state in `slot` as mezzo's: made where there is none, and taken over from one of libtorch's,
/// as whoever copies the states of a `torch::optim` optimizer leaves there.
template <class State>
State& own_state(std::unique_ptr<torch::optim::OptimizerParamState>& slot,
                 const at::Tensor& parameter, const OptimizerWords& optimizer) {
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
  TORCH_CHECK(false, optimizer, ": the state of ", optimizer.parameter(parameter),
              " is not a mezzo::optim::", optimizer,
              "ParamState; copy states only between optimizers of the same class");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
