/// \file
/// An optimizer whose work and memory the ranks share (ZeRO, stage 1): each keeps the state of its
/// part of the parameters, updates that part, and gets the rest from the other ranks.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/describe.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/grad_reducer.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/detail/optimizer_description.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

/// Which rank owns which parameter, and what the ranks send each other.
class ParameterPartition {
 public:
  /// Gives all ranks rank 0's parameters, and averages the gradients of those that are trained.
  /// Deals these to the ranks, the largest first, each to the rank with the fewest elements.
  ParameterPartition(const std::vector<torch::optim::OptimizerParamGroup>& groups, BackendPtr group,
                     const GradReducerOptions& options)
      : group_(check_backend(std::move(group), "ShardedOptimizer")),
        all_reduce_(sync_initial_params(groups), group_, options) {
    const std::vector<at::Tensor>& trained = all_reduce_.buckets().parameters();
    std::vector<std::size_t> order(trained.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return trained[a].numel() > trained[b].numel();
    });
    std::vector<int64_t> elements(static_cast<std::size_t>(group_->getSize()));
    for (const std::size_t number : order) {
      const auto least = std::min_element(elements.begin(), elements.end());
      *least += trained[number].numel();
      owners_[trained[number].unsafeGetTensorImpl()] = static_cast<int>(least - elements.begin());
    }
  }

  GradReducer& all_reduce() noexcept { return all_reduce_; }
  const BackendPtr& group() const noexcept { return group_; }
  int rank() const { return group_->getRank(); }

  /// \throws c10::Error for a parameter whose gradients are not averaged
  int owner_of(const at::Tensor& parameter) const {
    const auto found = owners_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(found != owners_.end(), "ShardedOptimizer: a parameter (", describe(parameter),
                ") has a gradient, and was frozen or in no group when the optimizer was made; make "
                "a new ShardedOptimizer with all parameters that are trained");
    return found->second;
  }
  bool is_owned_elsewhere(const void* parameter, int than = -1) const {
    const auto found = owners_.find(parameter);
    return found != owners_.end() && found->second != (than < 0 ? rank() : than);
  }

  /// Gives all ranks the parameters that their owners have stepped. Waits.
  void broadcast_updates(const std::vector<at::Tensor>& stepped) const {
    std::vector<std::vector<at::Tensor>> of_rank(static_cast<std::size_t>(group_->getSize()));
    for (const at::Tensor& parameter : stepped) {
      of_rank[static_cast<std::size_t>(owner_of(parameter))].push_back(parameter);
    }
    for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
      broadcast(group_, of_rank[rank], static_cast<int>(rank));
    }
  }

 private:
  std::vector<at::Tensor> sync_initial_params(
      const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
    TensorsByName named;
    std::string options;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      torch::serialize::OutputArchive archive;
      groups[i].options().serialize(archive);
      std::ostringstream bytes;
      archive.save_to(bytes);
      const std::string text = bytes.str();
      options +=
          c10::str("group ", i, ": lr ", groups[i].options().get_lr(),
                   ", options with the CRC-32C ", crc32c_hex(text.data(), text.size()), "\n");
      for (std::size_t k = 0; k < groups[i].params().size(); ++k) {
        const at::Tensor& parameter = groups[i].params()[k];
        named.emplace_back(c10::str("parameter ", k, " of group ", i), parameter);
      }
    }
    return verify_and_broadcast(named, group_, options);
  }

  BackendPtr group_;
  GradReducer all_reduce_;
  std::unordered_map<const void*, int> owners_;  // by the parameter's address
};

/// What ShardedOptimizer is for every OptimizerType: one that has the states of its rank's
/// parameters alone.
template <class OptimizerType>
class ShardedOptimizerBase : public OptimizerType, public optim::ShardedState {
 public:
  /// Returns a guard under which backward passes add to this rank's own gradients and average
  /// nothing: for all micro-batches but the last.
  [[nodiscard]] NoSyncGuard no_sync() { return partition_.all_reduce().no_sync(); }

  /// Writes on rank 0 the archive that `OptimizerType` alone would write, whatever the number of
  /// ranks, with states on the CPU, and nothing on the others. All ranks call it, and need memory
  /// for the states of one rank at a time. \throws c10::Error, on all ranks, what one of them throws
  void save(torch::serialize::OutputArchive& archive) const override {
    std::unique_ptr<std::conditional_t<kIsFused, SerializedOptimizer, OptimizerType>> whole;
    if constexpr (kIsFused) {
      whole = std::make_unique<SerializedOptimizer>();
      for (const auto& group : this->param_groups_) whole->param_groups().push_back(group);
    } else {
      whole = make_optimizer_(this->param_groups_);
    }
    std::string failure;
    for (int rank = 0; rank < partition_.group()->getSize(); ++rank) {
      std::string text;
      if (rank == partition_.rank())
        failure += get_error_message([&] { text = serialize_local_state(); });
      text = broadcast_string(partition_.group(), std::move(text), rank);
      failure += get_error_message([&] {
        if (partition_.rank() != 0 || text.empty()) return;
        const auto part = deserialize_state(text, at::kCPU);
        for (auto& [parameter, state] : part->state()) {  // some make all at the beginning
          if (!partition_.is_owned_elsewhere(parameter, rank))
            whole->state()[parameter] = std::move(state);
        }
      });
    }
    throw_if_any_rank_failed(partition_.group(), "ShardedOptimizer::save", failure);
    if (partition_.rank() != 0) return;
    if constexpr (kIsFused) {
      this->write_archive(archive, *whole);
    } else {
      whole->save(archive);
    }
  }

  /// Loads an archive that a ShardedOptimizer with any number of ranks, `OptimizerType` alone or
  /// libtorch's optimizer of the same name wrote. Each rank reads the archive and keeps the states
  /// of its parameters. \throws c10::Error as OptimizerType does
  void load(torch::serialize::InputArchive& archive) override {
    OptimizerType::load(archive);
    std::map<std::string, std::vector<at::Tensor>> own;  // by device, to which their states go
    for (const auto& group : this->param_groups_) {
      for (const at::Tensor& parameter : group.params()) {
        void* const address = parameter.unsafeGetTensorImpl();
        if (partition_.is_owned_elsewhere(address)) this->state_.erase(address);
        if (this->state_.count(address) > 0) own[parameter.device().str()].push_back(parameter);
      }
    }
    const std::string file = serialize_local_state();
    for (const auto& [device, parameters] : own) {
      const auto there = deserialize_state(file, device);
      for (const at::Tensor& parameter : parameters) {
        void* const address = parameter.unsafeGetTensorImpl();
        this->state_[address] = std::move(there->state()[address]);
      }
    }
  }

 protected:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  template <class... Arguments>
  ShardedOptimizerBase(const Groups& groups, BackendPtr group, const GradReducerOptions& options,
                       const Arguments&... arguments)
      : OptimizerType(groups, arguments...),
        make_optimizer_([arguments...](Groups of) {
          return std::make_unique<OptimizerType>(std::move(of), arguments...);
        }),
        partition_(this->param_groups_, std::move(group), options) {}

  std::function<std::unique_ptr<OptimizerType>(Groups)> make_optimizer_;
  ParameterPartition partition_;

 private:
  static constexpr bool kIsFused = std::derived_from<OptimizerType, FusedOptimizerBase>;

  /// Returns the file of this rank's states.
  std::string serialize_local_state() const {
    torch::serialize::OutputArchive archive;
    OptimizerType::save(archive);
    std::ostringstream bytes;
    archive.save_to(bytes);
    return bytes.str();
  }
  /// Returns an optimizer with the states of such a file, on `device`.
  std::unique_ptr<OptimizerType> deserialize_state(const std::string& file,
                                                   at::Device device) const {
    torch::serialize::InputArchive archive;
    archive.load_from(file.data(), file.size(), device);
    auto optimizer = make_optimizer_(this->param_groups_);
    optimizer->load(archive);
    return optimizer;
  }
};

}  // namespace detail

/// Any optimizer with state and work shared by the ranks: ZeRO's first stage (Rajbhandari et al.,
/// "ZeRO: Memory optimizations toward training trillion parameter models", 2020), as torch's
/// ZeroRedundancyOptimizer does it.
///
/// \code
///   mezzo::ShardedOptimizer<mezzo::optim::AdamW> optimizer(
///       model->parameters(), world, mezzo::optim::AdamWOptions(2e-5));
///   for (auto& batch : *part_of_this_rank) {
///     optimizer.zero_grad();
///     scaler.scale(loss(model, batch)).backward();   // averages each bucket as it fills
///     scaler.step(optimizer, {.max_norm = 1.0});     // or unscale_, clip_grad_norm_ and step
///     scaler.update();
///   }
/// \endcode
///
/// Each rank owns whole parameters. After a backward pass every rank has all averaged gradients, so
/// that all skip, unscale and clip alike; a step updates a rank's own parameters and gets the
/// others'. All ranks have the weights that `OptimizerType` alone would compute from the averages,
/// bit for bit. mezzo's fused optimizers stay fused; libtorch's and others, such as
/// `ShardedOptimizer<torch::optim::AdamW>`, step as a GradScaler's other optimizers do.
///
/// All ranks construct the optimizer together, and call backward, `step` and `save` alike. Errors
/// of the group are thrown by these calls; after one, begin again from a checkpoint.
template <class OptimizerType>
class ShardedOptimizer : public detail::ShardedOptimizerBase<OptimizerType> {
 public:
  /// Gives all ranks rank 0's parameters. `defaults` are options of `OptimizerType`.
  /// \throws c10::Error as OptimizerType does; on all ranks, naming the first one whose parameters or
  ///   options differ
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   c10::intrusive_ptr<c10d::Backend> group, const Options& defaults,
                   const GradReducerOptions& options = {})
      : detail::ShardedOptimizerBase<OptimizerType>(groups, std::move(group), options, defaults) {}
  /// Makes one group of `parameters`.
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  ShardedOptimizer(std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::Backend> group,
                   const Options& defaults, const GradReducerOptions& options = {})
      : ShardedOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                         std::move(group), defaults, options) {}

  /// Steps this rank's parameters, from which the gradients of the others are hidden, and gets the
  /// others'.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss = detail::call_closure(closure);
    std::vector<at::Tensor> stepped;
    std::vector<std::pair<at::Tensor, at::Tensor>> hidden;
    for (const auto& group : this->param_groups_) {
      for (const at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        stepped.push_back(parameter);
        if (this->partition_.owner_of(parameter) != this->partition_.rank()) {
          hidden.emplace_back(parameter, parameter.grad());
        }
      }
    }
    const auto show = c10::make_scope_exit([&hidden] {
      for (auto& [parameter, gradient] : hidden) parameter.mutable_grad() = gradient;
    });
    for (auto& [parameter, gradient] : hidden) parameter.mutable_grad().reset();
    OptimizerType::step();
    this->partition_.broadcast_updates(stepped);
    return loss;
  }
};

/// Shards mezzo's fused optimizers: plan and read see all averaged gradients, and `apply`
/// steps the rows of this rank's parameters.
template <std::derived_from<detail::FusedOptimizerBase> OptimizerType>
class ShardedOptimizer<OptimizerType> : public detail::ShardedOptimizerBase<OptimizerType> {
 public:
  /// OptimizerType's options.
  using typename OptimizerType::Options;

  /// Gives all ranks rank 0's parameters.
  /// \throws c10::Error as OptimizerType does; on all ranks, naming the first one whose parameters or
  ///   options differ
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   c10::intrusive_ptr<c10d::Backend> group, const Options& defaults,
                   const GradReducerOptions& options = {},
                   const optim::WeightStorageOptions& weights = {})
      : detail::ShardedOptimizerBase<OptimizerType>(groups, std::move(group), options, defaults,
                                                    weights) {}
  /// Makes one group of `parameters`.
  ShardedOptimizer(std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::Backend> group,
                   const Options& defaults, const GradReducerOptions& options = {},
                   const optim::WeightStorageOptions& weights = {})
      : ShardedOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                         std::move(group), defaults, options, weights) {}

  /// Returns an entry for each parameter that has a gradient, whoever owns it.
  StepPlan plan() override {
    StepPlan plan = OptimizerType::plan();
    for (const StepPlan::Param& param : plan.params)
      (void)this->partition_.owner_of(*param.parameter);
    return plan;
  }

  /// Steps this rank's parameters and gets the others'.
  void apply(StepPlan plan, const GradStats& stats = {}, const StepOptions& options = {}) override {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> stepped;
    for (const StepPlan::Param& param : plan.params) {
      stepped.push_back(*param.parameter);
      const bool is_owned_elsewhere =
          this->partition_.is_owned_elsewhere(param.parameter->unsafeGetTensorImpl());
      if (is_owned_elsewhere && options.zero_grad) param.gradient.zero_();
    }
    std::erase_if(plan.params, [this](const StepPlan::Param& param) {
      return this->partition_.is_owned_elsewhere(param.parameter->unsafeGetTensorImpl());
    });
    plan.other_ranks_have_grads = !stepped.empty();
    OptimizerType::apply(std::move(plan), stats, options);
    this->partition_.broadcast_updates(stepped);
  }

  /// Returns a parameter of another rank's itself: its master is there.
  at::Tensor master_param(const at::Tensor& parameter) override {
    if (this->partition_.is_owned_elsewhere(parameter.unsafeGetTensorImpl())) return parameter;
    return OptimizerType::master_param(parameter);
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
