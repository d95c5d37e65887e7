/// \file
/// Which tensors a run reads, and whether one was modified, or given other memory, between the
/// first run and the recomputation.
#pragma once

#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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
    const OpArguments outputs(function.outputs().data(), function.outputs().size());
    for (auto* run = innermost(); run != nullptr; run = run->outer_) {
      if (--run->open_ops_ == 0) run->note_outputs(outputs);
    }
  }

  /// Those of the ops that the function calls; an op's own ops work on what no op has returned.
  void note_inputs(OpArguments inputs) {
    for_each_tensor(inputs, [this](const at::Tensor& tensor) {
      if (is_new(tensor)) read_.emplace_back(tensor, role_of(tensor));
    });
  }

  void note_outputs(OpArguments outputs) {
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
