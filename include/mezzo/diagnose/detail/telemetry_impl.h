#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/telemetry.h>

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <optional>
#include <utility>

#include <unistd.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::optional<double> memory_in_use(const at::Tensor& loss) {
  if (!loss.defined()) return std::nullopt;
  if (loss.is_cuda()) {
    const auto stats =
        at::getDeviceAllocator(loss.device().type())->getDeviceStats(loss.device().index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<double>(stats.allocated_bytes[kAll].peak);
  }
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return std::nullopt;
  long all = 0;
  long resident = 0;
  const bool is_read = std::fscanf(file, "%ld %ld", &all, &resident) == 2;
  std::fclose(file);
  if (!is_read) return std::nullopt;
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

}  // namespace detail

inline Telemetry::~Telemetry() {
  try {
    flush();
  } catch (const std::exception& error) {
    TORCH_WARN("Telemetry: the last records were not written: ", error.what());
  }
}

inline void Telemetry::record(const StepResult& result, const at::Tensor& loss,
                              const TelemetryStep& step) {
  const auto now = std::chrono::steady_clock::now();
  TelemetryRecord record;
  record.wall_time =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  record.underflow = step.underflow;
  record.memory_bytes = detail::memory_in_use(loss);
  if (step.tokens > 0 && last_call_.has_value()) {
    const std::chrono::duration<double> passed = now - *last_call_;
    record.tokens_per_second = static_cast<double>(step.tokens) / passed.count();
  }
  last_call_ = now;
  detail::LateNumber late_loss(loss);
  record.step = next_step_++;
  pending_.push_back({record, result, std::move(late_loss), step.max_norm});
  deliver(/*waits=*/false);
}

inline void Telemetry::deliver(bool waits) {
  while (!pending_.empty()) {
    Pending& first = pending_.front();
    if (!waits && !(first.result.ready() && first.loss.ready())) return;
    const TelemetryRecord record = finished(first);
    pending_.pop_front();  // also where a writer throws
    for (const Writer& writer : writers_) writer(record);
  }
}

inline TelemetryRecord Telemetry::finished(Pending& pending) {
  TelemetryRecord record = pending.record;
  record.loss = pending.loss.value();
  record.scale = pending.result.scale();
  record.skipped = !pending.result.ran();
  record.grad_norm = pending.result.grad_norm();
  if (record.grad_norm && !record.skipped && !detail::is_positive_infinity(pending.max_norm)) {
    record.clip_ratio = std::min(1.0, pending.max_norm / (*record.grad_norm + 1e-6));
  }
  return record;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
