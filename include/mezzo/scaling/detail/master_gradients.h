#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/fused_optimizer.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gradients in float that stand at an optimizer's masters from `unscale_` to the end of the step
/// or of the iteration: no later iteration finds them there.
class MasterGradients {
 public:
  MasterGradients() = default;

  /// Gives each master a copy of its parameter's gradient, still scaled.
  explicit MasterGradients(optim::FusedOptimizer& optimizer) {
    const NoGraphGuard no_graph;
    for_each_parameter(optimizer, [&](std::size_t group, const at::Tensor& parameter) {
      if (!parameter.grad().defined() || !optimizer.keeps_master(group, parameter)) return;
      (void)gradient_values(parameter);  // coalesces it
      const at::Tensor gradient =
          parameter.grad().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      const at::Tensor master = optimizer.master_param(group, parameter);
      master.mutable_grad() = gradient;
      masters_.emplace(parameter.unsafeGetTensorImpl(), master);
    });
  }

  /// Those that stand at masters already, whoever wrote them.
  static MasterGradients standing(optim::FusedOptimizer& optimizer) {
    MasterGradients found;
    for_each_parameter(optimizer, [&](std::size_t group, const at::Tensor& parameter) {
      if (!optimizer.keeps_master(group, parameter)) return;
      const at::Tensor master = optimizer.master_param(group, parameter);
      if (!master.grad().defined()) return;
      found.masters_.emplace(parameter.unsafeGetTensorImpl(), master);
    });
    return found;
  }

  MasterGradients(MasterGradients&& other) noexcept : masters_(std::move(other.masters_)) {
    other.masters_.clear();
  }
  MasterGradients& operator=(MasterGradients&& other) noexcept {
    if (this == &other) return *this;
    drop();
    masters_.swap(other.masters_);
    return *this;
  }
  MasterGradients(const MasterGradients&) = delete;
  MasterGradients& operator=(const MasterGradients&) = delete;
  ~MasterGradients() { drop(); }

  bool empty() const noexcept { return masters_.empty(); }

  void drop() noexcept {
    for (auto& [parameter, master] : masters_) master.mutable_grad() = at::Tensor();
    masters_.clear();
  }

  /// Leaves the gradients where they are, to whoever wants them.
  void leave() noexcept { masters_.clear(); }

  /// The tensors whose gradients the step takes: these masters in place of their parameters.
  std::vector<at::Tensor> holders(const torch::optim::Optimizer& optimizer) const {
    const auto* const fused = dynamic_cast<const optim::FusedOptimizer*>(&optimizer);
    std::vector<at::Tensor> holders;
    for_each_parameter(optimizer, [&](std::size_t group, const at::Tensor& parameter) {
      const auto found = masters_.find(parameter.unsafeGetTensorImpl());
      const bool is_given = found != masters_.end();
      if (!is_given && !empty() && fused->keeps_master(group, parameter)) return;
      const at::Tensor& holder = is_given ? found->second : parameter;
      if (holder.grad().defined()) holders.push_back(holder);
    });
    return holders;
  }

 private:
  std::unordered_map<const c10::TensorImpl*, at::Tensor> masters_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
