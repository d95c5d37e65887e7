#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/trained_once.h>
#include <mezzo/optim/detail/update_rule.h>
#include <mezzo/optim/fused_optimizer.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The groups and states of a file, while it is read or written.
class FiledOptimizer final : public torch::optim::Optimizer {
 public:
  FiledOptimizer() : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, nullptr) {}
  at::Tensor step(LossClosure /*closure*/) override { return {}; }
};

/// Takes the steps of mezzo's optimizers, whatever their rule:
///
///   plan    one walk over the parameters: who has a gradient, all checks, slots
///   read    one read of the gradients (FusedOptimizer::read)
///   apply   unscale, clip and update in one pass over the memory
///
/// The engine knows an optimizer by its UpdateRule alone. OptimizerShell (optimizer_shell.h) adds
/// the parts that libtorch's users see: constructors, options and files.
class StepEngine : public torch::optim::Optimizer, public optim::FusedOptimizer {
 public:
  torch::optim::Optimizer& optimizer() noexcept override { return *this; }

  at::Tensor step(LossClosure closure = nullptr) override { return step_with(closure); }
  MEZZO_INLINE StepPlan plan() override;
  MEZZO_INLINE void apply(StepPlan plan, const Verdict& verdict = {},
                          const StepOptions& options = {}) override;

  /// Takes the step through ATen's fused kernels; on the CPU for tests alone.
  MEZZO_INLINE void apply_with_aten(StepPlan plan, const Verdict& verdict = {},
                                    const StepOptions& options = {});

  MEZZO_INLINE void enable_master_weights() override;
  MEZZO_INLINE bool keeps_master(std::size_t group, const at::Tensor& parameter) const override;
  MEZZO_INLINE at::Tensor master_param(std::size_t group, const at::Tensor& parameter) override;

  /// Writes what libtorch's optimizer of the same name writes, and under keys of their own the
  /// values that libtorch lacks. Split weights are written whole.
  MEZZO_INLINE void save(torch::serialize::OutputArchive& archive) const override;

 protected:
  MEZZO_INLINE StepEngine(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                          const UpdateRule& rule);

  OptimizerWords words() const noexcept { return {rule_->name, param_groups_}; }
  /// Reads and checks the options of a group.
  GroupNumbers group_numbers(std::size_t group) const {
    return rule_->read_group(param_groups_, group, *defaults_);
  }
  /// Drops the states of parameters that are gone. Called when there are more or fewer than
  /// before, or fewer than states.
  /// \throws c10::Error if a weight would be trained twice
  MEZZO_INLINE void meet_parameters();
  /// Returns the state of a parameter, and makes the parameter its owner; null if there is none.
  MEZZO_INLINE ParamSlot* find_slot(const at::Tensor& parameter);
  /// Adds a row to `plan`, if `parameter` has a gradient.
  /// \throws c10::Error naming the parameter, if `apply` could not take the step
  MEZZO_INLINE void add_row(StepPlan& plan, const at::Tensor& parameter, std::size_t group,
                            std::uint64_t number);
  /// Writes `filed` under libtorch's keys, and the progress under mezzo's.
  MEZZO_INLINE void write_file(torch::serialize::OutputArchive& archive,
                               const FiledOptimizer& filed) const;

 private:
  using Row = StepPlan::Row;
  using Rows = std::span<Row>;
  using Groups = std::vector<GroupNumbers>;
  /// A tensor and the copy that a kernel works on in its place.
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

  /// Memory and copies that the host prepares for the kernels of one device.
  struct Prepared {
    std::vector<StepTask> tasks{};
    std::vector<at::Tensor> gradients{};  ///< copies, kept alive
    std::vector<at::Tensor> uncleared{};  ///< gradients that were copied and are to be cleared
  };
  struct AtenCall;

  /// Whether a step's gradients are zero by now.
  enum class Cleared { not_asked, on_the_way, not_yet };
  static Cleared cleared_by(bool is_asked, bool on_the_way) noexcept {
    if (!is_asked) return Cleared::not_asked;
    return on_the_way ? Cleared::on_the_way : Cleared::not_yet;
  }

  MEZZO_INLINE void check_slot(ParamSlot& slot, const at::Tensor& weights,
                               const GroupNumbers& numbers) const;
  MEZZO_INLINE ParamSlot& make_slot(const at::Tensor& parameter);
  MEZZO_INLINE ParamSlot& checked_slot(std::unique_ptr<torch::optim::OptimizerParamState>& state,
                                       const at::Tensor& parameter);
  MEZZO_INLINE optim::WeightStorage storage_in(std::size_t group,
                                               const at::Tensor& parameter) const;
  MEZZO_INLINE void apply_on_devices(StepPlan& plan, const Verdict& verdict,
                                     const StepOptions& options, bool with_aten);
  MEZZO_INLINE void open_slot(Row& row, const GroupNumbers& numbers);
  MEZZO_INLINE void set_lrs(StepPlan& plan);
  MEZZO_INLINE void count_applied(const StepPlan& plan, const Verdict& verdict);
  MEZZO_INLINE void finish(Rows rows, Cleared cleared, const Prepared& prepared);

  MEZZO_INLINE void step_cpu(Rows rows, const Groups& groups, const Verdict& verdict,
                             const StepOptions& options);
  MEZZO_INLINE StepSpan span_of(const Row& row, const GroupNumbers& numbers, bool clear,
                                Prepared& prepared);
  /// Returns whether the parameter that is rounded from a float master is of half.
  static bool copies_half(const Row& row) noexcept {
    return row.storage == optim::WeightStorage::master && row.parameter->scalar_type() == at::kHalf;
  }
  MEZZO_INLINE at::Tensor& fitting_moment(const Row& row, int k, const at::Tensor& parameter);

  /// Steps on another device than the CPU. Returns whether it has counted the step as applied.
  MEZZO_INLINE bool step_on_device(Rows rows, const Groups& groups, const Verdict& verdict,
                                   const StepOptions& options, bool is_alone);
#ifdef MEZZO_WITH_CUDA
  MEZZO_INLINE void step_on_cuda(Rows rows, const Groups& groups, const Verdict& verdict,
                                 const StepOptions& options, bool counts_applied);
#endif
  MEZZO_INLINE at::Tensor applied_on(at::Device device, bool counts_there);
  MEZZO_INLINE void step_with_aten(Rows rows, const Groups& groups, const Verdict& verdict,
                                   const StepOptions& options);
  MEZZO_INLINE void add_to_call(const Row& row, const GroupNumbers& numbers, bool copies_gradient,
                                std::vector<AtenCall>& calls, std::vector<StepCount>& counts,
                                Copies& copies);
  MEZZO_INLINE void make_calls(std::vector<AtenCall>& calls, const std::vector<at::Tensor>& counts,
                               const AtenVerdict& verdict);

  const UpdateRule* rule_;
  std::size_t parameters_ = 0;  // in all groups, when meet_parameters looked at them
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/optim/detail/step_engine_impl.h>
#endif
