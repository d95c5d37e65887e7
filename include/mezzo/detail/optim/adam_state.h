#pragma once

#include <mezzo/detail/optim/archive_keys.h>
#include <mezzo/detail/optim/param_state.h>
#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The state that Adam and AdamW keep of a parameter, under libtorch's names and keys.
template <class Own>
class AdamState : public ParamState<Own> {
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, max_exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    this->step(read_key<int64_t>(archive, "step"));
    read_tensor_if_there(archive, "exp_avg", exp_avg_);
    read_tensor_if_there(archive, "exp_avg_sq", exp_avg_sq_);
    read_tensor_if_there(archive, "max_exp_avg_sq", max_exp_avg_sq_);
    this->read_kept(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(this->step()));
    write_tensor_if_defined(archive, "exp_avg", exp_avg_);
    write_tensor_if_defined(archive, "exp_avg_sq", exp_avg_sq_);
    write_tensor_if_defined(archive, "max_exp_avg_sq", max_exp_avg_sq_);
    this->write_kept(archive);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
