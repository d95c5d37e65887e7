#pragma once

#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>

// Report and step; the step on the CPU, and what it shares with that on CUDA: which memory is read
// and written.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Traits>
GradientReport ElementwiseOptimizer<Traits>::report(const at::Tensor& inv_scale, bool of_masters) {
  const c10::NoGradGuard no_grad;
  make_plan(of_masters);
  plan_.number = ++last_plan_;
  GradientReport report{
      .of_masters = of_masters, .has_bare_half = plan_.has_bare_half, .plan = plan_.number};
  for (const DeviceParticipants<Traits>& on_one : plan_.devices) {
    DeviceGradientReport& one = report.devices.emplace_back();
    one.inv_scale = on_device(inv_scale, on_one.device);
    one.gradients.reserve(on_one.participants.size());
    for (const One& participant : on_one.participants) {
      one.gradients.push_back(participant.gradient);
    }
    note(summarize_gradients(one.gradients, one.inv_scale, &table_memory()), one);
  }
  return report;
}

template <class Traits>
void ElementwiseOptimizer<Traits>::apply_with(const GradientReport& report,
                                              const StepOptions& options, bool with_aten) {
  try {
    if (!is_planned(report)) make_plan(report.of_masters);
    apply_plan(report, options, with_aten);
  } catch (...) {
    plan_.clear();
    throw;
  }
  plan_.clear();
}

template <class Traits>
void ElementwiseOptimizer<Traits>::apply_plan(const GradientReport& report,
                                              const StepOptions& options, bool with_aten) {
  const NoGraphGuard no_graph(plan_.has_inference);
  StepOptions own = options;
  own.zero_grad = options.zero_grad && !report.of_masters;  // masters' gradients end with the step
  bool is_counted = false;
  for (auto& [device, participants] : plan_.devices) {
    if (with_aten) {
      step_with_aten(participants, report, own);
    } else if (has_cpu_loops(device)) {
      step_cpu(participants, report, own);
    } else {
      is_counted = step_on_device(participants, report, own, plan_.devices.size() == 1);
    }
  }
  if (!is_counted) count_applied(report);
  average(report);
  if (options.zero_grad && report.of_masters) zero_gradients(*this);
}

template <class Traits>
const DeviceGradientReport* ElementwiseOptimizer<Traits>::report_on(at::Device device,
                                                                    const GradientReport& report) {
  for (const DeviceGradientReport& one : report.devices) {
    if (one.inv_scale.device() == device) return &one;
  }
  TORCH_CHECK(report.devices.empty(), Traits::kName, ": the report has no entry for ", device,
              ", where there are gradients; take report() of this optimizer as it is now");
  return nullptr;
}

/// Then no gradient may be cleared before all are read. Gradients that are cleared mostly stay the
/// same tensors from step to step.
template <class Traits>
bool ElementwiseOptimizer<Traits>::shares_gradients(const Many& all) {
  seen_gradients_.begin();
  for (const One& one : all) seen_gradients_.see(one.gradient);
  if (!seen_gradients_.end()) return shared_gradients_;
  std::vector<at::Tensor> gradients;
  gradients.reserve(all.size());
  for (const One& one : all) gradients.push_back(one.gradient);
  return shared_gradients_ = may_overlap(gradients);
}

template <class Traits>
void ElementwiseOptimizer<Traits>::clear_gradients(const Many& all) {
  for (const One& one : all) clear_gradient(one.gradient);
}

/// The device that decides whether steps are applied counts them. Of several, one speaks for all:
/// they step together or not at all.
template <class Traits>
at::Device ElementwiseOptimizer<Traits>::counting_device() const {
  const at::Tensor& count = applied_on_device();
  for (const DeviceParticipants<Traits>& one : plan_.devices) {
    if (count.defined() && one.device == count.device()) return one.device;
  }
  return plan_.devices.front().device;
}

template <class Traits>
void ElementwiseOptimizer<Traits>::count_applied(const GradientReport& report) {
  if (plan_.devices.empty()) return;
  const at::Device device = counting_device();
  const DeviceGradientReport* const own = report_on(device, report);
  count_step(applied_count(), device, own == nullptr ? at::Tensor() : own->found_inf);
}

/// What to multiply gradients with on the CPU; none when the step is to be skipped.
template <class Traits>
std::optional<double> ElementwiseOptimizer<Traits>::gradient_factor(const GradientReport& report,
                                                                    double max_norm) {
  const DeviceGradientReport* const own = report_on(at::kCPU, report);
  if (own == nullptr) return 1.0;
  if (*own->found_inf.template const_data_ptr<float>() != 0.0F) return std::nullopt;
  const double factor = *own->inv_scale.template const_data_ptr<float>();
  if (!own->sum_of_squares.defined()) return factor;
  return factor *
         clip_coefficient(*own->sum_of_squares.template const_data_ptr<double>(), max_norm);
}

template <class Traits>
void ElementwiseOptimizer<Traits>::step_cpu(Many& all, const GradientReport& report,
                                            const StepOptions& options) {
  const std::optional<double> factor = gradient_factor(report, options.max_norm);
  const bool clear = options.zero_grad;
  if (!factor) {
    if (clear) clear_gradients(all);
    return;
  }
  const bool clears_on_the_way = clear && !shares_gradients(all);
  const StepUse use{.factor = *factor,
                    .clear = clears_on_the_way,
                    .copies_half = publishes() && published_dtype() == at::kHalf};
  Prepared prepared;
  prepared.tasks.reserve(all.size());
  prepared.counts.reserve(all.size());
  prepared.written.reserve(4 * all.size());
  if (!lr_factors().empty()) prepared.lr_factor = lr_factor(applied_steps());
  for (One& one : all) prepare(one, use, prepared);
  run_step_cpu(prepared.tasks);
  for (const auto& [count, value] : prepared.counts) count.set(value);
  finish(all, clear && !clears_on_the_way, prepared);
}

template <class Traits>
void ElementwiseOptimizer<Traits>::prepare(One& one, const StepUse& use, Prepared& prepared) {
  open_state(one);
  int64_t count = 1;
  if (one.state != nullptr) {
    count = (one.begins ? 0 : one.state->step()) + 1;
    prepared.counts.emplace_back(one.state->count(), count);
  }
  set_coefficients(one, count, prepared);
  const StepSpan span = span_of(one, use.clear, prepared);
  StepUse own_use = use;
  use_of(one, own_use);
  own_use.step = static_cast<uint64_t>(count);
  prepared.tasks.push_back({one.run, span, element_sizes(one), prepared.coefficients, own_use});
}

/// What of a step's use is the parameter's own.
template <class Traits>
void ElementwiseOptimizer<Traits>::use_of(const One& one, StepUse& use) {
  use.average_share = 1.0 - one.options->ema_decay();
  use.seed = one.options->seed();
  use.parameter = one.number;
  if (one.storage == optim::WeightStorage::master) {
    use.copies_half = one.parameter->scalar_type() == at::kHalf;
  }
}

template <class Traits>
StepElementSizes ElementwiseOptimizer<Traits>::element_sizes(const One& one) {
  const bool has_master = one.storage == optim::WeightStorage::master;
  const auto own = static_cast<int64_t>(one.parameter->element_size());
  return {
      .parameter = has_master ? int64_t{sizeof(float)} : own,
      .gradient = static_cast<int64_t>(one.gradient.element_size()),
      .moment = static_cast<int64_t>(c10::elementSize(moment_dtype(*one.parameter, one.storage))),
      .average = std::max(own, int64_t{sizeof(float)})};
}

/// Brings what the state keeps of the weights in line with them; of most, it keeps nothing.
template <class Traits>
void ElementwiseOptimizer<Traits>::settle(const One& one) {
  if (one.state == nullptr) return;
  const bool keeps_weights = one.storage == optim::WeightStorage::master ||
                             one.storage == optim::WeightStorage::split_master;
  if (keeps_weights || one.state->master().defined() || one.state->lower_half().defined()) {
    settle_weights(*one.parameter, one.storage, *one.state);
  }
  if (one.options->ema_decay() != 0 || one.state->ema().defined()) {
    settle_average(*one.parameter, one.options->ema_decay(), *one.state);
  }
}

/// The memory that a step of `one` reads and writes. Settles first: that may write the parameter,
/// and a lazy copy moves when its memory is asked for. What it makes for an ordinary parameter are
/// plain tensors, whatever the others of the step are.
template <class Traits>
StepSpan ElementwiseOptimizer<Traits>::span_of(const One& one, bool clear, Prepared& prepared) {
  std::optional<NoGraphGuard> no_graph;
  if (plan_.has_inference) no_graph.emplace(one.parameter->is_inference());
  settle(one);
  const at::Tensor parameter = dense_parameter(*one.parameter);
  if (!parameter.is_same(*one.parameter)) prepared.copies.emplace_back(*one.parameter, parameter);
  const at::Tensor gradient = in_layout_of(parameter, one.gradient);
  if (!gradient.is_same(one.gradient)) {
    if (clear) prepared.uncleared.push_back(one.gradient);
    prepared.gradients.push_back(gradient);
  }
  StepSpan span{parameter.mutable_data_ptr(),
                clear ? gradient.mutable_data_ptr() : const_cast<void*>(gradient.const_data_ptr()),
                {},
                parameter.numel()};
  if (one.state != nullptr) {
    for (int k = 0; k < Traits::moments(*one.options); ++k) {
      const at::Tensor& moment = fitting_moment(one, k, parameter);
      span.moments[k] = moment.mutable_data_ptr();
      prepared.written.push_back(moment.unsafeGetTensorImpl());
    }
  }
  place_weights(one, parameter, span, prepared);
  prepared.written.push_back(parameter.unsafeGetTensorImpl());
  if (clear) prepared.written.push_back(gradient.unsafeGetTensorImpl());
  return span;
}

/// What is kept, or written, of the weights beside the parameter.
template <class Traits>
void ElementwiseOptimizer<Traits>::place_weights(const One& one, const at::Tensor& parameter,
                                                 StepSpan& span, Prepared& prepared) {
  if (one.state != nullptr) {
    for (at::Tensor* kept : {&one.state->master(), &one.state->lower_half(), &one.state->ema()}) {
      if (!kept->defined()) continue;
      *kept = in_layout_of(parameter, *kept);
      prepared.written.push_back(kept->unsafeGetTensorImpl());
    }
    if (one.state->ema().defined()) span.average = one.state->ema().mutable_data_ptr();
  }
  if (one.storage == optim::WeightStorage::master) {
    span.low_half_or_copy = span.parameter;
    span.parameter = one.state->master().mutable_data_ptr();
  } else if (one.storage == optim::WeightStorage::split_master) {
    span.low_half_or_copy = one.state->lower_half().mutable_data_ptr();
  } else if (publishes() && parameter.scalar_type() == at::kFloat &&
             parameter.is_same(*one.parameter)) {
    const at::Tensor copy = copy_for(parameter);
    if (!copy.defined()) return;
    span.low_half_or_copy = copy.mutable_data_ptr();
    prepared.published.emplace_back(parameter, copy);
  }
}

/// What could not be done on the way, and what was done becomes known. What may throw comes last:
/// another thread may have taken the room in the cache.
template <class Traits>
void ElementwiseOptimizer<Traits>::finish(const Many& all, bool clear_all,
                                          const Prepared& prepared) {
  for (const auto& [original, copy] : prepared.copies) original.copy_(copy);
  for (const at::Tensor& gradient : prepared.uncleared) clear_gradient(gradient);
  if (clear_all) clear_gradients(all);
  for (c10::TensorImpl* written : prepared.written) bump_version(*written);
  for (const One& one : all) {
    if (one.state == nullptr) continue;
    const bool keeps_weights = one.state->master().defined() || one.state->lower_half().defined();
    if (keeps_weights) one.state->stamp() = WriteStamp::of(*one.parameter);
  }
  if (!prepared.published.empty()) publish(prepared.published);
}

/// Powers are dear, and parameters of a group mostly have the same count.
template <class Traits>
void ElementwiseOptimizer<Traits>::set_coefficients(const One& one, int64_t count,
                                                    Prepared& prepared) {
  if (prepared.options == one.options && prepared.count == count) return;
  prepared.options = one.options;
  prepared.count = count;
  prepared.coefficients =
      Traits::constants(*one.options).at(one.options->lr() * prepared.lr_factor, count);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
