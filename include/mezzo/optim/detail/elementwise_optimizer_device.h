#pragma once

#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/optimizer_traits.h>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <limits>
#include <optional>
#include <vector>

// The step on CUDA, and on devices that mezzo has no kernel for, CUDA without mezzo::cuda among
// them, through ATen's fused optimizers: still without a wait, and in one pass of theirs, beside a
// copy of the gradients, since ATen's kernels write them.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Traits>
bool ElementwiseOptimizer<Traits>::step_on_device(Many& all, const GradientReport& report,
                                                  const StepOptions& options,
                                                  [[maybe_unused]] bool is_alone) {
#ifdef MEZZO_WITH_CUDA
  if (has_cuda_kernels(all.front().parameter->device())) {
    step_on_cuda(all, report, options, is_alone);
    return is_alone;
  }
#endif
  step_with_aten(all, report, options);
  return false;
}

#ifdef MEZZO_WITH_CUDA

inline StepInputs step_inputs(const DeviceGradientReport* report, const StepOptions& options) {
  StepInputs inputs{.max_norm = options.max_norm, .clear = options.zero_grad};
  if (report == nullptr) return inputs;
  inputs.inv_scale = report->inv_scale.const_data_ptr<float>();
  inputs.found_inf = report->found_inf.const_data_ptr<float>();
  if (report->sum_of_squares.defined()) {
    inputs.sum_of_squares = report->sum_of_squares.const_data_ptr<double>();
  }
  return inputs;
}

template <class Traits>
void ElementwiseOptimizer<Traits>::step_on_cuda(Many& all, const GradientReport& report,
                                                const StepOptions& options, bool counts_applied) {
  for (One& one : all) open_state(one);
  const at::Device device = all.front().parameter->device();
  StepInputs inputs = step_inputs(report_on(device, report), options);
  inputs.clear = inputs.clear && !shares_gradients(all);
  const at::Tensor applied = applied_on(device, counts_applied);
  const at::Tensor& factors = lr_factors_on(device);
  if (factors.defined()) {
    inputs.applied = applied.template const_data_ptr<float>();
    inputs.lr_factors = factors.template const_data_ptr<double>();
    inputs.lr_factor_count = factors.numel();
  }
  Prepared prepared;
  std::vector<StepGroup<Constants>> groups;
  std::vector<StepRow> rows = rows_of(all, inputs.clear, groups, prepared);
  std::vector<float*> counters = place_counters(all, device, rows);
  cuda::begin_step_(device, table_memory());
  cuda::step_(device, rows, groups, inputs, table_memory());
  if (counts_applied) counters.push_back(applied.template mutable_data_ptr<float>());
  if (!counters.empty()) {
    cuda::count_steps_(device, counters, inputs.found_inf, table_memory());
  }
  finish(all, options.zero_grad && !inputs.clear, prepared);
}

/// What the kernels are told of the parameters, but for the counters; and of their `groups`.
template <class Traits>
std::vector<StepRow> ElementwiseOptimizer<Traits>::rows_of(
    const Many& all, bool clear, std::vector<StepGroup<Constants>>& groups, Prepared& prepared) {
  std::vector<StepRow> rows;
  const Options* options = nullptr;
  for (const One& one : all) {
    StepUse use{.copies_half = publishes() && published_dtype() == at::kHalf};
    use_of(one, use);
    if (one.options != options) {
      options = one.options;
      groups.push_back({Traits::constants(*options), options->lr(), use.seed});
    }
    const bool has_master = one.storage == optim::WeightStorage::master;
    rows.push_back({span_of(one, clear, prepared), nullptr, static_cast<int>(groups.size()) - 1,
                    static_cast<int>(one.number), Traits::variant(*options), use.copies_half,
                    one.storage, has_master ? at::kFloat : one.parameter->scalar_type(),
                    one.gradient.scalar_type()});
  }
  return rows;
}

/// Where the rows' steps are counted.
template <class Traits>
std::vector<float*> ElementwiseOptimizer<Traits>::place_counters(const Many& all, at::Device device,
                                                                 std::vector<StepRow>& rows) {
  restart_counts(all);
  std::vector<StepCount> counts;
  for (const One& one : all) {
    if (one.state != nullptr) counts.push_back(one.state->count());
  }
  const std::vector<at::Tensor> on_device = counts_on(device, counts);
  std::vector<float*> counters;
  auto next = on_device.begin();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (all[i].state == nullptr) continue;
    rows[i].count = (next++)->template mutable_data_ptr<float>();
    counters.push_back(rows[i].count);
  }
  return counters;
}

#endif

template <class Traits>
void ElementwiseOptimizer<Traits>::restart_counts(const Many& all) {
  for (const One& one : all) {
    if (one.begins) one.state->count().overwrite(0);
  }
}

/// How many steps were applied, as a float on `device`; a copy where another device counts, unless
/// this one is to count from here on.
template <class Traits>
at::Tensor ElementwiseOptimizer<Traits>::applied_on(at::Device device, bool counts_there) {
  const at::Tensor& count = applied_on_device();
  if (!counts_there && count.defined() && count.device() != device)
    return count.to(device, /*non_blocking=*/true);
  return counts_on(device, {applied_count()}).front();
}

/// What one call of ATen's kernel takes.
template <class Traits>
struct ElementwiseOptimizer<Traits>::AtenCall {
  const Options* options;
  bool counted;
  AtenLists lists;
};

/// Before anything is written, or counted.
template <class Traits>
void ElementwiseOptimizer<Traits>::check_for_aten(const One& one) const {
  TORCH_CHECK(Traits::kAtenHasIt, Traits::kName, ": ", words().parameter(*one.parameter),
              " has gradients, and ATen has no kernel of this optimizer; link the CMake target "
              "mezzo::cuda, or keep the parameters on the CPU");
  TORCH_CHECK(
      one.storage == optim::WeightStorage::plain || one.storage == optim::WeightStorage::master,
      Traits::kName, ": WeightStorage::split_master and stochastic need mezzo's kernels, which ",
      "there are for the CPU, and for CUDA where the CMake target mezzo::cuda is linked; ",
      words().parameter(*one.parameter), " has none; use WeightStorage::master there");
  if constexpr (Traits::kAtenHasIt) Traits::check_for_aten(*one.options);
}

/// ATen's fused optimizers write without bumping: autograd would not notice, nor a WeightCache.
inline void bump_versions(const AtenLists& lists) {
  const auto bump = [](const std::vector<at::Tensor>& written) {
    for (const at::Tensor& tensor : written) bump_version(*tensor.unsafeGetTensorImpl());
  };
  bump(lists.parameters);
  bump(lists.gradients);
  for (const std::vector<at::Tensor>& moments : lists.moments) bump(moments);
}

inline AtenVerdict aten_verdict(const DeviceGradientReport* report, double max_norm) {
  if (report == nullptr) return {};
  at::Tensor factor = report->inv_scale;
  const bool clips = max_norm != std::numeric_limits<double>::infinity();
  if (clips && report->sum_of_squares.defined()) {
    const at::Tensor norm = report->sum_of_squares.sqrt();
    factor = norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0).mul(factor);
  }
  return {factor.reciprocal().to(at::kFloat), report->found_inf, std::nullopt};
}

/// With counts one higher than they were, as ATen's kernels want them, which is taken back where
/// the step is skipped, and from the calls that ATen refused.
template <class Traits>
void ElementwiseOptimizer<Traits>::make_calls(std::vector<AtenCall>& calls,
                                              const std::vector<at::Tensor>& counts,
                                              const AtenVerdict& verdict) {
  if (!counts.empty()) add_to_counts(counts, at::ones({}, counts.front().options()));
  auto next = counts.begin();
  try {
    for (AtenCall& call : calls) {
      const auto size = static_cast<std::ptrdiff_t>(call.lists.parameters.size());
      if (call.counted) call.lists.counts.assign(next, next + size);
      if constexpr (Traits::kAtenHasIt) Traits::aten_step(*call.options, call.lists, verdict);
      bump_versions(call.lists);
      if (call.counted) next += size;
    }
  } catch (...) {
    const std::vector<at::Tensor> left(next, counts.end());
    if (!left.empty()) add_to_counts(left, at::full({}, -1, left.front().options()));
    throw;
  }
  if (!counts.empty() && verdict.found_inf) {
    add_to_counts(counts, verdict.found_inf->ne(0).to(at::kFloat).neg());
  }
}

template <class Traits>
void ElementwiseOptimizer<Traits>::step_with_aten(Many& all, const GradientReport& report,
                                                  const StepOptions& options) {
  for (const One& one : all) check_for_aten(one);
  for (One& one : all) open_state(one);
  const at::Device device = all.front().parameter->device();
  AtenVerdict verdict = aten_verdict(report_on(device, report), options.max_norm);
  const at::Tensor& factors = lr_factors_on(device);
  if (factors.defined()) {
    const at::Tensor number =
        applied_on(device, /*counts_there=*/false).clamp_max(factors.numel() - 1).to(at::kLong);
    verdict.lr_factor = factors.take(number).to(at::kFloat);
  }
  Prepared prepared;
  std::vector<AtenCall> calls;
  std::vector<StepCount> counts;
  // ATen's kernels write unscaled gradients back, and a step leaves gradients as they are. What is
  // cleared in the end they may write, unless one is shared: that would be unscaled twice.
  const bool copies_gradients =
      verdict.grad_scale.has_value() && (!options.zero_grad || shares_gradients(all));
  for (const One& one : all) {
    add_to_call(one, copies_gradients, calls, counts, prepared.copies);
  }
  restart_counts(all);
  const auto write_back = [&] {
    for (const auto& [original, copy] : prepared.copies) original.copy_(copy);
  };
  try {
    make_calls(calls, counts_on(device, counts), verdict);
  } catch (...) {
    write_back();  // of the calls before the one that threw
    throw;
  }
  write_back();
  stamp_all(all);
  if (options.zero_grad) clear_gradients(all);
}

/// Participants come group by group, and so do those of a call.
template <class Traits>
void ElementwiseOptimizer<Traits>::add_to_call(
    const One& one, bool copies_gradient, std::vector<AtenCall>& calls,
    std::vector<StepCount>& counts, std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
  const NoGraphGuard no_graph(one.parameter->is_inference());
  settle(one);
  at::Tensor parameter = dense_parameter(*one.parameter);
  if (!parameter.is_same(*one.parameter)) copies.emplace_back(*one.parameter, parameter);
  if (one.state != nullptr && one.state->master().defined()) {
    one.state->master() = in_layout_of(parameter, one.state->master());
  }
  const at::Tensor dense = parameter;
  if (one.storage == optim::WeightStorage::master) {
    copies.emplace_back(*one.parameter, parameter = one.state->master());
  }
  const bool joins = !calls.empty() && calls.back().options == one.options &&
                     calls.back().counted == (one.state != nullptr) &&
                     calls.back().lists.parameters.back().scalar_type() == parameter.scalar_type();
  if (!joins) calls.push_back({one.options, one.state != nullptr, {}});
  AtenLists& lists = calls.back().lists;
  lists.parameters.push_back(parameter);
  const bool is_written_back = !copies_gradient && !one.gradient.is_inference();
  const at::Tensor gradient = is_written_back ? one.gradient : one.gradient.clone();
  lists.gradients.push_back(in_layout_of(parameter, gradient.to(parameter.scalar_type())));
  if (one.state == nullptr) return;
  counts.push_back(one.state->count());
  for (int k = 0; k < Traits::moments(*one.options); ++k) {
    lists.moments[static_cast<std::size_t>(k)].push_back(fitting_moment(one, k, dense));
  }
}

/// Notes that what the states keep of the weights agrees with them.
template <class Traits>
void ElementwiseOptimizer<Traits>::stamp_all(const Many& all) {
  for (const One& one : all) {
    if (one.state != nullptr) one.state->stamp() = WriteStamp::of(*one.parameter);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
