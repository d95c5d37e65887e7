#pragma once

#include <mezzo/detail/kernels/gradient_use.h>
#include <mezzo/detail/kernels/optimizer_step_cpu.h>
#include <mezzo/detail/optim/aten_step.h>
#include <mezzo/detail/optim/dense_memory.h>
#include <mezzo/detail/optim/step_count.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The steps of an optimizer whose update looks at one element of a parameter at a time.
///
/// Traits say what is AdamW's, SGD's ... own:
///   kName; Options and State, as libtorch's serialization wants them; Constants and Coefficients,
///   the numbers of a group and of one step (adam_element.h);
///   check(options), constants(options), step_function(options, parameter dtype, gradient dtype);
///   moments(options), how many there are, and moment(state, k), the k-th; has_state(options),
///   whether anything is remembered of a parameter; count(state).
template <class Traits>
class ElementwiseOptimizer : public optim::FusedOptimizer {
 public:
  using Options = typename Traits::Options;
  using State = typename Traits::State;

  ElementwiseOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       const Options& defaults)
      : FusedOptimizer(groups, std::make_unique<Options>(defaults)) {
    Traits::check(defaults);
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      Traits::check(options_of(group));
    }
  }

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const c10::AutoGradMode enable_grad(true);
      loss = closure();
    }
    fused_step({});
    return loss;
  }

  void fused_step(const optim::FusedStep& step) override {
    const c10::NoGradGuard no_grad;
    for (const auto& [device, participants] : participants_by_device()) {
      if (device.is_cpu()) {
        step_cpu(participants, step);
      } else {
        step_on_device(participants, step);
      }
    }
  }

  /// The step through ATen's fused kernels, which on the CPU too are there to be tested.
  void fused_step_with_aten(const optim::FusedStep& step) {
    const c10::NoGradGuard no_grad;
    for (const auto& [device, participants] : participants_by_device()) {
      step_with_aten(participants, step);
    }
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }

  void load(torch::serialize::InputArchive& archive) override {
    c10::IValue version;
    TORCH_CHECK(archive.try_read("pytorch_version", version), Traits::kName,
                ": the archive holds no optimizer's state, or that of a libtorch before 1.5; save "
                "it with torch::save(optimizer, path)");
    torch::optim::serialize<State, Options>(archive, *this);
  }

 private:
  using Constants = typename Traits::Constants;
  using Coefficients = typename Traits::Coefficients;
  using Task = StepTask<Coefficients>;

  /// A parameter with a gradient.
  struct Participant {
    const at::Tensor* parameter;
    at::Tensor gradient;
    const Options* options;
    StepFunction<Coefficients> run;
  };

  const Options& options_of(std::size_t group) const {
    const auto* options = dynamic_cast<const Options*>(&param_groups_[group].options());
    TORCH_CHECK(options != nullptr, Traits::kName, ": the options of parameter group ", group,
                " are not mezzo::optim::", Traits::kName, "Options; make the group with those");
    return *options;
  }

  struct DeviceParticipants {
    at::Device device;
    std::vector<Participant> participants;
  };

  /// All is checked before anything is written.
  std::vector<DeviceParticipants> participants_by_device() const {
    std::vector<DeviceParticipants> all;
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      const Options& options = options_of(group);
      Traits::check(options);
      for (const at::Tensor& parameter : param_groups_[group].params()) {
        const at::Tensor& gradient = parameter.grad();
        if (!gradient.defined()) continue;
        const auto run = checked_function(options, parameter, gradient);
        const at::Device device = parameter.device();
        if (all.empty() || all.back().device != device) select_device(all, device);
        all.back().participants.push_back({&parameter, gradient, &options, run});
      }
    }
    return all;
  }

  /// Makes `device`'s entry the last.
  static void select_device(std::vector<DeviceParticipants>& all, at::Device device) {
    for (DeviceParticipants& one : all) {
      if (one.device != device) continue;
      std::swap(one, all.back());
      return;
    }
    all.push_back({device, {}});
  }

  static StepFunction<Coefficients> checked_function(const Options& options,
                                                     const at::Tensor& parameter,
                                                     const at::Tensor& gradient) {
    TORCH_CHECK(gradient.layout() == at::kStrided && parameter.layout() == at::kStrided,
                Traits::kName, " takes dense parameters and gradients, and has one of the layout ",
                gradient.layout(), "; torch::optim::SGD takes sparse ones");
    TORCH_CHECK(gradient.device() == parameter.device(), Traits::kName, ": a parameter is on ",
                parameter.device(), " and its gradient on ", gradient.device());
    TORCH_CHECK(gradient.sizes() == parameter.sizes(), Traits::kName,
                ": a parameter has the shape ", parameter.sizes(), " and its gradient ",
                gradient.sizes());
    const auto run =
        Traits::step_function(options, parameter.scalar_type(), gradient.scalar_type());
    TORCH_CHECK(run != nullptr, Traits::kName, " takes parameters of float, double, bfloat16 and ",
                "half with gradients of the same dtype, float ones also with gradients of bfloat16 "
                "and half, double ones with float; here a parameter is of ",
                parameter.scalar_type(), " and its gradient of ", gradient.scalar_type());
    return run;
  }

  State& state_of(const at::Tensor& parameter) {
    auto& slot = state_[parameter.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<State>();
    return static_cast<State&>(*slot);
  }

  /// The k-th moment, in memory laid out as the parameter's: made when there is none yet, and
  /// converted when it was loaded from elsewhere.
  static at::Tensor& fitting_moment(State& state, int k, const at::Tensor& parameter) {
    at::Tensor& moment = Traits::moment(state, k);
    if (!moment.defined()) {
      moment = at::zeros_like(parameter, at::MemoryFormat::Preserve);
      return moment;
    }
    TORCH_CHECK(moment.sizes() == parameter.sizes(), Traits::kName,
                ": the state of a parameter of the shape ", parameter.sizes(),
                " has a moment of the shape ", moment.sizes(), "; it is another model's");
    if (moment.scalar_type() != parameter.scalar_type() || moment.device() != parameter.device()) {
      moment = moment.to(parameter.options().requires_grad(false));
    }
    moment = in_layout_of(parameter, moment);
    return moment;
  }

  static const optim::DeviceVerdict* verdict_on(at::Device device, const optim::FusedStep& step) {
    for (const optim::DeviceVerdict& verdict : step.verdicts) {
      if (verdict.inv_scale.device() == device) return &verdict;
    }
    TORCH_CHECK(step.verdicts.empty(), Traits::kName, ": the step has no verdict for ", device,
                ", where there are gradients");
    return nullptr;
  }

  /// What to multiply gradients with on the CPU; none when the step is to be skipped.
  static std::optional<double> gradient_factor(const optim::FusedStep& step) {
    const optim::DeviceVerdict* const verdict = verdict_on(at::kCPU, step);
    if (verdict == nullptr) return 1.0;
    if (*verdict->found_inf.template const_data_ptr<float>() != 0.0F) return std::nullopt;
    const double factor = *verdict->inv_scale.template const_data_ptr<float>();
    if (!verdict->sum_of_squares.defined()) return factor;
    return factor * clip_coefficient(*verdict->sum_of_squares.template const_data_ptr<double>(),
                                     step.options.max_norm);
  }

  void step_cpu(const std::vector<Participant>& all, const optim::FusedStep& step) {
    const std::optional<double> factor = gradient_factor(step);
    const bool clear = step.options.zero_grad;
    if (!factor) {
      if (clear) {
        for (const Participant& one : all) one.gradient.zero_();
      }
      return;
    }
    Prepared prepared;
    prepared.tasks.reserve(all.size());
    for (const Participant& one : all) prepare(one, clear, prepared);
    run_step_cpu(prepared.tasks, {*factor, clear});
    for (const auto& [original, copy] : prepared.copies) original.copy_(copy);
    for (auto& [count, value] : prepared.counts) count->set(value);
  }

  /// What a step on the CPU is made of.
  struct Prepared {
    std::vector<Task> tasks;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (what has gaps, its dense copy)
    std::vector<at::Tensor> gradients;                      // kept alive; some are copies
    std::vector<std::pair<StepCount*, int64_t>> counts;     // what they are after the step
    const Options* options = nullptr;  // whose coefficients are those of the last task
    int64_t count = 0;
    Coefficients coefficients{};
  };

  void prepare(const Participant& one, bool clear, Prepared& prepared) {
    const at::Tensor parameter = dense_parameter(*one.parameter);
    if (!parameter.is_same(*one.parameter)) prepared.copies.emplace_back(*one.parameter, parameter);
    const at::Tensor gradient = in_layout_of(parameter, one.gradient);
    if (clear && !gradient.is_same(one.gradient))
      prepared.copies.emplace_back(one.gradient, gradient);
    State* const state = Traits::has_state(*one.options) ? &state_of(*one.parameter) : nullptr;
    int64_t count = 1;
    if (state != nullptr) {
      count = Traits::count(*state).value() + 1;
      prepared.counts.emplace_back(&Traits::count(*state), count);
    }
    set_coefficients(one, count, prepared);
    StepSpan span{
        parameter.mutable_data_ptr(),
        clear ? gradient.mutable_data_ptr() : const_cast<void*>(gradient.const_data_ptr()),
        {},
        parameter.numel()};
    for (int k = 0; k < Traits::moments(*one.options); ++k) {
      const at::Tensor& moment = fitting_moment(*state, k, parameter);
      span.moments[static_cast<std::size_t>(k)] = moment.mutable_data_ptr();
      moment.unsafeGetTensorImpl()->bump_version();
    }
    parameter.unsafeGetTensorImpl()->bump_version();  // autograd does not see raw writes
    if (clear) gradient.unsafeGetTensorImpl()->bump_version();
    prepared.tasks.push_back({one.run, span, static_cast<int64_t>(parameter.element_size()),
                              static_cast<int64_t>(gradient.element_size()),
                              prepared.coefficients});
    prepared.gradients.push_back(gradient);
  }

  /// Powers are dear, and parameters of a group mostly have the same count.
  static void set_coefficients(const Participant& one, int64_t count, Prepared& prepared) {
    if (prepared.options == one.options && prepared.count == count) return;
    prepared.options = one.options;
    prepared.count = count;
    prepared.coefficients = Traits::constants(*one.options).at(one.options->lr(), count);
  }

  void step_on_device(const std::vector<Participant>& all, const optim::FusedStep& step) {
    step_with_aten(all, step);
  }

  /// What one call of ATen's kernel takes.
  struct AtenCall {
    const Options* options;
    AtenLists lists;
  };

  void step_with_aten(const std::vector<Participant>& all, const optim::FusedStep& step) {
    const at::Device device = all.front().parameter->device();
    const AtenVerdict verdict = aten_verdict(verdict_on(device, step), step.options.max_norm);
    Prepared prepared;
    std::vector<AtenCall> calls;
    std::vector<StepCount*> counts;
    for (const Participant& one : all) add_to_call(one, calls, counts, prepared.copies);
    count_on_device(device, counts, verdict, [&](const std::vector<at::Tensor>& after) {
      auto next = after.begin();
      for (AtenCall& call : calls) {
        if (Traits::has_state(*call.options)) {
          const auto size = static_cast<std::ptrdiff_t>(call.lists.parameters.size());
          call.lists.counts.assign(next, next + size);
          next += size;
        }
        Traits::aten_step(*call.options, call.lists, verdict);
      }
    });
    for (const auto& [original, copy] : prepared.copies) original.copy_(copy);
    if (!step.options.zero_grad) return;
    for (const Participant& one : all) one.gradient.zero_();
  }

  /// Runs `step` with counts one higher than they were, and takes that back if the step is skipped.
  template <class Step>
  static void count_on_device(at::Device device, const std::vector<StepCount*>& counts,
                              const AtenVerdict& verdict, const Step& step) {
    const std::vector<at::Tensor> tensors = counts_on(device, counts);
    const at::Tensor one = at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
    if (!tensors.empty()) add_to_counts(tensors, one);
    step(tensors);
    if (!tensors.empty() && verdict.found_inf) {
      add_to_counts(tensors, verdict.found_inf->ne(0).to(at::kFloat).neg());
    }
  }

  /// Participants come group by group, and so do those of a call.
  void add_to_call(const Participant& one, std::vector<AtenCall>& calls,
                   std::vector<StepCount*>& counts,
                   std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
    const at::Tensor parameter = dense_parameter(*one.parameter);
    if (!parameter.is_same(*one.parameter)) copies.emplace_back(*one.parameter, parameter);
    const bool joins =
        !calls.empty() && calls.back().options == one.options &&
        calls.back().lists.parameters.back().scalar_type() == parameter.scalar_type();
    if (!joins) calls.push_back({one.options, {}});
    AtenLists& lists = calls.back().lists;
    lists.parameters.push_back(parameter);
    lists.gradients.push_back(in_layout_of(parameter, one.gradient.to(parameter.scalar_type())));
    if (!Traits::has_state(*one.options)) return;
    State& state = state_of(*one.parameter);
    counts.push_back(&Traits::count(state));
    for (int k = 0; k < Traits::moments(*one.options); ++k) {
      lists.moments[static_cast<std::size_t>(k)].push_back(fitting_moment(state, k, parameter));
    }
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
