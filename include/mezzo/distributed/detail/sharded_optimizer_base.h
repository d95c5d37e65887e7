#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/parameter_partition.h>
#include <mezzo/distributed/grad_reducer.h>
#include <mezzo/distributed/no_sync_guard.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/detail/optimizer_description.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Implementation shared by both forms of ShardedOptimizer. The state has only the parameters that
/// this rank owns.
template <class OptimizerType>
class ShardedOptimizerBase : public OptimizerType, public optim::ShardedOptimizerTag {
 public:
  /// Returns a guard under which backward passes only accumulate on this rank: for all
  /// micro-batches except the last.
  [[nodiscard]] NoSyncGuard no_sync() { return partition_.grad_reducer().no_sync(); }

  /// Writes the archive of an unsharded `OptimizerType`, with states on the CPU, on rank 0, and
  /// nothing on other ranks. Collective call. Each rank needs memory for the states
  /// of one other rank. \throws c10::Error on all ranks if one fails
  void save(torch::serialize::OutputArchive& archive) const override {
    std::unique_ptr<std::conditional_t<kIsFused, SerializedOptimizer, OptimizerType>> whole;
    if constexpr (kIsFused) {
      whole = std::make_unique<SerializedOptimizer>();
      for (const auto& group : this->param_groups_) whole->param_groups().push_back(group);
    } else {
      whole = make_optimizer_(this->param_groups_);
    }
    std::string failure;
    for (int rank = 0; rank < partition_.backend()->getSize(); ++rank) {
      std::string text;
      if (rank == partition_.rank())
        failure += get_error_message([&] { text = serialize_local_state(); });
      text = broadcast_string(partition_.backend(), std::move(text), rank);
      failure += get_error_message([&] {
        if (partition_.rank() != 0 || text.empty()) return;
        const auto shard = deserialize_state(text, at::kCPU);
        // Some optimizers create the states of all parameters at construction.
        for (auto& [parameter, state] : shard->state()) {
          if (!partition_.is_owned_elsewhere(parameter, rank))
            whole->state()[parameter] = std::move(state);
        }
      });
    }
    throw_if_any_rank_failed(partition_.backend(), "ShardedOptimizer::save", failure);
    if (partition_.rank() != 0) return;
    if constexpr (kIsFused) {
      this->write_archive(archive, *whole);
    } else {
      whole->save(archive);
    }
  }

  /// Loads an archive that a ShardedOptimizer of any world size, `OptimizerType`, or torch's
  /// optimizer of the same name wrote. Each rank keeps the states that it owns.
  /// \throws c10::Error as OptimizerType
  void load(torch::serialize::InputArchive& archive) override {
    OptimizerType::load(archive);
    std::map<std::string, std::vector<at::Tensor>> owned;  // by the device of their states
    for (const auto& group : this->param_groups_) {
      for (const at::Tensor& parameter : group.params()) {
        void* const address = parameter.unsafeGetTensorImpl();
        if (partition_.is_owned_elsewhere(address)) this->state_.erase(address);
        if (this->state_.count(address) > 0) owned[parameter.device().str()].push_back(parameter);
      }
    }
    const std::string archive_bytes = serialize_local_state();
    for (const auto& [device, parameters] : owned) {
      const auto moved = deserialize_state(archive_bytes, device);
      for (const at::Tensor& parameter : parameters) {
        void* const address = parameter.unsafeGetTensorImpl();
        this->state_[address] = std::move(moved->state()[address]);
      }
    }
  }

 protected:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  template <class... Arguments>
  ShardedOptimizerBase(const Groups& groups, BackendPtr backend, const GradReducerOptions& options,
                       const Arguments&... arguments)
      : OptimizerType(groups, arguments...),
        make_optimizer_([arguments...](Groups param_groups) {
          return std::make_unique<OptimizerType>(std::move(param_groups), arguments...);
        }),
        partition_(this->param_groups_, std::move(backend), options) {}

  std::function<std::unique_ptr<OptimizerType>(Groups)> make_optimizer_;
  ParameterPartition partition_;

 private:
  static constexpr bool kIsFused = std::derived_from<OptimizerType, FusedOptimizerBase>;

  std::string serialize_local_state() const {
    torch::serialize::OutputArchive archive;
    OptimizerType::save(archive);
    std::ostringstream bytes;
    archive.save_to(bytes);
    return bytes.str();
  }
  /// Returns an optimizer with the serialized states, on `device`.
  std::unique_ptr<OptimizerType> deserialize_state(const std::string& bytes,
                                                   at::Device device) const {
    torch::serialize::InputArchive archive;
    archive.load_from(bytes.data(), bytes.size(), device);
    auto optimizer = make_optimizer_(this->param_groups_);
    optimizer->load(archive);
    return optimizer;
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
