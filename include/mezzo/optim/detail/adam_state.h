#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/archive_keys.h>
#include <mezzo/optim/detail/param_state.h>

#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The state that Adam and AdamW keep of a parameter. `Base` is libtorch's.
template <class Own, class Base>
class AdamState : public ParamState<Own, Base> {
 public:
  using ParamState<Own, Base>::ParamState;

  void serialize(torch::serialize::InputArchive& archive) override {
    this->step(read_key<int64_t>(archive, "step"));
    read_tensor_if_there(archive, "exp_avg", this->exp_avg());
    read_tensor_if_there(archive, "exp_avg_sq", this->exp_avg_sq());
    read_tensor_if_there(archive, "max_exp_avg_sq", this->max_exp_avg_sq());
    this->read_kept(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(this->step()));
    write_tensor_if_defined(archive, "exp_avg", this->exp_avg());
    write_tensor_if_defined(archive, "exp_avg_sq", this->exp_avg_sq());
    write_tensor_if_defined(archive, "max_exp_avg_sq", this->max_exp_avg_sq());
    this->write_kept(archive);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
