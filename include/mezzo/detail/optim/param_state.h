#pragma once

#include <mezzo/detail/optim/archive_keys.h>
#include <mezzo/detail/optim/step_count.h>
#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Tells whether somebody else wrote to a tensor since. Knows the storage itself, weakly: an
/// allocator may give memory that set_data let go to the tensor's next storage.
struct WriteStamp {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  const void* data = nullptr;
  uint32_t version = 0;

  static WriteStamp of(const at::Tensor& tensor) {
    const uint32_t version = tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
    return {tensor.storage().getWeakStorageImpl(), tensor.const_data_ptr(), version};
  }
  bool operator==(const WriteStamp&) const = default;
};

/// What every optimizer of mezzo's may keep of a parameter.
template <class Own>
class ParamState : public torch::optim::OptimizerCloneableParamState<Own> {
  /// With WeightStorage::master the float that the parameter is rounded from.
  TORCH_ARG(at::Tensor, master);
  /// With ema_decay: the weights' average.
  TORCH_ARG(at::Tensor, ema);

 public:
  /// How many steps were applied; waits for the parameter's device.
  int64_t step() const { return count_.value(); }
  Own& step(int64_t step) {
    count_.set(step);
    return static_cast<Own&>(*this);
  }

  StepCount& count() noexcept { return count_; }
  /// With WeightStorage::split_master, int16: see join_halves.
  at::Tensor& lower_half() noexcept { return lower_half_; }
  /// Of the parameter, when `master` or `lower_half` last agreed with it.
  WriteStamp& stamp() noexcept { return stamp_; }

 protected:
  void read_kept(torch::serialize::InputArchive& archive) {
    read_tensor_if_there(archive, "master", master_);
    read_tensor_if_there(archive, "ema", ema_);
  }
  void write_kept(torch::serialize::OutputArchive& archive) const {
    write_tensor_if_defined(archive, "master", master_);
    write_tensor_if_defined(archive, "ema", ema_);
  }

 private:
  StepCount count_;
  at::Tensor lower_half_;
  WriteStamp stamp_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
