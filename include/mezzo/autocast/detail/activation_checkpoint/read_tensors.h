/// \file
/// Which tensors from outside a run reads, beside its arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <mezzo/autocast/detail/activation_checkpoint/watched_tensor.h>
#include <mezzo/autocast/detail/op_policy/ivalue_tensors.h>
#include <mezzo/autocast/detail/op_policy/recorded_inputs.h>
#include <mezzo/base/version.h>

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Notes the tensors that this thread's ops read as long as it exists. Runs nest: an op of the
/// inner one is one of the outer one too.
class ReadTensors {
 public:
  ReadTensors() : outer_(std::exchange(innermost(), this)) {
    if (outer_ != nullptr) return;
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&ReadTensors::start, &ReadTensors::end)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~ReadTensors() {
    innermost() = outer_;
    if (outer_ == nullptr) at::removeCallback(callback_);
  }
  ReadTensors(const ReadTensors&) = delete;
  ReadTensors& operator=(const ReadTensors&) = delete;

  /// Adds those that the run has not modified itself: batch norm's count of batches is not watched.
  void watch_unmodified(std::vector<WatchedTensor>& watched) const {
    for (const auto& tensor : read_) {
      if (tensor.is_unmodified()) watched.push_back(tensor);
    }
  }

 private:
  using OpValues = c10::ArrayRef<const c10::IValue>;

  static ReadTensors*& innermost() {
    static thread_local ReadTensors* run = nullptr;
    return run;
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    for (auto* run = innermost(); run != nullptr; run = run->outer_) {
      if (run->open_ops_++ == 0) run->note_inputs(recorded_inputs(function));
    }
    return nullptr;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
    const OpValues outputs(function.outputs().data(), function.outputs().size());
    for (auto* run = innermost(); run != nullptr; run = run->outer_) {
      if (--run->open_ops_ == 0) run->note_outputs(outputs);
    }
  }

  /// Those of the ops that the function calls; an op's own ops work on what no op has returned.
  void note_inputs(OpValues inputs) {
    for_each_tensor(inputs, [this](const at::Tensor& tensor) {
      if (is_new(tensor)) read_.emplace_back(tensor, role_of(tensor));
    });
  }

  void note_outputs(OpValues outputs) {
    for_each_tensor(outputs, [this](const at::Tensor& tensor) { is_new(tensor); });
  }

  static const char* role_of(const at::Tensor& tensor) {
    return tensor.is_leaf() && tensor.requires_grad() ? "a parameter" : "a tensor that it reads";
  }

  /// What an op is given before any has returned it was there before the run.
  bool is_new(const at::Tensor& tensor) {
    return tensor.defined() && met_.insert(tensor.unsafeGetTensorImpl()).second;
  }

  ReadTensors* outer_;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  int open_ops_ = 0;
  std::unordered_set<const c10::TensorImpl*> met_;
  std::vector<WatchedTensor> read_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
