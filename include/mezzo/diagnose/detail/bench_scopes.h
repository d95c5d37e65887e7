/// \file
/// What PrecisionBench and the doctor put round a model while it runs: copies in place of its
/// memory, single modules in float32, and a count of bytes.
#pragma once

#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/parameter_names.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
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
    NamedOnce once;
    const NamedTensors parameters = once.all(model.named_parameters());
    borrow(parameters);
    for (const auto& [name, tensor] : parameters) {
      if (!tensor.requires_grad()) continue;
      refuse_hooks(name, tensor);
      trained_.emplace_back(name, tensor);
    }
    borrow(once.all(model.named_buffers()));
  }

  /// Buffers alone: the parameters are read, and stay the model's own.
  explicit BorrowedModel(const NamedTensors& buffers) { borrow(buffers); }

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
    const at::DisableRecordFunctionGuard untraced;
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

  void rewind_random() const { random_.install(); }

  /// The parameters that require grad, in the model's order.
  const NamedTensors& trained() const { return trained_; }

 private:
  struct Lent {
    at::Tensor tensor;  // the model's own
    at::Tensor value;   // its memory
    at::Tensor gradient;
    c10::VariableVersion version;
  };

  void borrow(const NamedTensors& tensors) {
    for (const auto& [name, tensor] : tensors) {
      TORCH_CHECK(!tensor.is_inference(), name,
                  " was made in inference mode; make the model outside of it");
      all_.push_back({tensor, tensor.variable_data(), tensor.grad(),
                      torch::autograd::impl::version_counter(tensor)});
      torch::autograd::impl::set_version_counter(tensor, c10::VariableVersion(0));
    }
  }

  /// Hooks would take the copies' gradients for the model's.
  static void refuse_hooks(const std::string& name, const at::Tensor& tensor) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
    TORCH_CHECK(torch::autograd::impl::post_acc_grad_hooks(tensor) == nullptr &&
                    (accumulator == nullptr || accumulator->post_hooks().empty()),
                "compare_precisions: a hook waits for the gradient of ", name,
                "; call it before GradBuckets, DataParallel or DistributedDataParallel are made");
  }

  std::vector<Lent> all_;
  NamedTensors trained_;
  RandomState random_;
};

/// The modules that have parameters of their own, each with those parameters. The model itself is
/// called "(model)".
inline std::vector<std::pair<std::string, NamedTensors>> parameter_owners(
    const torch::nn::Module& model) {
  std::vector<std::pair<std::string, NamedTensors>> owners;
  for (const auto& entry : model.named_parameters()) {
    const std::string owner = layer_name(entry.key());
    auto known = std::find_if(owners.begin(), owners.end(),
                              [&](const auto& one) { return one.first == owner; });
    if (known == owners.end()) known = owners.emplace(owners.end(), owner, NamedTensors());
    known->second.emplace_back(entry.key(), entry.value());
  }
  return owners;
}

/// While it lives, ops of this thread that read one of some parameters and that autocast would run
/// in low precision run in float32. Autocast's kernels ask for the dtype when they are called, so
/// it is another during such an op.
class Float32ForParameters
    : public OpListener<Float32ForParameters, std::optional<at::ScalarType>> {
 public:
  Float32ForParameters(c10::DeviceType device, const NamedTensors& parameters)
      : device_(device), parameters_(parameters) {}

 private:
  friend OpListener;

  /// \returns the dtype to put back after the op, if it was changed
  std::optional<at::ScalarType> entered(const at::RecordFunction& function) const {
    if (!parameters_.module_of(recorded_inputs(function))) return std::nullopt;
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device_);
    at::autocast::set_autocast_dtype(device_, at::kFloat);
    return dtype;
  }
  void left(std::optional<at::ScalarType> dtype) const {
    if (dtype) at::autocast::set_autocast_dtype(device_, *dtype);
  }

  c10::DeviceType device_;
  ParameterNames parameters_;
};

/// The most bytes at a time that this thread, and the backward passes that it starts, took from
/// libtorch's allocators, on all devices, beyond those in use at `restart`. Takes the profiler's
/// place, to which allocators report; where that is taken there is no number. The CPU's allocator
/// writes a warning when memory goes that came before this object, so it lives long.
class PeakMemory {
 public:
  PeakMemory() {
    const auto kPlace = c10::DebugInfoKind::PROFILER_STATE;
    if (c10::ThreadLocalDebugInfo::get(kPlace) != nullptr) return;
    counter_ = std::make_shared<Counter>();
    guard_.emplace(kPlace, counter_);
  }

  void restart() {
    if (counter_ == nullptr) return;
    counter_->live = 0;
    counter_->peak = 0;
  }

  std::optional<int64_t> bytes() const {
    if (counter_ == nullptr) return std::nullopt;
    return counter_->peak.load();
  }

 private:
  /// A profiler, since that is what libtorch takes it for, which profiles nothing.
  struct Counter final : torch::profiler::impl::ProfilerStateBase {
    using Base = torch::profiler::impl::ProfilerStateBase;

    Counter()
        : Base(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled,
                                                     /*report_input_shapes=*/false,
                                                     /*profile_memory=*/true)) {}

    torch::profiler::impl::ActiveProfilerType profilerType() override {
      return torch::profiler::impl::ActiveProfilerType::NONE;
    }

    void reportMemoryUsage(void* /*memory*/, int64_t size, std::size_t /*allocated*/,
                           std::size_t /*reserved*/, c10::Device /*device*/) override {
      const int64_t now = live.fetch_add(size) + size;
      int64_t most = peak.load();
      while (now > most && !peak.compare_exchange_weak(most, now)) {
      }
    }

    std::atomic<int64_t> live = 0;
    std::atomic<int64_t> peak = 0;
  };

  std::shared_ptr<Counter> counter_;
  std::optional<c10::DebugInfoGuard> guard_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
