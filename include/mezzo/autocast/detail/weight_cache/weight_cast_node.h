/// \file
/// The way of a gradient from a low-precision copy to the weight that it was made of.
#pragma once

#include <mezzo/autocast/detail/autograd_node.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Backward of a cast whose result is held elsewhere: one node a use, so that no graph is shared
/// between uses, outlives its backward, or depends on who asked first. Gradients of several uses
/// meet in the weight's own dtype. Raises the flag, if it is given one, when a gradient goes
/// through: what reads gradients writes weights, and torch::optim::SGD does so through data(),
/// unseen.
class WeightCastNode final : public torch::autograd::Node {
 public:
  WeightCastNode(const at::Tensor& weight, std::shared_ptr<std::atomic<bool>> flag)
      : torch::autograd::Node({torch::autograd::impl::gradient_edge(weight)}),
        counter_(weight.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        dtype_(weight.scalar_type()),
        sizes_(weight.sizes()),
        flag_(std::move(flag)) {}

  std::string name() const override { return "mezzo::WeightCast"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    check_unmodified();
    if (flag_ != nullptr) {
      flag_->store(true, std::memory_order_relaxed);
    }
    if (!gradients[0].defined() || !should_compute_output(0)) {
      return {at::Tensor()};
    }
    return {gradients[0].to(dtype_)};
  }

 private:
  // As libtorch does for a weight that an op saved itself, in its words.
  void check_unmodified() const {
    const auto now = static_cast<std::int64_t>(counter_.current_version());
    TORCH_CHECK(now == version_,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a weight, ",
                dtype_, " ", c10::IntArrayRef(sizes_), ", is at version ", now,
                "; expected version ", version_,
                " instead. Step the optimizer after the backward pass of every forward pass that "
                "used the weight.");
  }

  c10::VariableVersion counter_;
  std::int64_t version_;
  at::ScalarType dtype_;
  c10::DimVector sizes_;
  std::shared_ptr<std::atomic<bool>> flag_;
};

/// `copy`, which was made of what `tensor` shows, as an op shall see it in the place of `tensor`:
/// in its shape and, where it wants a gradient, with an edge to it. The result shares the copy's
/// memory and version, so that a later write to the copy is noticed by whoever saved it for
/// backward.
inline at::Tensor in_place_of(const at::Tensor& tensor, const at::Tensor& weight, at::Tensor copy,
                              std::shared_ptr<std::atomic<bool>> flag) {
  const bool wants_gradient = c10::GradMode::is_enabled() && tensor.requires_grad();
  const bool is_weight = tensor.is_same(weight);
  if (!wants_gradient && is_weight) {
    return copy;
  }
  auto* const impl = copy.unsafeGetTensorImpl();
  at::Tensor use(impl->shallow_copy_and_detach(impl->version_counter(),
                                               /*allow_tensor_metadata_change=*/true));
  if (!is_weight) {
    use.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  }
  if (wants_gradient) {
    const auto node = make_node<WeightCastNode>(tensor, std::move(flag));
    const auto input_nr = node->add_input_metadata(use);
    torch::autograd::impl::set_gradient_edge(use, {node, input_nr});
  }
  return use;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
