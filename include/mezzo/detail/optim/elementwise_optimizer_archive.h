#pragma once

#include <mezzo/detail/optim/elementwise_optimizer.h>
#include <mezzo/version.h>

#include <torch/optim/serialize.h>

// The files of an optimizer, which are libtorch's with what libtorch has not under keys of its own.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Traits>
void ElementwiseOptimizer<Traits>::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  std::vector<State*> lent;  // a file has the whole of split weights, as if they were not split
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      State& state = static_cast<State&>(*found->second);
      if (!state.lower_half().defined() || state.master().defined()) continue;
      state.master(trained_value(parameter, state));
      lent.push_back(&state);
    }
  }
  torch::optim::serialize<State, Options>(archive, *this);
  for (State* state : lent) state->master(at::Tensor());
  archive.write("applied_steps", c10::IValue(applied_steps()));
}

/// All or nothing: the optimizer is then what the file says, without states that the file lacks.
template <class Traits>
void ElementwiseOptimizer<Traits>::load(torch::serialize::InputArchive& archive) {
  std::vector<Options> options;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    options.push_back(options_of(group));
  }
  auto states = std::exchange(state_, {});
  try {
    const int64_t applied = read_archive(archive);
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      static_cast<Options&>(param_groups_[group].options()).keep_unread(options[group]);
      check_options(options_of(group));
    }
    applied_count().set(applied);
  } catch (...) {
    state_ = std::move(states);
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      static_cast<Options&>(param_groups_[group].options()) = options[group];
    }
    throw;
  }
}

/// States and options; the number of applied steps.
template <class Traits>
int64_t ElementwiseOptimizer<Traits>::read_archive(torch::serialize::InputArchive& archive) {
  c10::IValue version;
  TORCH_CHECK(archive.try_read("pytorch_version", version), Traits::kName,
              ": the archive holds no optimizer's state, or that of a libtorch before 1.5; save "
              "it with torch::save(optimizer, path)");
  torch::optim::serialize<State, Options>(archive, *this);
  c10::IValue saved;
  if (archive.try_read("applied_steps", saved)) return saved.toInt();
  int64_t applied = 0;  // libtorch's file: a parameter that had a gradient in each step knows
  for (const auto& [parameter, state] : state_) {
    applied = std::max(applied, static_cast<const State&>(*state).step());
  }
  return applied;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
