/// \file
/// RunConditions, the thread's state at the first run, which the second run gets again; and
/// WatchedTensor and ReadTensors, which tell whether a tensor that the run read was modified, or
/// given other memory, in between.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Leaves libtorch's cache of weight casts unread and unwritten. A cast that was cached before the
/// first run is gone by the second, so that the two runs would have different graphs.
class WeightCastsUncached {
 public:
  WeightCastsUncached() noexcept : found_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~WeightCastsUncached() { at::autocast::set_autocast_cache_enabled(found_); }
  WeightCastsUncached(const WeightCastsUncached&) = delete;
  WeightCastsUncached& operator=(const WeightCastsUncached&) = delete;

 private:
  bool found_;
};

/// The device that `torch::kCUDA` without an index means, if there is one.
inline std::optional<c10::Device> current_cuda_device() {
  if (!at::hasCUDA()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
}

/// Autocast state, random state and current device of the thread that makes it.
class RunConditions {
 public:
  explicit RunConditions(bool with_random_state)
      : autocast_(AutocastState::capture()), cuda_device_(current_cuda_device()) {
    if (with_random_state) random_.emplace();
  }

  /// Runs the calling thread under `conditions`, recording for autograd, and restores what was
  /// there.
  class Scope {
   public:
    explicit Scope(const RunConditions& conditions)
        : device_(conditions.cuda_device_), autocast_(conditions.autocast_) {
      if (conditions.random_) random_.emplace(*conditions.random_);
    }

   private:
    c10::AutoGradMode recording_{true};
    c10::OptionalDeviceGuard device_;
    std::optional<RandomState::Scope> random_;
    AutocastState::Scope autocast_;
    WeightCastsUncached uncached_;
  };

 private:
  AutocastState autocast_;
  std::optional<c10::Device> cuda_device_;
  std::optional<RandomState> random_;
};

/// A tensor as it was when this was made, which does not keep it alive: one that is gone is not
/// used again. Tensors of inference mode have no version: only other memory is noticed in them.
class WatchedTensor {
 public:
  WatchedTensor(const at::Tensor& tensor, const char* role)
      : tensor_(tensor.getIntrusivePtr()), role_(role), stamp_(WriteStamp::of(tensor)) {}

  bool is_unmodified() const {
    const at::Tensor tensor(tensor_.lock());
    return !tensor.defined() || stamp_.is_current(tensor);
  }

  /// Throws when the tensor has been modified since.
  void check(const char* when) const {
    const at::Tensor tensor(tensor_.lock());
    if (!tensor.defined()) return;
    TORCH_CHECK(version_of(tensor) == stamp_.version, "activation_checkpoint: ", role_, ", ",
                tensor_words(tensor), ", was modified in place ", when, " (version ",
                version_of(tensor), ", expected ", stamp_.version,
                "), so that running the function again would compute something else. Clone it "
                "first, or modify it after backward.");
    TORCH_CHECK(stamp_.has_memory_of(tensor), "activation_checkpoint: ", role_, ", ",
                tensor_words(tensor), ", was given other memory ", when,
                ", as set_data and EmaScope do, so that running the function again would compute "
                "something else. Give it back its own before backward, or do it after backward.");
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  const char* role_;
  WriteStamp stamp_;
};

/// The leaves among the tensors that `edges` lead to: parameters, as a rule.
inline void watch_leaves(const torch::autograd::edge_list& edges,
                         std::vector<WatchedTensor>& watched) {
  for (const auto& edge : edges) {
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
    if (leaf != nullptr) watched.emplace_back(leaf->variable, "a parameter");
  }
}

/// Notes the tensors that this thread's ops read while it exists. Runs nest: an op of the inner run
/// is an op of the outer run too.
class ReadTensors : public OpListener<ReadTensors, NoNote> {
 public:
  /// Adds the tensors that the run has not modified itself: batch norm's count of batches is not
  /// watched.
  void watch_unmodified(std::vector<WatchedTensor>& watched) const {
    for (const auto& tensor : read_) {
      if (tensor.is_unmodified()) watched.push_back(tensor);
    }
  }

 private:
  friend OpListener;

  NoNote entered(const at::RecordFunction& function) {
    for (auto* run = this; run != nullptr; run = run->outer()) {
      if (run->open_ops_++ == 0) run->note_inputs(recorded_inputs(function));
    }
    return {};
  }

  void left(const at::RecordFunction& function, NoNote /*note*/) {
    const OpArguments outputs(function.outputs().data(), function.outputs().size());
    for (auto* run = this; run != nullptr; run = run->outer()) {
      if (--run->open_ops_ == 0) run->note_outputs(outputs);
    }
  }

  /// Notes the inputs of an op that the function calls, not of the ops that this op is made of. A
  /// tensor that an op is given before any has returned it was there before the run.
  void note_inputs(OpArguments inputs) {
    for_each_tensor(inputs, [this](const at::Tensor& tensor) {
      if (meet(tensor)) read_.emplace_back(tensor, role_of(tensor));
    });
  }

  void note_outputs(OpArguments outputs) {
    for_each_tensor(outputs, [this](const at::Tensor& tensor) { meet(tensor); });
  }

  static const char* role_of(const at::Tensor& tensor) {
    return tensor.is_leaf() && tensor.requires_grad() ? "a parameter" : "a tensor that it reads";
  }

  /// Returns whether the run meets the tensor for the first time.
  bool meet(const at::Tensor& tensor) {
    return tensor.defined() && met_.insert(tensor.unsafeGetTensorImpl()).second;
  }

  int open_ops_ = 0;
  std::unordered_set<const c10::TensorImpl*> met_;
  std::vector<WatchedTensor> read_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
