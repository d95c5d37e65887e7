/// \file
/// A low-precision copy of a weight: whether it still has the weight's values, in which order
/// streams write and read it, and the node that carries a gradient from it to the weight.
#pragma once

#include <mezzo/autocast/detail/autograd_node.h>
#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whether the tensor's values are those in its memory, and no tangent goes with them.
inline bool is_as_stored(const at::Tensor& tensor) {
  static constexpr c10::DispatchKeySet kOtherValues(
      {c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  if (tensor.layout() != at::kStrided || !tensor.has_storage() ||
      at::isTensorSubclassLike(tensor) || tensor.key_set().has_any(kOtherValues)) {
    return false;
  }
  const auto* autograd = torch::autograd::impl::get_autograd_meta(tensor);
  return autograd == nullptr || autograd->fw_grad_ == nullptr;
}

/// Whether a copy may stand for the tensor: it has a version and no graph behind it.
inline bool can_be_held(const at::Tensor& tensor) {
  return !tensor.is_inference() && is_as_stored(tensor) && tensor.is_leaf();
}

/// Returns the tensor whose memory `tensor` shows: the base of a view of all of it, such as
/// `weight.t()`, else `tensor`. Modules of libtorch's C++ compute with such views, which are new
/// tensors each time. A parameter that is a view of a buffer stands for itself. A view made under
/// NoGradGuard is a leaf that requires grad as well, but there the base requires grad too.
inline c10::MaybeOwned<at::Tensor> shown_by(const at::Tensor& tensor) {
  if (!tensor.is_view() || !is_as_stored(tensor)) {
    return c10::MaybeOwned<at::Tensor>::borrowed(tensor);
  }
  at::Tensor base(tensor._base());
  const bool is_parameter = tensor.is_leaf() && tensor.requires_grad() && !base.requires_grad();
  const bool all = !is_parameter && is_as_stored(base) && tensor.is_alias_of(base) &&
                   tensor.numel() == base.numel() &&
                   tensor.storage_offset() == base.storage_offset() &&
                   tensor.scalar_type() == base.scalar_type() &&
                   tensor.is_non_overlapping_and_dense() && base.is_non_overlapping_and_dense();
  return all ? c10::MaybeOwned<at::Tensor>::owned(std::move(base))
             : c10::MaybeOwned<at::Tensor>::borrowed(tensor);
}

/// Whether `copy` has its elements in the order that a cast of `weight` would give them.
inline bool is_laid_out_as(const at::Tensor& copy, const at::Tensor& weight) {
  return copy.sizes() == weight.sizes() &&
         (copy.strides() == weight.strides() || !weight.is_non_overlapping_and_dense());
}

inline std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

/// Returns the bytes that a cast of `weight` to `dtype` reads and writes.
inline std::int64_t cast_bytes(const at::Tensor& weight, at::ScalarType dtype) {
  const auto written = static_cast<std::int64_t>(c10::elementSize(dtype));
  return weight.numel() * (weight.element_size() + written);
}

/// Refers to a tensor without keeping it alive. Its address is not given to another tensor
/// meanwhile.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// A weight as it was when it was cast. Keeps neither the tensor nor its memory alive.
class WeightIdentity {
 public:
  explicit WeightIdentity(const at::Tensor& weight)
      : tensor_(weight.getIntrusivePtr()),
        written_(WriteStamp::of(weight)),
        steps_(steps_without_version().load(std::memory_order_relaxed)),
        dtype_(weight.scalar_type()),
        sizes_(weight.sizes()),
        strides_(weight.strides()) {}

  /// Whether `weight`, the tensor that this was made from, has the same values and shape, as far as
  /// its version and memory tell.
  bool is_current(const at::Tensor& weight) const {
    return written_.is_current(weight) && weight.scalar_type() == dtype_ &&
           steps_ == steps_without_version().load(std::memory_order_relaxed) &&
           weight.sizes() == c10::IntArrayRef(sizes_) &&
           weight.strides() == c10::IntArrayRef(strides_);
  }

  bool is_dead() const { return tensor_.expired(); }

 private:
  WeakTensor tensor_;
  WriteStamp written_;
  std::uint64_t steps_;  // that left no version, of any weight
  at::ScalarType dtype_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
};

/// An event recorded on the stream that wrote a copy.
struct WriteEvent {
  explicit WriteEvent(const c10::Stream& stream)
      : writer(stream), capture(capture_on(stream.device())), event(stream.device_type()) {
    event.record(writer);
  }

  c10::Stream writer;
  std::uint64_t capture;  // that the event is part of
  c10::Event event;
};

/// The events of copies that are published together: one for each stream.
class WriteEvents {
 public:
  std::shared_ptr<const WriteEvent> on(const c10::Stream& stream) {
    for (const auto& event : events_) {
      if (event->writer == stream) return event;
    }
    return events_.emplace_back(std::make_shared<const WriteEvent>(stream));
  }

 private:
  std::vector<std::shared_ptr<const WriteEvent>> events_;
};

/// Orders the stream that wrote a copy before the streams that read it. Does nothing on a CPU.
class DeviceOrder {
 public:
  /// Call this after the current stream has written `copy`.
  void written(const at::Tensor& copy, WriteEvents& events) {
    if (!copy.is_cpu()) write_ = events.on(current_stream(copy));
  }

  /// Call this before the current stream reads `copy`: makes it wait for the writer, and the
  /// allocator for it. Where a capture lies between the two, CUDA lets nobody wait.
  void about_to_read(const at::Tensor& copy) const {
    if (write_ == nullptr) return;
    const c10::Stream reader = current_stream(copy);
    if (reader == write_->writer) return;
    if (capture_on(copy.device()) == write_->capture) write_->event.block(reader);
    copy.record_stream(reader);
  }

 private:
  static c10::Stream current_stream(const at::Tensor& copy) {
    return c10::impl::VirtualGuardImpl(copy.device().type()).getStream(copy.device());
  }

  std::shared_ptr<const WriteEvent> write_;
};

struct HeldCopy {
  WeightIdentity weight;  ///< as it was when the copy was made
  at::Tensor copy;
  bool published = false;  ///< others know its address: it keeps its memory and outlives unpin
  bool forgotten = false;  ///< somebody said that it is not current
  /// The copy's version while it has the weight's values. None for a published tensor of the
  /// user's, whose version may count writes to other tensors.
  std::optional<std::int64_t> copy_version = {};
  /// In a copy of a region's: set when a gradient went through it.
  std::shared_ptr<std::atomic<bool>> passed = {};
  DeviceOrder order = {};

  /// Whether it has the present values of `now`, the weight that it was made from.
  bool is_current(const at::Tensor& now) const {
    const bool overwritten = copy_version.has_value() && *copy_version != copy._version();
    const bool outdated = passed != nullptr && passed->load(std::memory_order_relaxed);
    return !forgotten && !overwritten && !outdated && weight.is_current(now);
  }
};

/// Casts `weight`. Where `place` is given, a published copy, its memory takes the result if it
/// fits: the write shows in its version, so that backward of a graph that needs the old values
/// throws.
inline HeldCopy cast_to(const at::Tensor& weight, at::ScalarType dtype, const HeldCopy* place) {
  WeightIdentity identity(weight);  // before the cast: what is written meanwhile is not in it
  const c10::InferenceMode no_inference(false);  // a copy has a version also there
  const at::NoGradGuard no_grad;
  HeldCopy entry{.weight = std::move(identity), .copy = {}};
  const bool fits = place != nullptr && is_laid_out_as(place->copy, weight) &&
                    place->copy.device() == weight.device();
  if (fits) {
    place->copy.copy_(weight);
    entry.copy = place->copy;
  } else {
    entry.copy = weight.to(dtype);
  }
  if (!fits || place->copy_version.has_value()) entry.copy_version = entry.copy._version();
  WriteEvents events;
  entry.order.written(entry.copy, events);
  return entry;
}

/// The backward of a cast whose result is held elsewhere. Each use of a copy gets a node of its
/// own, so no graph is shared between uses or outlives its backward, and gradients of several uses
/// are added in the weight's dtype. `passed`, if given, is set when a gradient goes through:
/// whoever reads gradients writes weights, and torch::optim::SGD does so without a new version.
class WeightCastNode final : public torch::autograd::Node {
 public:
  WeightCastNode(const at::Tensor& weight, std::shared_ptr<std::atomic<bool>> passed)
      : torch::autograd::Node({torch::autograd::impl::gradient_edge(weight)}),
        counter_(weight.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        dtype_(weight.scalar_type()),
        sizes_(weight.sizes()),
        passed_(std::move(passed)) {}

  std::string name() const override { return "mezzo::WeightCast"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    check_unmodified();
    if (passed_ != nullptr) passed_->store(true, std::memory_order_relaxed);
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
  std::shared_ptr<std::atomic<bool>> passed_;
};

/// Returns `copy`, which was made of `weight`, as an op shall see it in the place of `tensor`: in
/// its shape and, where it wants a gradient, with an edge to it. The result shares the copy's
/// memory and version, so whoever saves it for backward notices a later write to the copy.
inline at::Tensor in_place_of(const at::Tensor& tensor, const at::Tensor& weight, at::Tensor copy,
                              std::shared_ptr<std::atomic<bool>> passed) {
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
    const auto node = make_node<WeightCastNode>(tensor, std::move(passed));
    const auto input_nr = node->add_input_metadata(use);
    torch::autograd::impl::set_gradient_edge(use, {node, input_nr});
  }
  return use;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
