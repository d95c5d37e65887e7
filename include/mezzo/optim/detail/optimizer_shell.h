#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/step_engine.h>
#include <mezzo/optim/detail/update_rule.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- Options of param groups -------------------------------------------------------------------
//
// A group may hold plain options of libtorch's class. A step reads options where they are and never
// replaces them, for the user may hold a reference.

/// The class of which every group's options are: libtorch's where it has one, otherwise mezzo's.
template <class Options>
using LibtorchsOr =
    std::conditional_t<std::constructible_from<Options, const typename Options::LibtorchOptions&>,
                       typename Options::LibtorchOptions, Options>;

/// Returns libtorch's options as mezzo's, with the values that libtorch's lack from `defaults`.
template <class Options>
std::optional<Options> widened(const torch::optim::OptimizerOptions& options,
                               const torch::optim::OptimizerOptions& defaults) {
  using Plain = typename Options::LibtorchOptions;
  if constexpr (std::constructible_from<Options, const Plain&>) {
    if (const auto* const plain = dynamic_cast<const Plain*>(&options)) {
      Options own(*plain);
      own.keep_unread(static_cast<const Options&>(defaults));
      return own;
    }
  }
  return std::nullopt;
}

/// Returns the options of group number `group` as mezzo's.
/// \throws c10::Error if they are another optimizer's
template <class Options>
Options group_options(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      std::size_t group, const torch::optim::OptimizerOptions& defaults,
                      const char* optimizer) {
  const torch::optim::OptimizerOptions& options = groups[group].options();
  if (const auto* const own = dynamic_cast<const Options*>(&options)) return *own;
  const std::optional<Options> own = widened<Options>(options, defaults);
  check_are_options(own.has_value(), group, optimizer);
  return *own;
}

/// Gives `group`, just added from `given`, back the options that libtorch has replaced.
///
/// From 2.12 on `add_param_group` copies the optimizer's defaults, and merges into the copy those
/// members known to libtorch that differ from the constructor's values. The options that mezzo
/// adds, and options that libtorch has no class for, would be the defaults'. libtorch's own members
/// stay as libtorch leaves them, so that a group inherits the same values as in `torch::optim`.
template <class Options>
void keep_given_options(torch::optim::OptimizerParamGroup& group,
                        const torch::optim::OptimizerParamGroup& given) {
  if (!given.has_options()) return;
  using Plain = typename Options::LibtorchOptions;
  constexpr bool kIsLibtorchs = std::constructible_from<Options, const Plain&>;
  std::unique_ptr<torch::optim::OptimizerOptions> options = given.options().clone();
  if constexpr (kIsLibtorchs) {
    auto* const own = dynamic_cast<Options*>(options.get());
    if (own == nullptr && dynamic_cast<Plain*>(options.get()) != nullptr) return;
    if (own != nullptr) static_cast<Plain&>(*own) = dynamic_cast<Plain&>(group.options());
  }
  group.set_options(std::move(options));
}

/// Gives `group` the options of a file: in place, unless libtorch's options lack some of them.
template <class Options>
void set_group_options(torch::optim::OptimizerParamGroup& group, const Options& loaded,
                       const torch::optim::OptimizerOptions& defaults) {
  if (auto* const own = dynamic_cast<Options*>(&group.options())) {
    *own = loaded;
    return;
  }
  if (loaded.adds_the_same(static_cast<const Options&>(defaults))) {
    using Plain = typename Options::LibtorchOptions;
    dynamic_cast<Plain&>(group.options()) = loaded;
  } else {
    group.set_options(loaded.clone());
  }
}

// --- Traits of an optimizer --------------------------------------------------------------------

/// The common part of an optimizer's traits. `Own` derives from it and adds
///   kName;
///   read(options, numbers), which checks options and takes the rule's numbers of a group;
///   kAtenHasIt, and if so check_for_aten(numbers) and aten_step(numbers, lists, verdict).
/// Options and State are classes that libtorch's serialization takes.
template <class Own, class OptionsT, class StateT, class RuleT, class VariantRuleT = RuleT>
struct OptimizerTraits {
  using Options = OptionsT;
  using State = StateT;
  using Rule = RuleT;
  using VariantRule = VariantRuleT;
  using Constants = typename Rule::Constants;
  /// The class of options that `read` takes: libtorch's, where it has one.
  using Numbers = LibtorchsOr<Options>;

  static constexpr bool kAtenHasIt = false;
  /// Whether the files of libtorch's optimizer of this name hold counts of steps.
  static constexpr bool kLibtorchCounts = true;

  static StepLoop loop(bool is_variant, optim::WeightStorage storage, at::ScalarType kept,
                       CpuIsa isa) {
    return is_variant ? step_loop<VariantRule>(storage, kept, isa)
                      : step_loop<Rule>(storage, kept, isa);
  }
};

/// \throws c10::Error naming the option that is out of range
template <class Traits>
void check_options(const typename Traits::Options& options) {
  GroupNumbers unread;
  Traits::read(options, unread);
}

/// Makes an optimizer's UpdateRule of its traits.
template <class Traits>
struct RuleOf {
  using Options = typename Traits::Options;
  using State = typename Traits::State;
  using Constants = typename Traits::Constants;

  static GroupNumbers read_group(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                 std::size_t group,
                                 const torch::optim::OptimizerOptions& defaults) {
    const torch::optim::OptimizerOptions& options = groups[group].options();
    const auto* const libtorchs = dynamic_cast<const typename Traits::Numbers*>(&options);
    const auto* const own = dynamic_cast<const Options*>(&options);
    check_are_options(libtorchs != nullptr, group, Traits::kName);
    GroupNumbers numbers;
    numbers.extras = (own != nullptr ? *own : static_cast<const Options&>(defaults)).extras();
    Traits::read(*libtorchs, numbers);
    numbers.moments = static_cast<int>(numbers.is_variant ? Traits::VariantRule::kMoments
                                                          : Traits::Rule::kMoments);
    return numbers;
  }

  static void keep_masters(torch::optim::OptimizerOptions& options) {
    auto* const own = dynamic_cast<Options*>(&options);  // libtorch's own follow the defaults
    if (own != nullptr && own->weight_storage() == optim::WeightStorage::plain) {
      own->weight_storage(optim::WeightStorage::master);
    }
  }

  static StepNumbers coefficients(const StepNumbers& constants, double lr, int64_t step) {
    return constants.as<Constants>().at(lr, step);
  }

  static std::unique_ptr<torch::optim::OptimizerParamState> make_state() {
    return std::make_unique<State>();
  }

  static ParamSlot* slot_in(std::unique_ptr<torch::optim::OptimizerParamState>& state) {
    using Plain = typename State::LibtorchState;
    if (auto* const own = dynamic_cast<State*>(state.get())) return own;
    if constexpr (std::constructible_from<State, const Plain&>) {
      if (const auto* const plain = dynamic_cast<const Plain*>(state.get())) {
        auto own = std::make_unique<State>(*plain);
        State* const taken = own.get();
        state = std::move(own);
        return taken;
      }
    }
    return nullptr;
  }

  static constexpr UpdateRule make() {
    UpdateRule rule{};
    rule.name = Traits::kName;
    rule.read_group = &read_group;
    rule.keep_masters = &keep_masters;
    rule.coefficients = &coefficients;
    rule.loop = &Traits::loop;
    rule.make_state = &make_state;
    rule.slot_in = &slot_in;
    if constexpr (Traits::kAtenHasIt) {
      rule.check_aten = &Traits::check_for_aten;
      rule.aten_step = &Traits::aten_step;
    }
    rule.cuda_rule = Traits::Rule::kCudaRule;
    return rule;
  }

  static constexpr UpdateRule kRule = make();
};

// --- The shell ---------------------------------------------------------------------------------

/// What `{.lr = 1e-3}` would be: a deleted constructor takes it, whose line the compiler prints.
struct OptionsAreSetByCalls {
  double lr = 0;
  std::tuple<double, double> betas{};
  double eps = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool amsgrad = false;
  optim::WeightStorage weight_storage{};
};

/// The parts of an optimizer that libtorch's users see: constructors, options and files. StepEngine
/// takes the steps.
template <class Traits>
class OptimizerShell : public StepEngine {
 public:
  using Options = typename Traits::Options;
  using State = typename Traits::State;

  // Derived classes inherit the constructors: constructors of their own, being no templates, would
  // instantiate this class in every unit that sees them.
  explicit OptimizerShell(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          const Options& defaults = {})
      : StepEngine(groups, std::make_unique<Options>(defaults), RuleOf<Traits>::kRule) {
    check_options<Traits>(defaults);
    check_has_parameters(!groups.empty(), Traits::kName);
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      keep_given_options<Options>(param_groups_[group], groups[group]);
      (void)group_numbers(group);
    }
    meet_parameters();
  }

  explicit OptimizerShell(std::vector<at::Tensor> parameters, const Options& defaults = {})
      : OptimizerShell({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {
    check_has_parameters(!param_groups_.front().params().empty(), Traits::kName);
  }

  /// Refuses `{.lr = 1e-3}`: options are set as libtorch's are, AdamWOptions(1e-3).eps(1e-7).
  template <class = void>                  // a template, so that {1e-3} and {} still mean Options
  OptimizerShell(std::vector<at::Tensor>,  // set options by calls: AdamWOptions(1e-3).eps(1e-7)
                 const OptionsAreSetByCalls&) = delete;

  /// Adds a group with all of its options. libtorch's own function, called through
  /// `torch::optim::Optimizer&`, takes the options that mezzo adds from the defaults, from 2.12 on.
  /// \throws c10::Error, and has not added the group, if its options are out of range or those of
  ///   another optimizer
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Optimizer::add_param_group(group);
    keep_given_options<Options>(param_groups_.back(), group);
    try {
      (void)group_numbers(param_groups_.size() - 1);
    } catch (const c10::Error&) {
      param_groups_.pop_back();
      throw;
    }
  }

  /// Reads all of a file or nothing. States that the file lacks are dropped.
  /// \throws c10::Error for any other file
  void load(torch::serialize::InputArchive& archive) override {
    std::vector<std::vector<at::Tensor>> parameters;
    for (const auto& group : param_groups_) parameters.push_back(group.params());
    load_file(archive, parameters, [](FiledOptimizer&) {});
  }

 protected:
  /// Loads a file that has states of `parameters`, a list for each group. `take(read)` makes of the
  /// groups and states in the file those of this optimizer; it is called before anything changes,
  /// and may throw.
  void load_file(torch::serialize::InputArchive& archive,
                 const std::vector<std::vector<at::Tensor>>& parameters,
                 const std::function<void(FiledOptimizer& read)>& take);

 private:
  static std::optional<int64_t> highest_count(const Optimizer& read);
  Options options_of(std::size_t group) const {
    return group_options<Options>(param_groups_, group, *defaults_, Traits::kName);
  }
};

template <class Traits>
void OptimizerShell<Traits>::load_file(torch::serialize::InputArchive& archive,
                                       const std::vector<std::vector<at::Tensor>>& parameters,
                                       const std::function<void(FiledOptimizer& read)>& take) {
  c10::IValue version;
  TORCH_CHECK(archive.try_read("pytorch_version", version), Traits::kName,
              ": the archive holds no optimizer's state, or that of a libtorch before 1.5; load "
              "what torch::save(optimizer, path) wrote");
  const NoGraphGuard no_graph;
  FiledOptimizer read;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    read.param_groups().emplace_back(parameters[group],
                                     std::make_unique<Options>(options_of(group)));
  }
  torch::optim::serialize<State, Options>(archive, read);
  const auto read_options = [&read](std::size_t group) -> Options& {
    return static_cast<Options&>(read.param_groups()[group].options());
  };
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    read_options(group).keep_unread(options_of(group));
    check_options<Traits>(read_options(group));
    for (const at::Tensor& parameter : parameters[group]) {
      const auto found = read.state().find(parameter.unsafeGetTensorImpl());
      if (found == read.state().end()) continue;
      auto& state = static_cast<State&>(*found->second);
      check_shape_of(state.master(), "a master", parameter, words());
      for (const int k : {0, 1, 2}) check_shape_of(state.moment(k), "a moment", parameter, words());
    }
  }
  Progress progress = read_progress(archive, param_groups_.size());
  if (!progress.applied_steps) progress.applied_steps = highest_count(read);
  take(read);
  state_ = std::move(read.state());
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    set_group_options(param_groups_[group], read_options(group), *defaults_);
    for (const at::Tensor& parameter : param_groups_[group].params()) (void)find_slot(parameter);
  }
  load_progress(progress);
  if (!progress.applied_steps) {
    TORCH_WARN(Traits::kName, ": the file of torch::optim::", Traits::kName,
               " holds no number of steps; load the schedule's own file, or call "
               "set_applied_steps(n)");
  }
}

/// Returns the largest count of any parameter; none where libtorch's states have no count.
template <class Traits>
std::optional<int64_t> OptimizerShell<Traits>::highest_count(const Optimizer& read) {
  if constexpr (!Traits::kLibtorchCounts) return std::nullopt;
  int64_t highest = 0;
  for (const auto& [parameter, state] : read.state()) {
    highest = std::max(highest, static_cast<const State&>(*state).step());
  }
  return highest;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
