/// \file
/// A low-precision copy of a weight: whether it has the weight's present values, how it gets them
/// again, and the way of a gradient from it to the weight.
#pragma once

#include <mezzo/autocast/detail/autograd_node.h>
#include <mezzo/autocast/detail/weight_cache/weight_identity.h>
#include <mezzo/base/detail/capture.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
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

/// That a stream has written up to here.
struct WriteEvent {
  explicit WriteEvent(const c10::Stream& stream)
      : writer(stream), capture(capture_on(stream.device())), event(stream.device_type()) {
    event.record(writer);
  }

  c10::Stream writer;
  std::uint64_t capture;  // that the event is part of
  c10::Event event;
};

/// Of what is written together: one a device.
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

/// Order between the stream that wrote a copy and the streams that read it. Nothing to do on a CPU.
class DeviceOrder {
 public:
  /// The current stream has written `copy`.
  void written(const at::Tensor& copy, WriteEvents& events) {
    if (!copy.is_cpu()) write_ = events.on(current_stream(copy));
  }
  void written(const at::Tensor& copy) {
    WriteEvents events;
    written(copy, events);
  }

  /// Before the current stream reads `copy`: makes it wait for the writer, and the allocator for
  /// it. Where a capture lies between the two, CUDA lets nobody wait.
  void about_to_read(const at::Tensor& copy) {
    if (!written_elsewhere(copy)) {
      return;
    }
    const c10::Stream reader = current_stream(copy);
    if (capture_on(copy.device()) == write_->capture) {
      write_->event.block(reader);
    }
    copy.record_stream(reader);
    read_elsewhere_ = true;
  }

  /// Whether a new write by the writer's stream could overtake a read.
  bool read_elsewhere() const { return read_elsewhere_; }

  /// Whether the current stream is not the one that wrote.
  bool written_elsewhere(const at::Tensor& copy) const {
    return write_ != nullptr && current_stream(copy) != write_->writer;
  }

 private:
  static c10::Stream current_stream(const at::Tensor& copy) {
    return c10::impl::VirtualGuardImpl(copy.device().type()).getStream(copy.device());
  }

  std::shared_ptr<const WriteEvent> write_;
  bool read_elsewhere_ = false;
};

inline std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

/// A weight and a dtype. A weight's address stays its own while an entry knows the weight.
struct CopyKey {
  const c10::TensorImpl* weight;
  at::ScalarType dtype;

  CopyKey(const at::Tensor& tensor, at::ScalarType to)
      : weight(tensor.unsafeGetTensorImpl()), dtype(to) {}
  bool operator==(const CopyKey&) const = default;
};

struct HeldCopy {
  CopyKey key;
  WeightIdentity weight;  ///< as it was when the copy was made
  at::Tensor copy;
  std::uint64_t made = 0;  ///< counts up through all copies that a store makes
  std::uint64_t used = 0;  ///< counts up through all uses of a HeldCopies
  std::int64_t bytes = 0;  ///< of the copy, when it was put into a HeldCopies
  bool forgotten = false;  ///< somebody said that it is not current
  bool fixed = false;      ///< at an address that others know: never moved, never evicted
  /// Of the copy, while it has the weight's values; none for a tensor from outside, which may share
  /// its version with others.
  std::optional<std::int64_t> copy_version = {};
  /// For a copy that does not outlive a backward pass: raised when one went through it.
  std::shared_ptr<std::atomic<bool>> passed = {};
  DeviceOrder order = {};

  /// Whether it has the weight's present values, for a reader who has been here `since`.
  bool is_current(const at::Tensor& now, std::uint64_t since) const {
    const bool outdated =
        passed != nullptr && (made <= since || passed->load(std::memory_order_relaxed));
    const bool overwritten = copy_version.has_value() && *copy_version != copy._version();
    return !forgotten && !outdated && !overwritten && weight.is_current(now);
  }
};

/// Bytes that a cast of `weight` to `dtype` reads and writes.
inline std::int64_t cast_bytes(const at::Tensor& weight, at::ScalarType dtype) {
  const auto written = static_cast<std::int64_t>(c10::elementSize(dtype));
  return weight.numel() * (weight.element_size() + written);
}

/// Whether `copy` is what a cast of `weight` would be, but for its values.
inline bool fits(const at::Tensor& copy, const at::Tensor& weight) {
  return is_laid_out_as(copy, weight) && copy.device() == weight.device();
}

/// Whether a copy may be given new values in its place. One that a graph still needs is left to it,
/// unless its place is promised: then the write shows in its version, and the graph's backward
/// throws.
inline bool may_be_rewritten(const HeldCopy& old, const at::Tensor& weight) {
  if (!fits(old.copy, weight)) {
    return false;
  }
  const bool unused = old.copy.use_count() == 1 && old.copy.storage().use_count() == 1 &&
                      !old.order.read_elsewhere() && !old.order.written_elsewhere(old.copy);
  return old.fixed || unused;
}

/// A copy with the weight's present values, in the memory of `old` where that may be.
inline HeldCopy cast_again(const at::Tensor& weight, at::ScalarType dtype,
                           std::optional<HeldCopy>& old) {
  WeightIdentity identity(weight);  // before the cast: what is written meanwhile is not in it
  const c10::InferenceMode no_inference(false);  // a copy has a version also there
  const at::NoGradGuard no_grad;
  HeldCopy entry{.key = CopyKey(weight, dtype), .weight = std::move(identity), .copy = {}};
  const bool rewrites = old.has_value() && may_be_rewritten(*old, weight);
  const bool from_outside = rewrites && !old->copy_version.has_value();
  if (rewrites) {
    old->copy.copy_(weight);
    old->order.written(old->copy);
    entry.copy = std::move(old->copy);
    entry.order = std::move(old->order);
  } else {
    entry.copy = weight.to(dtype);
    entry.order.written(entry.copy);
  }
  if (!from_outside) {
    entry.copy_version = entry.copy._version();
  }
  return entry;
}

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
