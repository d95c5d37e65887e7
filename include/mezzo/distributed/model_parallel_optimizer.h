/// \file
/// ModelParallelOptimizer: ranks that hold parts of one model skip and clip together.
#pragma once

#include <mezzo/base/tensors_by_name.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/optim/optimizer_ref.h>
#include <mezzo/scaling/detail/device_step_future.h>

#include <algorithm>
#include <optional>
#include <unordered_set>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of ModelParallelOptimizer.
struct ModelParallelOptions {
  /// Parameters that several ranks hold with equal gradients, such as norms of tensor parallel
  /// ranks and embeddings tied across pipeline stages, under equal names on these ranks. The
  /// gradient norm counts each on the first of them.
  TensorsByName replicated = {};
};

/// Makes ranks that hold parts of one model (tensor and pipeline parallelism) skip if one of them
/// has an inf or NaN, and clip by the norm over all of them, as torch's ShardedGradScaler.
///
/// \code
///   mezzo::ModelParallelOptimizer optimizer(adamw, model_parallel_ranks,
///                                           {.replicated = norm->named_parameters().pairs()});
///   scaler.step(optimizer, {.max_norm = 1.0});
/// \endcode
///
/// Pass it to GradScaler and LossScaleOptimizer, and `adamw`, which must outlive it, to everything
/// else. `step` and `unscale_` are then collective calls, on ranks without gradients too, with
/// equal options. They throw on all ranks if the loss scales differ; on a device, at a later call.
class ModelParallelOptimizer final : private optim::GradStatsProvider {
 public:
  /// Collective call. \throws c10::Error if `backend` is null; on all ranks if a replicated tensor
  ///   is not a parameter of `optimizer`, or only one rank names it with this dtype and shape
  inline ModelParallelOptimizer(OptimizerRef optimizer, c10::intrusive_ptr<c10d::Backend> backend,
                                const ModelParallelOptions& options = {});
  /// Converts to the argument of GradScaler's functions.
  operator OptimizerRef() { return backend_->getSize() > 1 ? OptimizerRef(inner_, *this) : inner_; }

 private:
  inline GradStats grad_stats(const StepPlan& plan, const at::Tensor& inv_scale) override;
  inline void check_scales();

  OptimizerRef inner_;
  detail::BackendPtr backend_;
  std::unordered_set<const at::TensorImpl*> counted_elsewhere_;  // replicated parameters
  at::Tensor stats_by_rank_;                                     // of the last step
  std::optional<StepResult> scales_differ_;  // found_inf() if so; a device sets it later
  detail::DeviceStepFuturePool futures_;
};

inline ModelParallelOptimizer::ModelParallelOptimizer(OptimizerRef optimizer,
                                                      c10::intrusive_ptr<c10d::Backend> backend,
                                                      const ModelParallelOptions& options)
    : inner_(optimizer),
      backend_(detail::check_backend(std::move(backend), "ModelParallelOptimizer")) {
  TORCH_CHECK(inner_.grad_stats_provider() == nullptr,
              "ModelParallelOptimizer: pass the optimizer that the other ModelParallelOptimizer "
              "wraps, and a backend of all ranks that share the model");
  const auto get_line = [](const auto& item) {
    return c10::str('\n', item.first, ": ", item.second.scalar_type(), item.second.sizes(), '\n');
  };
  std::string lines;
  for (const auto& item : options.replicated) lines += get_line(item);
  const std::vector<std::string> lines_by_rank = detail::all_gather_strings(backend_, lines);
  const std::string failure = detail::get_error_message([&] {
    for (const auto& item : options.replicated) {
      const auto has_line = [line = get_line(item)](const std::string& text) {
        return text.find(line) != std::string::npos;
      };
      bool is_found = false;
      detail::for_each_parameter(inner_.optimizer(), [&](const at::Tensor& parameter) {
        is_found = is_found || parameter.is_same(item.second);
      });
      TORCH_CHECK(is_found && std::ranges::count_if(lines_by_rank, has_line) > 1,
                  "`replicated` has ", item.first, ", which is ",
                  is_found ? "not on another rank with the same name, dtype and shape"
                           : "not a parameter of the optimizer");
      const auto first = std::ranges::find_if(lines_by_rank, has_line) - lines_by_rank.begin();
      if (first != backend_->getRank())
        counted_elsewhere_.insert(item.second.unsafeGetTensorImpl());
    }
  });
  if (backend_->getSize() > 1)
    detail::throw_if_any_rank_failed(backend_, "ModelParallelOptimizer", failure);
}

inline void ModelParallelOptimizer::check_scales() {
  if (!scales_differ_ || !scales_differ_->ready() || !scales_differ_->found_inf()) return;
  const at::Tensor scales = stats_by_rank_.select(1, 0).cpu().reciprocal();
  for (int64_t rank = 1; rank < scales.numel(); ++rank) {
    TORCH_CHECK(scales[rank].equal(scales[0]), "ModelParallelOptimizer: rank ", rank,
                " has the loss scale ", scales[rank].item(), " where rank 0 has ", scales[0].item(),
                "; on all ranks use equal GradScalerOptions, load the same state, and call "
                "unscale_, step and update alike");
  }
}

inline GradStats ModelParallelOptimizer::grad_stats(const StepPlan& plan,
                                                    const at::Tensor& inv_scale) {
  const c10::NoGradGuard no_grad;
  const auto compute = [&](bool counts_elsewhere) {
    StepPlan part = plan;
    std::erase_if(part.params, [&](const StepPlan::Param& param) {
      return counted_elsewhere_.contains(param.parameter->unsafeGetTensorImpl()) !=
             counts_elsewhere;
    });
    return detail::compute_grad_stats(inner_, part, inv_scale);
  };
  GradStats stats = compute(false);
  const at::Device device = stats.found_inf.device();
  if (!counted_elsewhere_.empty()) stats.found_inf += compute(true).to(device).found_inf;
  const auto dtype = stats.norm_sq.scalar_type();
  // One all-gather instead of several all-reduces: sums in rank order, maxima, and a comparison.
  const at::Tensor row = at::stack({stats.inv_scale.to(dtype), stats.found_inf.to(dtype),
                                    stats.norm_sq, stats.max_abs})
                             .to(detail::get_message_device(*backend_));
  stats_by_rank_ = at::empty({backend_->getSize(), row.numel()}, row.options());
  detail::all_gather(backend_, stats_by_rank_, row);
  check_scales();  // of an earlier step
  const at::Tensor all = stats_by_rank_.to(device);
  const at::Tensor differs = all.select(1, 0).ne(all[0][0]).any().to(at::kFloat);
  stats.found_inf = all.select(1, 1).sum().to(at::kFloat).add(differs);
  stats.norm_sq = all.select(1, 2).sum();
  stats.max_abs = all.select(1, 3).amax();
  scales_differ_ = futures_.make_result(stats.inv_scale, {stats.inv_scale, differs}, false);
  // A device's result may be ready on one rank only, and the others would wait for it.
  if (device.is_cpu()) check_scales();
  return stats;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
