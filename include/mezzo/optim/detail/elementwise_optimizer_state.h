#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/group_options.h>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

// What an optimizer keeps of its parameters: states, and files, which are libtorch's with
// what libtorch has not under keys of its own.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Null where there is none, or one of libtorch's, which has nothing of what mezzo's adds.
template <class Traits>
auto ElementwiseOptimizer<Traits>::state_of(const at::Tensor& parameter) const -> const State* {
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : dynamic_cast<const State*>(found->second.get());
}

/// Made if there is none.
template <class Traits>
auto ElementwiseOptimizer<Traits>::state_for(const at::Tensor& parameter) -> State& {
  return own_state<State>(state_[parameter.unsafeGetTensorImpl()], parameter, words());
}

/// Null if there is none. What is kept may be another optimizer's, or another model's.
template <class Traits>
auto ElementwiseOptimizer<Traits>::checked_state(const at::Tensor& parameter,
                                                 const Options& options) -> State* {
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found == state_.end()) return nullptr;
  auto& slot = found->second;
  const bool is_own = slot != nullptr && typeid(*slot) == typeid(State);  // and no cast is needed
  State& state = is_own ? static_cast<State&>(*slot) : own_state<State>(slot, parameter, words());
  state.count().check();
  check_shape_of(state.master(), "a master", parameter, words());
  for (int k = 0; k < Traits::moments(options); ++k) {
    check_shape_of(Traits::moment(state, k), "a moment", parameter, words());
  }
  return &state;
}

/// The k-th moment, in memory laid out as the parameter's: made when there is none yet, and
/// converted when it was loaded from elsewhere.
template <class Traits>
at::Tensor& ElementwiseOptimizer<Traits>::fitting_moment(const One& one, int k,
                                                         const at::Tensor& parameter) {
  at::Tensor& moment = Traits::moment(*one.state, k);
  const at::ScalarType dtype = moment_dtype(parameter, one.storage);
  const bool is_as_kept =
      moment.defined() && moment.scalar_type() == dtype && moment.device() == parameter.device();
  if (!is_as_kept) check_is_warm(parameter.device(), "a moment");
  if (!moment.defined()) {
    moment = at::zeros_like(parameter, parameter.options().dtype(dtype).requires_grad(false),
                            at::MemoryFormat::Preserve);
    return moment;
  }
  if (!is_as_kept) moment = moment.to(parameter.device(), dtype);
  if (!is_plain(moment) || !same_layout(parameter, moment)) {
    moment = in_layout_of(parameter, moment);
  }
  return moment;
}

/// Groups and states as a file has them, until all of it is read.
class ReadOptimizer final : public torch::optim::Optimizer {
 public:
  ReadOptimizer() : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, nullptr) {}
  at::Tensor step(LossClosure /*closure*/) override { return {}; }
};

template <class Traits>
void ElementwiseOptimizer<Traits>::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    check_options(options_of(group));
  }
  std::vector<State*> lent;  // a file has the whole of split weights, as if they were not split
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      auto* const state = dynamic_cast<State*>(found->second.get());
      if (state == nullptr || !state->lower_half().defined() || state->master().defined()) continue;
      state->master(trained_value(parameter, *state));
      lent.push_back(state);
    }
  }
  // Serialised as the base classes, since a group's options or a state may be plain libtorch's.
  torch::optim::serialize<torch::optim::OptimizerParamState, torch::optim::OptimizerOptions>(
      archive, *this);
  for (State* state : lent) state->master(at::Tensor());
  archive.write("applied_steps", c10::IValue(applied_steps()));
}

/// All or nothing: the optimizer is then what the file says, without states that the file lacks.
template <class Traits>
void ElementwiseOptimizer<Traits>::load(torch::serialize::InputArchive& archive) {
  c10::IValue version;
  TORCH_CHECK(archive.try_read("pytorch_version", version), Traits::kName,
              ": the archive holds no optimizer's state, or that of a libtorch before 1.5; load "
              "what torch::save(optimizer, path) wrote");
  const NoGraphGuard no_graph;
  ReadOptimizer read;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    read.param_groups().emplace_back(param_groups_[group].params(),
                                     std::make_unique<Options>(options_of(group)));
  }
  torch::optim::serialize<State, Options>(archive, read);
  const auto read_options = [&read](std::size_t group) -> Options& {
    return static_cast<Options&>(read.param_groups()[group].options());
  };
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    read_options(group).keep_unread(options_of(group));
    check_options(read_options(group));
  }
  applied_count().set(read_applied_steps(archive, read));
  state_ = std::move(read.state());
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    set_group_options(param_groups_[group], read_options(group), *defaults_);
  }
}

/// libtorch's files hold no such count: it is the largest step of any parameter.
template <class Traits>
int64_t ElementwiseOptimizer<Traits>::read_applied_steps(torch::serialize::InputArchive& archive,
                                                         const Optimizer& read) {
  c10::IValue saved;
  if (archive.try_read("applied_steps", saved)) return saved.toInt();
  int64_t applied = 0;
  for (const auto& [parameter, state] : read.state()) {
    applied = std::max(applied, static_cast<const State&>(*state).step());
  }
  return applied;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
