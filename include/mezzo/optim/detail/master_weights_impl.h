#pragma once

#include <mezzo/base/detail/cast_cache.h>
#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/param_slot.h>
#include <mezzo/optim/master_weights.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- The inner optimizer for the time of a step ------------------------------------------------

// The state of libtorch's optimizers is what it was made like, and some of it is made like the
// parameter: Adagrad's sum by the constructor, all of it by steps that were taken without masters.
// An optimizer goes on in the state's dtype, and a running mean in 16 bits does not run.

inline void widen(std::initializer_list<at::Tensor*> tensors) {
  for (at::Tensor* tensor : tensors) {
    if (tensor->defined() && is_low_precision(*tensor)) *tensor = tensor->to(at::kFloat);
  }
}

template <class State>
bool widen_adam_state(torch::optim::OptimizerParamState& state) {
  auto* const adam = dynamic_cast<State*>(&state);
  if (adam == nullptr) return false;
  widen({&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()});
  return true;
}

/// Makes the state of an optimizer of libtorch's float, where it is of 16 bits. Adagrad makes its
/// sum in the constructor, and rounds the value that it begins with: a sum that is new begins anew.
inline void widen_state(torch::optim::OptimizerParamState& state,
                        const torch::optim::OptimizerOptions& options) {
  if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
    widen({&sgd->momentum_buffer()});
  } else if (auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) {
    const bool is_new = adagrad->step() == 0 && is_low_precision(adagrad->sum());
    widen({&adagrad->sum()});
    const auto* const own = dynamic_cast<const torch::optim::AdagradOptions*>(&options);
    if (is_new && own != nullptr) adagrad->sum().fill_(own->initial_accumulator_value());
  } else if (auto* const rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) {
    widen({&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()});
  } else if (!widen_adam_state<torch::optim::AdamParamState>(state)) {
    widen_adam_state<torch::optim::AdamWParamState>(state);
  }
}

/// For the time of one step an optimizer finds masters where its parameters were: in the groups,
/// and with the parameters' state. The end of the scope puts everything back where it belongs, what
/// the step has made meanwhile too.
class ParameterSwap {
 public:
  explicit ParameterSwap(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}
  ParameterSwap(const ParameterSwap&) = delete;
  ParameterSwap& operator=(const ParameterSwap&) = delete;

  ~ParameterSwap() {
    exchange(parameters_);
    for (auto lent = gradients_.rbegin(); lent != gradients_.rend(); ++lent) {  // one may be twice
      lent->first.mutable_grad() = lent->second;
    }
    for (const auto& [group, lr] : lrs_) {
      optimizer_.param_groups()[group].options().set_lr(lr);
    }
  }

  /// `tensor` has another gradient until the end.
  void lend_gradient(const at::Tensor& tensor, at::Tensor gradient) {
    gradients_.emplace_back(tensor, tensor.grad());
    tensor.mutable_grad() = std::move(gradient);
  }

  /// The groups have the rates `lrs` until the end.
  void lend_lrs(const std::vector<double>& lrs) {
    auto& groups = optimizer_.param_groups();
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const double lr = groups[group].options().get_lr();
      groups[group].options().set_lr(lrs[group]);  // options of your own may refuse
      lrs_.emplace_back(group, lr);
    }
  }

  /// All at once, for the groups are walked.
  void put_in(const std::vector<std::pair<at::Tensor, at::Tensor>>& parameters_and_masters) {
    Places masters;
    for (const auto& [parameter, master] : parameters_and_masters) {
      masters.emplace(parameter.unsafeGetTensorImpl(), master);
      parameters_.emplace(master.unsafeGetTensorImpl(), parameter);
    }
    for (auto& group : optimizer_.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (masters.count(parameter.unsafeGetTensorImpl()) == 0) continue;
        const auto state = optimizer_.state().find(parameter.unsafeGetTensorImpl());
        if (state != optimizer_.state().end()) widen_state(*state->second, group.options());
      }
    }
    exchange(masters);
  }

 private:
  using Places = std::unordered_map<c10::TensorImpl*, at::Tensor>;

  /// Puts each tensor where the one that it is named under is.
  void exchange(const Places& places) {
    if (places.empty()) return;
    for (auto& group : optimizer_.param_groups()) {
      for (at::Tensor& tensor : group.params()) {
        const auto place = places.find(tensor.unsafeGetTensorImpl());
        if (place != places.end()) tensor = place->second;
      }
    }
    auto& states = optimizer_.state();
    for (const auto& [from, to] : places) {
      const auto state = states.find(from);
      if (state == states.end()) continue;
      auto moved = std::move(state->second);
      states.erase(state);
      states[to.unsafeGetTensorImpl()] = std::move(moved);
    }
  }

  torch::optim::Optimizer& optimizer_;
  Places parameters_;  // under their masters
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
  std::vector<std::pair<std::size_t, double>> lrs_;
};

/// Returns what the gradients are to be multiplied with; none when the step is to be skipped. The
/// one place where MasterWeights waits.
inline std::optional<double> factor_on_host(const Verdict& verdict, double max_norm) {
  if (!verdict.defined()) return 1.0;
  const auto wide = verdict.inv_scale.is_mps() ? at::kFloat : at::kDouble;
  std::vector<at::Tensor> values{verdict.inv_scale.to(wide), verdict.found_inf.to(wide)};
  if (verdict.sum_of_squares.defined()) values.push_back(verdict.sum_of_squares.to(wide));
  const at::Tensor on_host = at::stack(values).to(at::kCPU, at::kDouble);
  const double* const value = on_host.const_data_ptr<double>();
  if (value[1] != 0.0) return std::nullopt;
  if (!verdict.sum_of_squares.defined()) return value[0];
  return value[0] * clip_coefficient(value[2], max_norm);
}

/// Returns gradient * factor, in float where the gradient has 16 bits, and only then multiplied, so
/// that nothing underflows on the way. Never the gradient itself where that would be written.
inline at::Tensor multiplied(const at::Tensor& gradient, double factor) {
  const at::Tensor wide = is_low_precision(gradient) ? gradient.to(at::kFloat) : gradient;
  return factor == 1.0 ? wide : wide.mul(factor);
}

// --- Files -------------------------------------------------------------------------------------

// An archive holds, beside the inner optimizer's own under "optimizer": how many parameters each
// group has, which of them (counted through all groups) have 16 bits, and those masters that there
// are. A parameter without one begins its master from its own value, in a resumed run as here.

inline constexpr const char* kMasterWeightsKey = "mezzo_master_weights";  // the format's version
inline constexpr int64_t kMasterWeightsFormat = 1;

/// What a file has to agree in with the optimizer that loads it.
struct MasterLayout {
  std::vector<int64_t> group_sizes;
  std::vector<int64_t> low_precision;
  std::vector<at::Tensor> parameters;  // all

  explicit MasterLayout(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    for (const auto& group : groups) {
      group_sizes.push_back(static_cast<int64_t>(group.params().size()));
      for (const at::Tensor& parameter : group.params()) {
        const auto number = static_cast<int64_t>(parameters.size());
        if (is_low_precision(parameter)) low_precision.push_back(number);
        parameters.push_back(parameter);
      }
    }
  }
};

inline std::string master_key(int64_t number) { return "masters/" + std::to_string(number); }

inline std::vector<int64_t> read_numbers(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value), "MasterWeights: the archive lacks \"", key,
              "\"; it is damaged: load an earlier one");
  if (value.isList() && value.toListRef().empty()) return {};  // in a checkpoint it has no type
  return value.toIntVector();
}

/// Throws unless the file is one of MasterWeights that fits.
inline void check_file(torch::serialize::InputArchive& archive, const MasterLayout& layout) {
  c10::IValue format;
  TORCH_CHECK(
      archive.try_read(kMasterWeightsKey, format),
      "MasterWeights: the archive holds no masters; load what "
      "torch::save(masters, path) wrote (torch::load(masters.optimizer(), path) reads the file of "
      "the optimizer alone)");
  TORCH_CHECK(format.isInt() && format.toInt() == kMasterWeightsFormat,
              "MasterWeights: the archive has a format that this version of mezzo does not know; "
              "read it with the version that wrote it, or, if it is damaged, load an earlier one");
  const auto group_sizes = read_numbers(archive, "group_sizes");
  TORCH_CHECK(group_sizes == layout.group_sizes, "MasterWeights: the archive has groups of ",
              c10::IntArrayRef(group_sizes), " parameters, and this optimizer has groups of ",
              c10::IntArrayRef(layout.group_sizes),
              "; make the groups that were there when it was saved");
  const auto low_precision = read_numbers(archive, "low_precision");
  TORCH_CHECK(low_precision == layout.low_precision, "MasterWeights: the archive was saved with ",
              low_precision.size(), " parameters of float16 or bfloat16, and this optimizer has ",
              layout.low_precision.size(), ", or others; cast the model as it was then");
}

inline std::vector<std::pair<at::Tensor, at::Tensor>> read_masters(
    torch::serialize::InputArchive& archive, const MasterLayout& layout) {
  std::vector<std::pair<at::Tensor, at::Tensor>> masters;
  for (const int64_t number : layout.low_precision) {
    const at::Tensor& parameter = layout.parameters[static_cast<std::size_t>(number)];
    at::Tensor master;
    if (!archive.try_read(master_key(number), master, /*is_buffer=*/true)) continue;
    TORCH_CHECK(master.sizes() == parameter.sizes() && master.scalar_type() == at::kFloat,
                "MasterWeights: the archive has the master ", tensor_words(master), " for ",
                parameter_words(static_cast<std::size_t>(number), parameter),
                "; it is another model's: load the file of this one");
    masters.emplace_back(parameter, master.is_inference() ? master.clone() : master);
  }
  return masters;
}

/// Loads all of an optimizer's state, or leaves it as it was.
inline void load_whole(torch::serialize::InputArchive& archive,
                       torch::optim::Optimizer& optimizer) {
  const std::vector<torch::optim::OptimizerParamGroup> groups = optimizer.param_groups();
  std::remove_reference_t<decltype(optimizer.state())> state;
  state.swap(optimizer.state());  // what the file has none of had none when it was saved
  try {
    optimizer.load(archive);
  } catch (...) {
    optimizer.state().swap(state);
    auto& own = optimizer.param_groups();
    own.clear();
    for (const auto& group : groups) own.push_back(group);
    throw;
  }
}

}  // namespace detail

MEZZO_INLINE MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer) : inner_(&optimizer) {
  TORCH_CHECK(dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr,
              "MasterWeights: torch::optim::LBFGS calls its closure several times in a step, each "
              "time with other weights, of which the model would have to know; train the model in "
              "float, or use an optimizer that takes a step from one gradient");
  TORCH_CHECK(AnyOptimizer(optimizer).mezzos() == nullptr,
              "MasterWeights is for optimizers that keep no masters, and this one is mezzo's: give "
              "its constructor {.weight_storage = WeightStorage::master} instead");
  meet_parameters();
}

MEZZO_INLINE at::Tensor MasterWeights::master_param(const at::Tensor& parameter) {
  if (!detail::is_low_precision(parameter)) return parameter;
  detail::KeptWeights& weights = settled(parameter);
  weights.show(parameter);
  return weights.master;
}

/// Returns the master, in agreement with the parameter as it is now; made if there is none.
MEZZO_INLINE detail::KeptWeights& MasterWeights::settled(const at::Tensor& parameter) {
  const detail::NoGraphGuard no_graph;
  Kept& kept = masters_[parameter.unsafeGetTensorImpl()];
  kept.parameter = parameter;
  detail::KeptWeights& weights = kept.weights;
  const bool is_resized = weights.master.defined() && weights.master.sizes() != parameter.sizes();
  if (is_resized) weights.master = at::Tensor();  // all of the parameter was written
  detail::settle_master(parameter, weights);
  detail::heal_master(parameter, weights);
  weights.master.set_requires_grad(parameter.requires_grad());  // an optimizer may look at it
  return weights;
}

/// Looks at the parameters when there are more or fewer than before.
MEZZO_INLINE void MasterWeights::meet_parameters() {
  std::vector<at::Tensor> low_precision;
  std::size_t parameters = 0;
  for (const auto& group : inner_->param_groups()) {
    parameters += group.params().size();
    for (const at::Tensor& parameter : group.params()) {
      if (detail::is_low_precision(parameter)) low_precision.push_back(parameter);
    }
  }
  if (parameters == parameters_ && masters_.size() <= parameters) return;
  detail::refuse_duplicates(low_precision, words());
  parameters_ = parameters;
  decltype(masters_) left;
  for (const at::Tensor& parameter : low_precision) {
    const auto found = masters_.find(parameter.unsafeGetTensorImpl());
    if (found != masters_.end()) left.insert(std::move(*found));
  }
  for (const auto& [address, kept] : masters_) {
    const bool is_gone = kept.parameter.defined() && kept.parameter.use_count() == 1;
    if (is_gone)
      inner_->state().erase(kept.parameter.unsafeGetTensorImpl());  // its address is free
  }
  masters_ = std::move(left);
}

MEZZO_INLINE StepPlan MasterWeights::plan() {
  const c10::NoGradGuard no_grad;
  meet_parameters();
  StepPlan plan = detail::plain_plan(*inner_);
  plan.has_bare_half = false;
  for (StepPlan::Row& row : plan.rows) {
    const bool has_master = detail::is_low_precision(*row.parameter);
    if (has_master) row.storage = optim::WeightStorage::master;
    plan.has_bare_half =
        plan.has_bare_half || (!has_master && row.gradient.scalar_type() == at::kHalf);
  }
  return plan;
}

MEZZO_INLINE void MasterWeights::apply(StepPlan plan, const Verdict& verdict,
                                       const StepOptions& options) {
  const c10::NoGradGuard no_grad;
  const std::optional<double> factor = detail::factor_on_host(verdict, options.max_norm);
  if (factor) {
    step_inner(plan, *factor);
    applied_count().set(applied_steps() + 1);
  }
  for (auto& [parameter, kept] : masters_) kept.weights.end_step();
  if (options.zero_grad) detail::zero_gradients(*inner_);
}

/// Steps the inner optimizer with masters in the places of parameters of 16 bits, and rounds them
/// to these.
MEZZO_INLINE void MasterWeights::step_inner(const StepPlan& plan, double factor) {
  std::vector<std::pair<at::Tensor, at::Tensor>> masters;  // and their parameters, first
  const auto round = [&masters] {
    for (const auto& [parameter, master] : masters) parameter.detach().copy_(master);
    detail::drop_weight_casts();
  };
  {
    detail::ParameterSwap swap(*inner_);
    for (const StepPlan::Row& row : plan.rows) {
      at::Tensor trained = *row.parameter;
      if (detail::is_low_precision(trained)) {
        trained = settled(*row.parameter).master;
        masters.emplace_back(*row.parameter, trained);
      }
      swap.lend_gradient(trained, detail::multiplied(row.gradient, factor));
    }
    swap.put_in(masters);
    if (has_schedule()) swap.lend_lrs(lrs());
    try {
      inner_->step();
    } catch (...) {
      round();  // as without masters, what was trained before it threw is trained
      throw;
    }
  }
  round();
}

MEZZO_INLINE std::vector<at::Tensor> master_params(AnyOptimizer optimizer) {
  optim::FusedOptimizer* const fused = optimizer.mezzos();
  std::vector<at::Tensor> all;
  detail::for_each_parameter(optimizer.optimizer(), [&](std::size_t, const at::Tensor& parameter) {
    all.push_back(fused != nullptr ? fused->master_param(parameter) : parameter);
  });
  return all;
}

// --- Its own files -----------------------------------------------------------------------------

MEZZO_INLINE void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  const detail::MasterLayout layout(inner_->param_groups());
  archive.write(detail::kMasterWeightsKey, c10::IValue(detail::kMasterWeightsFormat));
  archive.write("group_sizes", c10::IValue(layout.group_sizes));
  archive.write("low_precision", c10::IValue(layout.low_precision));
  save_progress(archive);
  for (const int64_t number : layout.low_precision) {
    const at::Tensor& parameter = layout.parameters[static_cast<std::size_t>(number)];
    const auto kept = masters_.find(parameter.unsafeGetTensorImpl());
    if (kept == masters_.end()) continue;
    archive.write(detail::master_key(number), kept->second.weights.master.detach(),
                  /*is_buffer=*/true);
  }
  torch::serialize::OutputArchive inner(archive.compilation_unit());
  inner_->save(inner);
  archive.write("optimizer", inner);
}

MEZZO_INLINE void MasterWeights::load(torch::serialize::InputArchive& archive) {
  const detail::NoGraphGuard no_graph;
  const detail::MasterLayout layout(inner_->param_groups());
  detail::check_file(archive, layout);
  auto masters = detail::read_masters(archive, layout);
  const Progress progress = read_progress(archive, layout.group_sizes.size());
  torch::serialize::InputArchive inner;
  TORCH_CHECK(
      archive.try_read("optimizer", inner),
      "MasterWeights: the archive lacks the inner optimizer; it is damaged: load an earlier one");
  detail::load_whole(inner, *inner_);
  masters_.clear();
  for (auto& [parameter, master] : masters) {  // the next step compares it with the parameter
    masters_[parameter.unsafeGetTensorImpl()] = {parameter, {.master = std::move(master)}};
  }
  load_progress(progress);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
