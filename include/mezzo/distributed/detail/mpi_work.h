#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A collective of an MpiBackend.
class MpiWork final : public c10d::Work {
 public:
  /// \param call  compared between ranks: the collective, and the number and dtype of the elements
  MpiWork(std::string call, int rank, int size, std::vector<at::Tensor> results)
      : Work(rank),
        call_(std::move(call)),
        name_(c10::str(call_, " on rank ", rank, " of ", size)),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override {}  // tensors are on the CPU

  const std::string& call() const noexcept { return call_; }
  /// Returns the call and its rank, for error messages.
  const std::string& name() const noexcept { return name_; }

  /// Called once, by the thread that runs the collective.
  void complete(const std::exception_ptr& error) {
    if (error) {
      future_->setErrorIfNeeded(error);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
    finish(error);
  }

 private:
  std::string call_, name_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
