#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/optim/detail/kept_weights.h>
#include <mezzo/optim/detail/trained_once.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gives every rank the values of rank 0's parameters; returns those that are to be trained, of all
/// groups in their order.
inline std::vector<at::Tensor> start_groups_alike(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const Communicator& communicator) {
  std::vector<at::Tensor> trained;
  NamedTensors named;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (std::size_t i = 0; i < groups[group].params().size(); ++i) {
      const at::Tensor& parameter = groups[group].params()[i];
      TORCH_CHECK(communicator.serves(parameter.device().type()), "ShardedOptimizer: parameter ", i,
                  " of group ", group, " (", tensor_words(parameter),
                  ") is on a device that `communicator` does not serve; move the model (MPI takes "
                  "cpu, NCCL takes cuda)");
      named.emplace_back(c10::str("parameter ", i, " of group ", group), parameter);
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
  }
  refuse_duplicates(trained, {"ShardedOptimizer", groups});
  broadcast_parameters(named, communicator);
  return trained;
}

/// What a state keeps an element of for each of the parameter's: the master, and every moment that
/// the optimizer has under some options.
template <class Traits>
std::vector<at::Tensor*> kept_tensors(typename Traits::State& state) {
  constexpr int kMostMoments = 3;
  std::vector<at::Tensor*> kept{&state.master()};
  for (int k = 0; k < kMostMoments; ++k) {
    at::Tensor* const moment = &Traits::moment(state, k);
    if (std::find(kept.begin(), kept.end(), moment) == kept.end()) kept.push_back(moment);
  }
  return kept;
}

/// For a file, which has the whole of split weights.
template <class State>
at::Tensor filed_master(const at::Tensor& weights, State& state) {
  const bool is_split = state.lower_half().defined() && !state.master().defined();
  return is_split ? trained_value(weights, state) : state.master();
}

/// What the ranks know of the states together: a row for each parameter, of the number of steps and
/// the dtypes of what is kept, each one higher than it is and 0 where there is none.
class StateTable {
 public:
  StateTable(std::size_t parameters, std::size_t kinds)
      : table_(at::zeros({static_cast<int64_t>(parameters), static_cast<int64_t>(kinds) + 1},
                         at::kLong)) {}

  void set_steps(std::size_t parameter, int64_t steps) { at(parameter, 0) = steps + 1; }
  void set_dtype(std::size_t parameter, std::size_t kind, at::ScalarType dtype) {
    at(parameter, kind + 1) = static_cast<int64_t>(dtype) + 1;
  }

  void agree(Communicator& communicator, at::Device device) {
    const at::Tensor there = table_.to(device);
    communicator.all_reduce(there, Reduction::max).wait();
    table_ = there.cpu();
  }

  bool has_state(std::size_t parameter) { return at(parameter, 0) != 0; }
  int64_t steps(std::size_t parameter) { return at(parameter, 0) - 1; }
  bool has(std::size_t parameter, std::size_t kind) { return at(parameter, kind + 1) != 0; }
  at::ScalarType dtype(std::size_t parameter, std::size_t kind) {
    return static_cast<at::ScalarType>(at(parameter, kind + 1) - 1);
  }

 private:
  int64_t& at(std::size_t parameter, std::size_t column) {
    const auto columns = static_cast<std::size_t>(table_.size(1));
    return table_.mutable_data_ptr<int64_t>()[parameter * columns + column];
  }

  at::Tensor table_;
};

/// Of the ranks' numbers, a row a rank, in the order of the ranks: the same bits on all of them,
/// whatever a library's sum makes of another instruction set.
inline at::Tensor sum_of_rows(const at::Tensor& numbers) {
  if (!numbers.is_cpu()) return numbers.sum();
  at::Tensor sum = numbers[0].clone();
  for (int64_t rank = 1; rank < numbers.size(0); ++rank) sum.add_(numbers[rank]);
  return sum;
}

/// What the ranks have found in their parts of the gradients, as one: an inf of one of them, the
/// sum of all squares, the largest magnitude. One collective; waits for no device.
inline GradientSummary agreed(const GradientSummary& own, Communicator& communicator) {
  if (communicator.size() == 1) return own;
  const auto wide = own.sum_of_squares.scalar_type();
  const at::Tensor row = at::stack({own.found_inf.to(wide), own.sum_of_squares, own.max_abs});
  const at::Tensor rows = at::empty({communicator.size(), row.numel()}, row.options());
  communicator.all_gather(rows, row).wait();
  return {rows.select(1, 0).amax().to(own.found_inf.scalar_type()), sum_of_rows(rows.select(1, 1)),
          rows.select(1, 2).amax()};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
