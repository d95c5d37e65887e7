#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/detail/optimizer_shell.h>
#include <mezzo/optim/detail/param_slot.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// The files of a sharded optimizer: those of the optimizer that it shards. To write one, the ranks'
// slices are put together bucket by bucket; to read one, each rank cuts its slices out of it.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kShardRankKey = "mezzo_shard_rank";
inline constexpr const char* kShardCountKey = "mezzo_shard_count";
inline constexpr const char* kShardKey = "mezzo_shard";
inline constexpr const char* kShardAppliedKey = "mezzo_shard_applied_steps";

/// For a file, which has the whole of split weights.
template <class State>
at::Tensor filed_master(const at::Tensor& weights, State& state) {
  const bool is_split = state.lower_half().defined() && !state.master().defined();
  return is_split ? trained_value(weights, state) : state.master();
}

/// What the ranks know of the states together: a row for each parameter, of the number of steps and
/// the dtypes of what is kept, each one higher than it is and 0 where there is none.
class StateTable {
 public:
  StateTable(std::size_t parameters, std::size_t kinds)
      : table_(at::zeros({static_cast<int64_t>(parameters), static_cast<int64_t>(kinds) + 1},
                         at::kLong)) {}

  void set_steps(std::size_t parameter, int64_t steps) { at(parameter, 0) = steps + 1; }
  void set_dtype(std::size_t parameter, std::size_t kind, at::ScalarType dtype) {
    at(parameter, kind + 1) = static_cast<int64_t>(dtype) + 1;
  }

  void agree(Communicator& communicator, at::Device device) {
    const at::Tensor there = table_.to(device);
    communicator.all_reduce(there, Reduction::max).wait();
    table_ = there.cpu();
  }

  bool has_state(std::size_t parameter) { return at(parameter, 0) != 0; }
  int64_t steps(std::size_t parameter) { return at(parameter, 0) - 1; }
  bool has(std::size_t parameter, std::size_t kind) { return at(parameter, kind + 1) != 0; }
  at::ScalarType dtype(std::size_t parameter, std::size_t kind) {
    return static_cast<at::ScalarType>(at(parameter, kind + 1) - 1);
  }

 private:
  int64_t& at(std::size_t parameter, std::size_t column) {
    const auto columns = static_cast<std::size_t>(table_.size(1));
    return table_.mutable_data_ptr<int64_t>()[parameter * columns + column];
  }

  at::Tensor table_;
};

}  // namespace detail

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  mirror_groups();
  OptimizerType whole(param_groups_, static_cast<const Options&>(*defaults_));
  gather_states(whole);
  if (communicator_.rank() == 0) {
    for (const auto& [parameter, state] : state_) whole.state()[parameter] = state->clone();
    whole.set_applied_steps(applied_steps());
    whole.save(archive);
    return;
  }
  torch::serialize::OutputArchive part(archive.compilation_unit());
  inner_->save(part);
  archive.write(detail::kShardKey, part);
  archive.write(detail::kShardRankKey, c10::IValue(int64_t{communicator_.rank()}));
  archive.write(detail::kShardCountKey, c10::IValue(int64_t{communicator_.size()}));
  archive.write(detail::kShardAppliedKey, c10::IValue(applied_steps()));
}

/// On rank 0 `whole` gets the states of all parameters, on the CPU.
template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::gather_states(OptimizerType& whole) const {
  if (weights_.parameters().empty()) return;
  const OwnStates own = own_states();
  detail::StateTable table(weights_.parameters().size(), own.kinds);
  for (std::size_t i = 0; i < own.steps.size(); ++i) {
    if (own.steps[i] < 0) continue;
    const std::size_t number = weights_.slices()[i].parameter;
    table.set_steps(number, own.steps[i]);
    for (std::size_t kind = 0; kind < own.kinds; ++kind) {
      const at::Tensor& tensor = own.tensors[i][kind];
      if (tensor.defined()) table.set_dtype(number, kind, tensor.scalar_type());
    }
  }
  table.agree(communicator_, buckets_.buckets().front().device);

  const bool keeps = communicator_.rank() == 0;
  for (std::size_t number = 0; keeps && number < weights_.parameters().size(); ++number) {
    if (!table.has_state(number)) continue;
    auto state = std::make_unique<State>();
    state->step(table.steps(number));
    whole.state()[weights_.parameters()[number].unsafeGetTensorImpl()] = std::move(state);
  }
  for (std::size_t bucket = 0; bucket < buckets_.buckets().size(); ++bucket) {
    for (std::size_t kind = 0; kind < own.kinds; ++kind) {
      gather_bucket(bucket, kind, own, table, keeps ? &whole : nullptr);
    }
  }
}

/// What this rank has of each of its slices.
template <class OptimizerType>
auto ShardedOptimizer<OptimizerType>::own_states() const -> OwnStates {
  State empty;
  OwnStates own{.kinds = detail::kept_tensors(empty).size()};
  for (const detail::ShardSlice& slice : weights_.slices()) {
    own.steps.push_back(-1);
    std::vector<at::Tensor>& tensors = own.tensors.emplace_back(own.kinds);
    const auto found = inner_->state().find(slice.weights.unsafeGetTensorImpl());
    if (found == inner_->state().end()) continue;
    State& state = static_cast<State&>(*found->second);
    own.steps.back() = state.step();
    const auto kept = detail::kept_tensors(state);
    for (std::size_t kind = 0; kind < own.kinds; ++kind) tensors[kind] = *kept[kind];
    tensors[0] = detail::filed_master(slice.weights, state);
  }
  return own;
}

/// In float, or double, which hold what is kept in fewer bits.
template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::gather_bucket(std::size_t bucket, std::size_t kind,
                                                    const OwnStates& own, detail::StateTable& table,
                                                    OptimizerType* whole) const {
  const GradBucket& like = buckets_.buckets()[bucket];
  const auto has = [&](std::size_t number) { return table.has(number, kind); };
  if (std::none_of(like.parameters.begin(), like.parameters.end(), has)) return;
  const at::Tensor buffer =
      at::zeros({like.flat.numel()}, like.flat.options().dtype(detail::wide_dtype(like.flat)));
  for (std::size_t i = 0; i < own.tensors.size(); ++i) {
    const detail::ShardSlice& slice = weights_.slices()[i];
    if (slice.bucket != bucket || !own.tensors[i][kind].defined()) continue;
    buffer.narrow(0, slice.weights.storage_offset(), slice.weights.numel())
        .copy_(own.tensors[i][kind]);
  }
  communicator_.all_gather(buffer, detail::own_part(buffer, communicator_)).wait();
  if (whole == nullptr) return;
  const auto gradients = detail::shared(buckets_);
  for (const std::size_t number : like.parameters) {
    if (!has(number)) continue;
    const at::Tensor& place = gradients->place(number);
    auto& state = *whole->state()[weights_.parameters()[number].unsafeGetTensorImpl()];
    *detail::kept_tensors(static_cast<State&>(state))[kind] =
        buffer.as_strided(place.sizes(), place.strides(), place.storage_offset())
            .to(at::kCPU, table.dtype(number, kind), /*non_blocking=*/false, /*copy=*/true);
  }
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::load(torch::serialize::InputArchive& archive) {
  const c10::NoGradGuard no_grad;
  check_groups();
  mirror_groups();
  c10::IValue rank;
  if (archive.try_read(detail::kShardRankKey, rank)) {
    load_part(archive, rank.toInt());
  } else {
    load_whole(archive);
  }
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::take_options(const OptimizerType& from) {
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    detail::set_group_options(
        param_groups_[group],
        detail::group_options<Options>(from.param_groups(), group, *defaults_, Traits::kName),
        *defaults_);
  }
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::load_whole(torch::serialize::InputArchive& archive) {
  OptimizerType whole(param_groups_, static_cast<const Options&>(*defaults_));
  whole.load(archive);
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    check_options(
        detail::group_options<Options>(whole.param_groups(), group, *defaults_, Traits::kName));
  }
  auto states = std::exchange(inner_->state(), {});
  try {
    for (const detail::ShardSlice& slice : weights_.slices()) {
      const at::Tensor& parameter = weights_.parameters()[slice.parameter];
      const auto found = whole.state().find(parameter.unsafeGetTensorImpl());
      if (found == whole.state().end()) continue;
      inner_->state()[slice.weights.unsafeGetTensorImpl()] =
          part_of(static_cast<State&>(*found->second), slice);
    }
  } catch (...) {
    inner_->state() = std::move(states);
    throw;
  }
  for (const at::Tensor& parameter : weights_.parameters()) {
    whole.state().erase(parameter.unsafeGetTensorImpl());
  }
  state_ = std::move(whole.state());  // of what is frozen, for the next file
  take_options(whole);
  if (whole.knows_applied_steps()) {
    load_progress({.applied_steps = whole.applied_steps()});
  } else {
    load_progress({});
  }
}

/// In memory of its own: the whole need not stay.
template <class OptimizerType>
auto ShardedOptimizer<OptimizerType>::part_of(State& whole, const detail::ShardSlice& slice) const
    -> std::unique_ptr<State> {
  auto part = std::make_unique<State>();
  part->step(whole.step());
  const at::Tensor& place = detail::shared(buckets_)->place(slice.parameter);
  const auto from = detail::kept_tensors(whole);
  const auto to = detail::kept_tensors(*part);
  for (std::size_t kind = 0; kind < from.size(); ++kind) {
    if (!from[kind]->defined()) continue;
    detail::check_shape_of(*from[kind], kind == 0 ? "a master" : "a moment",
                           detail::shared(buckets_)->parameters()[slice.parameter],
                           {Traits::kName, param_groups_});
    const at::Tensor laid_out = detail::in_layout_of(place, *from[kind]);
    *to[kind] =
        laid_out.as_strided({slice.weights.numel()}, {1}, laid_out.storage_offset() + slice.begin)
            .to(place.device(), laid_out.scalar_type(), /*non_blocking=*/false,
                /*copy=*/true);
  }
  return part;
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::load_part(torch::serialize::InputArchive& archive,
                                                int64_t rank) {
  const auto ranks = detail::read_key<int64_t>(archive, detail::kShardCountKey);
  TORCH_CHECK(rank == communicator_.rank() && ranks == communicator_.size(),
              "ShardedOptimizer on rank ", communicator_.rank(), " of ", communicator_.size(),
              ": the archive holds the part of rank ", rank, " of ", ranks,
              ", which no other rank can use; load what rank 0 saved");
  const auto applied = detail::read_key<int64_t>(archive, detail::kShardAppliedKey);
  torch::serialize::InputArchive part;
  archive.read(detail::kShardKey, part);
  inner_->load(part);
  take_options(*inner_);
  load_progress({.applied_steps = applied});
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
