#pragma once

#include <mezzo/detail/optim/archive_keys.h>
#include <mezzo/detail/optim/step_count.h>
#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The state that Adam and AdamW keep of a parameter, under libtorch's names and keys.
template <class Own>
class AdamState : public torch::optim::OptimizerCloneableParamState<Own> {
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, max_exp_avg_sq);

 public:
  int64_t step() const { return count_.value(); }
  Own& step(int64_t step) {
    count_.set(step);
    return static_cast<Own&>(*this);
  }
  StepCount& count() noexcept { return count_; }

  void serialize(torch::serialize::InputArchive& archive) override {
    count_.set(read_key<int64_t>(archive, "step"));
    read_tensor_if_there(archive, "exp_avg", exp_avg_);
    read_tensor_if_there(archive, "exp_avg_sq", exp_avg_sq_);
    read_tensor_if_there(archive, "max_exp_avg_sq", max_exp_avg_sq_);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step()));
    write_tensor_if_defined(archive, "exp_avg", exp_avg_);
    write_tensor_if_defined(archive, "exp_avg_sq", exp_avg_sq_);
    write_tensor_if_defined(archive, "max_exp_avg_sq", max_exp_avg_sq_);
  }

 private:
  StepCount count_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
