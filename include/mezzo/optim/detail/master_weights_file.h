#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/optim/detail/master_weights_impl.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/master_weights.h>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

// An archive holds, beside the inner optimizer's own under "optimizer": how many parameters each
// group has, which of them (counted through all groups) have 16 bits, and those masters that there
// are. A parameter without one begins its master from its own value, in a resumed run as here.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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
  const auto group_sizes = read_key<std::vector<int64_t>>(archive, "group_sizes");
  TORCH_CHECK(group_sizes == layout.group_sizes, "MasterWeights: the archive has groups of ",
              c10::IntArrayRef(group_sizes), " parameters, and this optimizer has groups of ",
              c10::IntArrayRef(layout.group_sizes),
              "; make the groups that were there when it was saved");
  const auto low_precision = read_key<std::vector<int64_t>>(archive, "low_precision");
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
    masters.emplace_back(parameter, master);
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

MEZZO_INLINE void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  const detail::MasterLayout layout(inner_->param_groups());
  archive.write(detail::kMasterWeightsKey, c10::IValue(detail::kMasterWeightsFormat));
  archive.write("group_sizes", c10::IValue(layout.group_sizes));
  archive.write("low_precision", c10::IValue(layout.low_precision));
  archive.write("applied_steps", c10::IValue(applied_steps()));
  for (const int64_t number : layout.low_precision) {
    const at::Tensor master = find_master(layout.parameters[static_cast<std::size_t>(number)]);
    if (master.defined())
      archive.write(detail::master_key(number), master.detach(), /*is_buffer=*/true);
  }
  torch::serialize::OutputArchive inner(archive.compilation_unit());
  inner_->save(inner);
  archive.write("optimizer", inner);
}

MEZZO_INLINE void MasterWeights::load(torch::serialize::InputArchive& archive) {
  const c10::NoGradGuard no_grad;
  const detail::MasterLayout layout(inner_->param_groups());
  detail::check_file(archive, layout);
  auto masters = detail::read_masters(archive, layout);
  const auto applied = detail::read_key<int64_t>(archive, "applied_steps");
  torch::serialize::InputArchive inner;
  TORCH_CHECK(
      archive.try_read("optimizer", inner),
      "MasterWeights: the archive lacks the inner optimizer; it is damaged: load an earlier one");
  detail::load_whole(inner, *inner_);
  masters_.clear();
  for (auto& [parameter, master] : masters) {  // the next step compares it with the parameter
    masters_[parameter.unsafeGetTensorImpl()] = {parameter, std::move(master)};
  }
  load_applied_steps(applied);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
