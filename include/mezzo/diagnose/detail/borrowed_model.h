/// \file
/// A model whose parameters and buffers hold copies for a while.
#pragma once

#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/version.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Lends a model other memory, and at the end gives it back its own: parameters and buffers, their
/// versions and gradients, and the default random generators, to the bit. Whoever knows a parameter
/// by its address, its memory or its version, as optimizers do, sees nothing of it.
class BorrowedModel {
 public:
  explicit BorrowedModel(torch::nn::Module& model) {
    std::unordered_set<const c10::TensorImpl*> seen;  // tied weights have several names
    for (const auto& entry : model.named_parameters()) {
      if (seen.insert(entry.value().unsafeGetTensorImpl()).second) borrow(entry, true);
    }
    for (const auto& entry : model.named_buffers()) {
      if (seen.insert(entry.value().unsafeGetTensorImpl()).second) borrow(entry, false);
    }
    for (const at::Generator& generator : default_generators(CudaDevices::in_use)) {
      random_.emplace_back(generator, state_of(generator));
    }
    for (const Lent& lent : all_) {
      torch::autograd::impl::set_version_counter(lent.tensor, c10::VariableVersion(0));
    }
  }

  ~BorrowedModel() {
    drop_copies();
    for (Lent& lent : all_) {
      lent.tensor.mutable_grad() = std::move(lent.gradient);
      torch::autograd::impl::set_version_counter(lent.tensor, lent.version);
    }
    rewind_random();
  }
  BorrowedModel(const BorrowedModel&) = delete;
  BorrowedModel& operator=(const BorrowedModel&) = delete;

  /// Fresh copies of what the model held, those of a floating dtype and at least so many dimensions
  /// cast to `dtype`; no gradients.
  void reset(std::optional<at::ScalarType> dtype, int64_t dimensions = 0) {
    drop_copies();
    const at::NoGradGuard no_grad;
    for (Lent& lent : all_) {
      const bool casts =
          dtype.has_value() && lent.value.is_floating_point() && lent.value.dim() >= dimensions;
      lent.tensor.set_data(lent.value.to(casts ? *dtype : lent.value.scalar_type(),
                                         /*non_blocking=*/false, /*copy=*/true));
    }
    rewind_random();
  }

  /// The model's own memory again, which is not to be written; no gradients.
  void drop_copies() {
    const at::NoGradGuard no_grad;
    for (Lent& lent : all_) {
      lent.tensor.mutable_grad() = at::Tensor();
      lent.tensor.set_data(lent.value);
    }
  }

  void rewind_random() const {
    for (const auto& [generator, state] : random_) set_state(generator, state);
  }

  /// The parameters that require grad, in the model's order.
  const std::vector<std::pair<std::string, at::Tensor>>& trained() const { return trained_; }

 private:
  struct Lent {
    at::Tensor tensor;  // the model's own
    at::Tensor value;   // its memory
    at::Tensor gradient;
    c10::VariableVersion version;
  };

  template <class Entry>
  void borrow(const Entry& entry, bool is_parameter) {
    const at::Tensor& tensor = entry.value();
    if (!tensor.defined()) return;
    TORCH_CHECK(!tensor.is_inference(), "compare_precisions: ", entry.key(),
                " was made in inference mode; make the model outside of it");
    if (is_parameter && tensor.requires_grad()) {
      refuse_hooks(entry.key(), tensor);
      trained_.emplace_back(entry.key(), tensor);
    }
    all_.push_back({tensor, tensor.variable_data(), tensor.grad(),
                    torch::autograd::impl::version_counter(tensor)});
  }

  /// They would take the copies' gradients for the model's.
  static void refuse_hooks(const std::string& name, const at::Tensor& tensor) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
    TORCH_CHECK(torch::autograd::impl::post_acc_grad_hooks(tensor) == nullptr &&
                    (accumulator == nullptr || accumulator->post_hooks().empty()),
                "compare_precisions: a hook waits for the gradient of ", name,
                "; call it before GradBuckets, DataParallel or DistributedDataParallel are made");
  }

  std::vector<Lent> all_;
  std::vector<std::pair<std::string, at::Tensor>> trained_;
  std::vector<std::pair<at::Generator, at::Tensor>> random_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
