#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/param_slot.h>
#include <mezzo/optim/detail/step_witness.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- What the ranks agree on in a step ----------------------------------------------------------

/// Returns the sum of one number from each rank, added in the order of the ranks, so that all ranks
/// get the same bits, whatever their instruction sets.
inline at::Tensor sum_of_rows(const at::Tensor& numbers) {
  if (!numbers.is_cpu()) return numbers.sum();
  at::Tensor sum = numbers[0].clone();
  for (int64_t rank = 1; rank < numbers.size(0); ++rank) sum.add_(numbers[rank]);
  return sum;
}

/// Combines the verdicts of the ranks on their parts of the gradients: an inf on any rank, the sum
/// of all squares, the largest magnitude. Makes one collective. Waits for no device, unless there
/// are `words`, whose checksum is sent with the numbers.
/// \throws c10::Error, on all ranks, where one has other words
inline Verdict agreed(const Verdict& own, const std::string& words, const GroupPtr& group) {
  if (group->getSize() == 1) return own;
  std::vector<at::Tensor> numbers = {own.found_inf.to(at::kDouble), own.sum_of_squares,
                                     own.max_abs.to(at::kDouble)};
  if (!words.empty()) {
    const auto checksum = static_cast<double>(crc32c(words.data(), words.size()));
    numbers.push_back(at::full({}, checksum, own.sum_of_squares.options()));
  }
  const at::Tensor row = at::stack(numbers);
  const at::Tensor rows = at::empty({group->getSize(), row.numel()}, row.options());
  all_gather(group, rows, row).wait();
  if (!words.empty() && !rows.select(1, 3).eq(rows[0][3]).all().item<bool>()) {
    RankAgreement(group, row.device()).check_alike("ShardedOptimizer", words, kStepAlike);
  }
  return {own.inv_scale, rows.select(1, 0).amax().to(own.found_inf.scalar_type()),
          sum_of_rows(rows.select(1, 1)), rows.select(1, 2).amax()};
}

/// Returns the verdict of a step without a loss scale, which is the same on all ranks: it divides
/// sums by the number of ranks.
inline Verdict average_of_sums(const GroupPtr& group, at::Device device, const std::string& words) {
  if (group->getSize() == 1) return {};
  const auto number = at::TensorOptions().device(device).dtype(at::kFloat);
  const at::Tensor none = at::zeros({}, number);
  const at::Tensor inverse = at::full({}, 1. / group->getSize(), number);
  if (!words.empty()) {  // as if it were read, for other ranks may have a loss scale
    agreed({inverse, none, none.to(at::kDouble), none}, words, group);
  }
  return {.inv_scale = inverse, .found_inf = none};
}

// --- States, whole and in slices ----------------------------------------------------------------

// Keys of the archive of a rank other than 0.
inline constexpr const char* kShardRankKey = "mezzo_shard_rank";
inline constexpr const char* kShardCountKey = "mezzo_shard_count";
inline constexpr const char* kShardKey = "mezzo_shard";
inline constexpr const char* kShardAppliedKey = "mezzo_shard_applied_steps";

/// The kinds of tensors of a slot that go with its slice: the master, the moments, and the scales
/// of moments in blocks.
inline constexpr std::size_t kKeptKinds = 1 + 2 * kMaxMoments;

/// Returns for how many of a slice's elements a tensor of this kind has one. A slice begins with a
/// block of moments.
inline int64_t elements_of_one(std::size_t kind) { return kind <= kMaxMoments ? 1 : kBlock8; }

/// Lists the tensors of `slot` by kind; null for moments that the optimizer has under no options.
inline std::array<at::Tensor*, kKeptKinds> kept_tensors(ParamSlot& slot) {
  std::array<at::Tensor*, kKeptKinds> kept{&slot.master};
  for (std::size_t k = 0; k < kMaxMoments; ++k) {
    at::Tensor* const moment = &slot.moment(static_cast<int>(k));
    const bool is_last_again = std::find(kept.begin(), kept.end(), moment) != kept.end();
    kept[1 + k] = is_last_again ? nullptr : moment;
    kept[1 + kMaxMoments + k] = &slot.scales[k];
  }
  return kept;
}

/// Returns what the ranks' slots hold together, a row for each parameter: the number of steps, then
/// the dtypes of the kept tensors, each one higher than it is and 0 where no rank has any. One
/// collective. `own` has the slot of each of this rank's slices, null where there is none.
inline at::Tensor table_of_slots(const ShardedWeights& weights, const std::vector<ParamSlot*>& own,
                                 const GroupPtr& group) {
  const auto parameters = static_cast<int64_t>(weights.parameters().size());
  const at::Tensor table = at::zeros({parameters, int64_t{1 + kKeptKinds}}, at::kLong);
  const auto entries = table.accessor<int64_t, 2>();
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i] == nullptr) continue;
    auto row = entries[static_cast<int64_t>(weights.slices()[i].parameter)];
    row[0] = own[i]->count().value() + 1;
    int64_t column = 0;
    for (const at::Tensor* const tensor : kept_tensors(*own[i])) {
      ++column;
      if (tensor == nullptr || !tensor->defined()) continue;
      row[column] = static_cast<int64_t>(tensor->scalar_type()) + 1;
    }
  }
  const at::Tensor largest = table.to(weights.buckets().front().device);
  all_reduce(group, largest, c10d::ReduceOp::MAX).wait();
  return largest.cpu();
}

/// Puts the ranks' slots together on rank 0. Tensors go bucket by bucket, in float, which holds the
/// codes of 8 bits too, or, of double parameters, in double:
///
///   table = table_of_slots                          which parameters have what, on any rank
///   for each bucket, each kind of kept tensor:      all-gather the slices, if there are any
///
/// `own` is as for table_of_slots. `make`, null on the other ranks, returns a new slot for
/// parameter `number`, to be filled on the CPU.
inline void gather_slots(const ShardedWeights& weights, const std::vector<ParamSlot*>& own,
                         const GroupPtr& group,
                         const std::function<ParamSlot&(std::size_t number)>& make) {
  if (weights.parameters().empty()) return;
  const at::Tensor table = table_of_slots(weights, own, group);
  const auto entry = [entries = table.accessor<int64_t, 2>()](std::size_t number,
                                                              std::size_t column) {
    return entries[static_cast<int64_t>(number)][static_cast<int64_t>(column)];
  };
  std::vector<std::array<at::Tensor*, kKeptKinds>> wholes(weights.parameters().size());
  for (std::size_t number = 0; make != nullptr && number < wholes.size(); ++number) {
    if (entry(number, 0) == 0) continue;
    ParamSlot& slot = make(number);
    slot.count().set(entry(number, 0) - 1);
    wholes[number] = kept_tensors(slot);
  }
  for (std::size_t bucket = 0; bucket < weights.buckets().size(); ++bucket) {
    const GradBucket& like = weights.buckets()[bucket];
    const auto dtype = wide_dtype(weights.parameters()[like.parameters.front()]);
    for (std::size_t kind = 0; kind < kKeptKinds; ++kind) {
      const auto has = [&](std::size_t number) { return entry(number, 1 + kind) != 0; };
      if (std::none_of(like.parameters.begin(), like.parameters.end(), has)) continue;
      const int64_t per = elements_of_one(kind);
      const at::Tensor buffer =
          at::zeros({(like.flat.numel() + per - 1) / per}, like.flat.options().dtype(dtype));
      for (std::size_t i = 0; i < own.size(); ++i) {
        const ShardSlice& slice = weights.slices()[i];
        if (slice.bucket != bucket || own[i] == nullptr || !has(slice.parameter)) continue;
        const at::Tensor& tensor = *kept_tensors(*own[i])[kind];
        if (!tensor.defined()) continue;
        buffer.narrow(0, slice.weights.storage_offset() / per, tensor.numel()).copy_(tensor);
      }
      all_gather(group, buffer, own_part(buffer, group)).wait();
      for (const std::size_t number : like.parameters) {
        if (wholes[number][kind] == nullptr || !has(number)) continue;
        const at::Tensor& place = weights.place(number);
        const at::Tensor whole =
            per == 1 ? buffer.as_strided(place.sizes(), place.strides(), place.storage_offset())
                     : buffer.narrow(0, place.storage_offset() / per, blocks8_of(place.numel()));
        *wholes[number][kind] =
            whole.to(at::kCPU, static_cast<at::ScalarType>(entry(number, 1 + kind) - 1),
                     /*non_blocking=*/false, /*copy=*/true);
      }
    }
  }
}

/// \throws c10::Error where `whole`, a parameter's slot, is another model's, or damaged
inline void check_whole(ParamSlot& whole, const at::Tensor& parameter,
                        const OptimizerWords& words) {
  const auto kept = kept_tensors(whole);
  for (std::size_t kind = 0; kind <= kMaxMoments; ++kind) {
    if (kept[kind] == nullptr || !kept[kind]->defined()) continue;
    check_shape_of(*kept[kind], kind == 0 ? "a master" : "a moment", parameter, words);
    if (kind > 0) check_blocks(whole, static_cast<int>(kind) - 1, parameter, words);
  }
}

/// Copies to `part` what `whole`, a parameter's slot, has of a slice.
inline void cut_slot(ParamSlot& whole, ParamSlot& part, const ShardSlice& slice,
                     const ShardedWeights& weights) {
  part.count().set(whole.count().value());
  const at::Tensor& place = weights.place(slice.parameter);
  const auto from = kept_tensors(whole);
  const auto to = kept_tensors(part);
  for (std::size_t kind = 0; kind <= kMaxMoments; ++kind) {
    if (from[kind] == nullptr || !from[kind]->defined()) continue;
    at::Tensor own = *from[kind];
    if (kind > 0) {
      const at::Tensor& scales = *from[kind + kMaxMoments];
      if (scales.defined() && same_layout(place, own)) {
        const int64_t blocks = blocks8_of(slice.weights.numel());
        *to[kind + kMaxMoments] = scales.narrow(0, slice.begin / kBlock8, blocks)
                                      .to(place.device(), at::kFloat, /*non_blocking=*/false,
                                          /*copy=*/true);
      } else if (scales.defined()) {  // blocks of another order
        own = moment_values(whole, static_cast<int>(kind) - 1);
      }
    }
    const at::Tensor laid_out = in_layout_of(place, own);
    *to[kind] =
        laid_out.as_strided({slice.weights.numel()}, {1}, laid_out.storage_offset() + slice.begin)
            .to(place.device(), laid_out.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
}

}  // namespace detail

// --- Construction and groups --------------------------------------------------------------------

template <class OptimizerType>
ShardedOptimizer<OptimizerType>::ShardedOptimizer(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    c10::intrusive_ptr<c10d::Backend> group, const Options& defaults,
    const ShardedOptimizerOptions& options)
    : Shell(groups, defaults),
      group_(detail::checked(std::move(group), "ShardedOptimizer")),
      buckets_(start_alike(), {.bucket_bytes = options.bucket_bytes,
                               .parts = group_->getSize(),
                               .alignment = detail::kBlock8 * int64_t{sizeof(float)}}),
      exchange_(std::make_shared<detail::ShardExchange>(*detail::shared(buckets_), group_)),
      weights_(detail::shared(buckets_), group_),
      slices_(this->param_groups_.size()) {
  std::vector<std::size_t> groups_of;  // of the buckets' parameters
  for (const Known& known : known_) {
    if (known.is_trained) groups_of.push_back(known.group);
  }
  for (const detail::ShardSlice& slice : weights_.slices()) {
    slices_[groups_of[slice.parameter]].push_back(&slice);
  }
  auto reduction = std::make_shared<detail::GradientReduction>(
      "ShardedOptimizer", *detail::shared(buckets_), group_, exchange_);
  buckets_.on_ready([reduction](std::size_t bucket) { reduction->ready(bucket); });
}

/// Gives every rank the values of rank 0's parameters; returns the parameters that are trained.
template <class OptimizerType>
std::vector<at::Tensor> ShardedOptimizer<OptimizerType>::start_alike() {
  std::vector<at::Tensor> trained;
  NamedTensors named;
  for (std::size_t group = 0; group < this->param_groups_.size(); ++group) {
    check_storage(this->group_numbers(group).extras.weight_storage);
    const std::vector<at::Tensor>& parameters = this->param_groups_[group].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      const std::string which = c10::str("ShardedOptimizer: parameter ", i, " of group ", group,
                                         " (", detail::tensor_words(parameter), ")");
      detail::check_device(which, *group_, parameter.device());
      named.emplace_back(c10::str("parameter ", i, " of group ", group), parameter);
      known_.push_back({parameter, group, parameter.requires_grad()});
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
  }
  broadcast_parameters(named, group_);
  return trained;
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::check_storage(optim::WeightStorage storage) {
  TORCH_CHECK(storage != optim::WeightStorage::stochastic,
              "ShardedOptimizer: WeightStorage::stochastic draws bits by an element's place in the "
              "whole parameter, of which a rank trains a part; use WeightStorage::master");
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::check_groups() const {
  std::size_t number = 0;
  detail::for_each_parameter(*this, [&](std::size_t group, const at::Tensor& parameter) {
    const bool is_known = number < known_.size() && known_[number].group == group &&
                          known_[number].parameter.is_same(parameter);
    TORCH_CHECK(is_known,
                "ShardedOptimizer: its groups have another parameter than they were made with, in "
                "group ",
                group, "; make a new ShardedOptimizer with all parameters");
    ++number;
  });
  TORCH_CHECK(number == known_.size(), "ShardedOptimizer: its groups lack ", known_.size() - number,
              " of the parameters that they were made with; freeze them instead");
}

// --- The step -----------------------------------------------------------------------------------

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::prepare() {
  check_groups();
  for (std::size_t number = 0; number < known_.size(); ++number) {
    const Known& known = known_[number];
    TORCH_CHECK(known.is_trained || !known.parameter.requires_grad(),
                "ShardedOptimizer: ", detail::parameter_words(number, known.parameter),
                " was frozen when the optimizer was made and has no part in it; make a new "
                "ShardedOptimizer once it requires grad");
  }
  buckets_.reattach_gradients();
  TORCH_CHECK(
      exchange_->has_summed() || !weights_.device_of_gradients(),
      "ShardedOptimizer: no backward pass has summed the gradients over the ranks since the "
      "last step; let no_sync() end before the last micro-batch");
  weights_.follow();
}

/// Marks the gradients as not summed: a micro-batch adds to the sums of an earlier pass.
template <class OptimizerType>
GradBuckets::NoSync ShardedOptimizer<OptimizerType>::no_sync() {
  exchange_->set_has_summed(false);
  return buckets_.no_sync();
}

template <class OptimizerType>
StepPlan ShardedOptimizer<OptimizerType>::plan() {
  const c10::NoGradGuard no_grad;
  prepare();
  StepPlan plan{.is_checked = true};
  std::uint64_t number = 0;
  for (std::size_t group = 0; group < slices_.size(); ++group) {
    plan.groups.push_back(this->group_numbers(group));
    check_storage(plan.groups.back().extras.weight_storage);
    for (const detail::ShardSlice* const slice : slices_[group]) {
      const at::Tensor& parameter = weights_.parameters()[slice->parameter];
      this->add_row(plan, parameter, slice->weights, group, number++);
    }
  }
  if (plan.has_devices) detail::group_by_device(plan);
  plan.has_rows_elsewhere = weights_.device_of_gradients().has_value();
  for (const Known& known : known_) {  // of all ranks' slices: they refuse alike
    const at::Tensor& gradient = known.parameter.grad();
    const bool is_half = gradient.defined() && gradient.scalar_type() == at::kHalf;
    plan.has_bare_half |= is_half && !this->keeps_master(known.group, known.parameter);
    detail::refuse_average(known.parameter, this->words());
  }
  return plan;
}

template <class OptimizerType>
Verdict ShardedOptimizer<OptimizerType>::read(const StepPlan& plan, const at::Tensor& inv_scale) {
  const c10::NoGradGuard no_grad;
  const std::optional<at::Device> device = weights_.device_of_gradients();
  const at::Tensor inverse = inv_scale.mul(1. / group_->getSize());
  const Verdict own = Shell::read(plan, inverse).on(device.value_or(inv_scale.device()));
  if (!device) return own;
  return detail::agreed(own, words_to_compare(*device, inv_scale), group_);
}

/// Returns the words of this step, with the largest norm of the step before, for `read` does not
/// know this step's. Every step is compared on the CPU; on other devices, where the words wait, the
/// first and then each hundredth has words.
template <class OptimizerType>
std::string ShardedOptimizer<OptimizerType>::words_to_compare(at::Device device,
                                                              const at::Tensor& inv_scale) {
  if (group_->getSize() == 1 || detail::capture_on(device) != 0) return {};
  if (!device.is_cpu() && steps_++ % 100 != 0) return {};
  const at::Tensor scale = inv_scale.defined() ? inv_scale.reciprocal() : inv_scale;
  return detail::words_of_step(*this, scale, max_norm_);
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::apply(StepPlan plan, const Verdict& verdict,
                                            const StepOptions& options) {
  const c10::NoGradGuard no_grad;
  if (!exchange_->has_summed()) prepare();  // which throws for a plan that has been used up
  const std::optional<at::Device> device = weights_.device_of_gradients();
  const bool needs_average = !verdict.defined() && device;
  Shell::apply(std::move(plan),
               needs_average ? detail::average_of_sums(group_, *device,
                                                       words_to_compare(*device, /*inv_scale=*/{}))
                             : verdict,
               options);
  max_norm_ = options.max_norm;
  weights_.gather();
  exchange_->set_has_summed(false);
}

template <class OptimizerType>
ShardedOptimizerBytes ShardedOptimizer<OptimizerType>::bytes() const {
  ShardedOptimizerBytes bytes{.weights = weights_.bytes()};
  const auto bytes_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  };
  for (const GradBucket& bucket : buckets_.buckets()) bytes.gradients += bytes_of(bucket.flat);
  for (const detail::ShardSlice& slice : weights_.slices()) {
    State* const state = state_of(slice);
    if (state == nullptr) continue;
    for (const at::Tensor* tensor : detail::kept_tensors(*state)) {
      if (tensor != nullptr) bytes.state += bytes_of(*tensor);
    }
    bytes.state += bytes_of(state->lower_half());
  }
  return bytes;
}

template <class OptimizerType>
at::Tensor ShardedOptimizer<OptimizerType>::master_param(std::size_t /*group*/,
                                                         const at::Tensor& /*parameter*/) {
  TORCH_CHECK(false,
              "ShardedOptimizer: a rank trains a part of each parameter, and has no master of a "
              "whole one; clip with scaler.step(optimizer, {.max_norm = ...})");
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::enable_master_weights() {
  TORCH_CHECK(false,
              "ShardedOptimizer: weights are cast first, and then sharded; make the optimizer from "
              "the cast model, with weight_storage(WeightStorage::master) in its options");
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::check_unscale() const {
  TORCH_CHECK(
      false,
      "ShardedOptimizer: gradients cannot be unscaled or clipped where they lie, for a rank "
      "has the sums of its part alone, and would clip by the norm of that; use "
      "scaler.step(optimizer, {.max_norm = ...}), which unscales and clips all alike");
}

// --- Files --------------------------------------------------------------------------------------

/// Returns the state of a slice, which is kept as its parameter's; null where there is none.
template <class OptimizerType>
auto ShardedOptimizer<OptimizerType>::state_of(const detail::ShardSlice& slice) const -> State* {
  const at::Tensor& parameter = weights_.parameters()[slice.parameter];
  const auto found = this->state_.find(parameter.unsafeGetTensorImpl());
  if (found == this->state_.end()) return nullptr;
  auto* const state = dynamic_cast<State*>(found->second.get());
  TORCH_CHECK(state != nullptr, "ShardedOptimizer: the state of ",
              this->words().parameter(parameter),
              " is another optimizer's; copy states only between optimizers of the same class");
  return state;
}

/// Copies the states of frozen parameters to `filed`, so that a later run can train these again.
template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::keep_frozen(detail::FiledOptimizer& filed) const {
  for (const Known& known : known_) {
    const auto found = this->state_.find(known.parameter.unsafeGetTensorImpl());
    if (known.is_trained || found == this->state_.end()) continue;
    filed.state()[found->first] = found->second->clone();
  }
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  check_groups();
  detail::FiledOptimizer filed, part;
  std::vector<detail::ParamSlot*> own;
  for (const detail::ShardSlice& slice : weights_.slices()) {
    const State* const state = state_of(slice);
    own.push_back(nullptr);
    if (state == nullptr) continue;
    auto& copy = part.state()[slice.weights.unsafeGetTensorImpl()];
    copy = detail::filed_state(slice.weights, *state);
    own.back() = static_cast<State*>(copy.get());
  }
  const bool is_first = group_->getRank() == 0;
  std::function<detail::ParamSlot&(std::size_t)> make;
  if (is_first) {
    make = [&](std::size_t number) -> detail::ParamSlot& {
      auto state = std::make_unique<State>();
      State& made = *state;
      filed.state()[weights_.parameters()[number].unsafeGetTensorImpl()] = std::move(state);
      return made;
    };
  }
  detail::gather_slots(weights_, own, group_, make);
  for (std::size_t group = 0; group < slices_.size(); ++group) {
    (void)this->group_numbers(group);  // of this kind, or it throws
    const torch::optim::OptimizerParamGroup& given = this->param_groups_[group];
    filed.param_groups().push_back(given);
    std::vector<at::Tensor> slices;
    for (const detail::ShardSlice* const slice : slices_[group]) slices.push_back(slice->weights);
    part.param_groups().emplace_back(std::move(slices), given.options().clone());
  }
  if (is_first) {
    keep_frozen(filed);
    this->write_file(archive, filed);
    return;
  }
  torch::serialize::OutputArchive own_archive(archive.compilation_unit());
  this->write_file(own_archive, part);
  archive.write(detail::kShardKey, own_archive);
  archive.write(detail::kShardRankKey, c10::IValue(int64_t{group_->getRank()}));
  archive.write(detail::kShardCountKey, c10::IValue(int64_t{group_->getSize()}));
  archive.write(detail::kShardAppliedKey, c10::IValue(this->applied_steps()));
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::load(torch::serialize::InputArchive& archive) {
  const c10::NoGradGuard no_grad;
  check_groups();
  c10::IValue saved_rank;
  std::vector<std::vector<at::Tensor>> filed(slices_.size());
  if (!archive.try_read(detail::kShardRankKey, saved_rank)) {
    for (const Known& known : known_) filed[known.group].push_back(known.parameter);
    this->load_file(archive, filed, [this](detail::FiledOptimizer& read) { take_whole(read); });
    return;
  }
  const int64_t rank = saved_rank.toInt();
  const auto ranks = detail::read_key<int64_t>(archive, detail::kShardCountKey);
  TORCH_CHECK(rank == group_->getRank() && ranks == group_->getSize(), "ShardedOptimizer on rank ",
              group_->getRank(), " of ", group_->getSize(), ": the archive holds the part of rank ",
              rank, " of ", ranks, ", which no other rank can use; load what rank 0 saved");
  const auto applied = detail::read_key<int64_t>(archive, detail::kShardAppliedKey);
  torch::serialize::InputArchive part;
  archive.read(detail::kShardKey, part);
  for (std::size_t group = 0; group < slices_.size(); ++group) {
    for (const detail::ShardSlice* const slice : slices_[group]) {
      filed[group].push_back(slice->weights);
    }
  }
  this->load_file(part, filed, [this](detail::FiledOptimizer& read) { take_part(read); });
  this->set_applied_steps(applied);
}

/// Replaces the whole states in `read` by the states of this rank's slices; those of frozen
/// parameters stay. A slice gets its own memory, so that the whole state can be freed.
template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::take_whole(detail::FiledOptimizer& read) const {
  for (std::size_t group = 0; group < slices_.size(); ++group) {
    const auto& options = static_cast<const Options&>(read.param_groups()[group].options());
    check_storage(options.weight_storage());
  }
  for (const at::Tensor& parameter : weights_.parameters()) {  // alike on all ranks
    const auto found = read.state().find(parameter.unsafeGetTensorImpl());
    if (found == read.state().end()) continue;
    detail::check_whole(static_cast<State&>(*found->second), parameter, this->words());
  }
  detail::FiledOptimizer parts;
  for (const detail::ShardSlice& slice : weights_.slices()) {
    const at::Tensor& parameter = weights_.parameters()[slice.parameter];
    const auto found = read.state().find(parameter.unsafeGetTensorImpl());
    if (found == read.state().end()) continue;
    auto part = std::make_unique<State>();
    detail::cut_slot(static_cast<State&>(*found->second), *part, slice, weights_);
    parts.state()[found->first] = std::move(part);
  }
  for (const at::Tensor& parameter : weights_.parameters()) {
    read.state().erase(parameter.unsafeGetTensorImpl());
  }
  for (auto& [parameter, part] : parts.state()) read.state()[parameter] = std::move(part);
}

/// Gives the states of slices in `read` to the parameters of these slices.
template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::take_part(detail::FiledOptimizer& read) const {
  auto states = std::exchange(read.state(), {});
  keep_frozen(read);
  for (const detail::ShardSlice& slice : weights_.slices()) {
    const auto found = states.find(slice.weights.unsafeGetTensorImpl());
    if (found == states.end()) continue;
    const at::Tensor& parameter = weights_.parameters()[slice.parameter];
    read.state()[parameter.unsafeGetTensorImpl()] = std::move(found->second);
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
