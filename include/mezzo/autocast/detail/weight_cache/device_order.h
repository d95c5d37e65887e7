/// \file
/// Order between the stream that wrote a copy and the streams that read it. Nothing to do on a CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <mezzo/base/version.h>

#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

class DeviceOrder {
 public:
  /// The current stream has written `copy`.
  void written(const at::Tensor& copy) {
    if (copy.is_cpu()) {
      return;
    }
    writer_ = current_stream(copy);
    event_.emplace(copy.device().type());
    event_->record(*writer_);
  }

  /// Before the current stream reads `copy`: makes it wait for the writer, and the allocator for
  /// it.
  void about_to_read(const at::Tensor& copy) {
    if (!writer_.has_value()) {
      return;
    }
    const c10::Stream reader = current_stream(copy);
    if (reader != *writer_) {
      event_->block(reader);
      copy.record_stream(reader);
      read_elsewhere_ = true;
    }
  }

  /// Whether a new write by the writer's stream could overtake a read.
  bool read_elsewhere() const { return read_elsewhere_; }

  /// Whether the current stream is not the one that wrote.
  bool written_elsewhere(const at::Tensor& copy) const {
    return writer_.has_value() && current_stream(copy) != *writer_;
  }

 private:
  static c10::Stream current_stream(const at::Tensor& copy) {
    return c10::impl::VirtualGuardImpl(copy.device().type()).getStream(copy.device());
  }

  std::optional<c10::Stream> writer_;
  std::optional<c10::Event> event_;
  bool read_elsewhere_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
