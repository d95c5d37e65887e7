/// \file
/// Notes the matrix products of a thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/version.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The factors of a product, without their data.
struct RecordedGemm {
  struct Factor {
    std::vector<int64_t> sizes;
    bool transposed;
  };
  Factor a, b;
  c10::Device device;
};

class GemmRecorder {
 public:
  GemmRecorder() {
    TORCH_CHECK(listener() == nullptr,
                "benchmark_gemms: this thread is within another benchmark_gemms");
    listener() = this;
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&GemmRecorder::start, &GemmRecorder::end)
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~GemmRecorder() {
    at::removeCallback(callback_);
    listener() = nullptr;
  }
  GemmRecorder(const GemmRecorder&) = delete;
  GemmRecorder& operator=(const GemmRecorder&) = delete;

  const std::vector<RecordedGemm>& gemms() const noexcept { return gemms_; }

 private:
  struct Context final : at::ObserverContext {
    bool is_gemm = false;
  };

  static GemmRecorder*& listener() {
    static thread_local GemmRecorder* active = nullptr;
    return active;
  }

  /// Which argument is the left factor; the right one follows it.
  static std::optional<std::size_t> left_factor(std::string_view op) {
    if (op == "aten::mm" || op == "aten::bmm") return 0;
    if (op == "aten::addmm" || op == "aten::baddbmm") return 1;
    return std::nullopt;
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    auto context = std::make_unique<Context>();
    if (listener() != nullptr) context->is_gemm = listener()->enter(function);
    return context;
  }

  static void end(const at::RecordFunction& /*function*/, at::ObserverContext* context) {
    const bool is_gemm = context != nullptr && static_cast<Context*>(context)->is_gemm;
    if (listener() != nullptr && is_gemm) --listener()->depth_;
  }

  bool enter(const at::RecordFunction& function) {
    const auto name = function.operator_name();
    if (!name) return false;
    const auto left = left_factor(name->name);
    const OpArguments inputs = recorded_inputs(function);
    if (!left || inputs.size() < *left + 2) return false;
    // Under autocast the op calls itself with the cast factors.
    if (depth_++ == 0) note(inputs[*left], inputs[*left + 1]);
    return true;
  }

  void note(const c10::IValue& a, const c10::IValue& b) {
    if (!a.isTensor() || !b.isTensor()) return;
    const at::Tensor& left = a.toTensor();
    if (!left.is_floating_point() || left.numel() == 0 || b.toTensor().numel() == 0) return;
    gemms_.push_back({factor(left), factor(b.toTensor()), left.device()});
  }

  static RecordedGemm::Factor factor(const at::Tensor& tensor) {
    const bool dense = tensor.layout() == at::kStrided;
    return {tensor.sizes().vec(),
            dense && tensor.stride(-2) == 1 && tensor.stride(-1) != 1 && tensor.size(-1) > 1};
  }

  std::vector<RecordedGemm> gemms_;
  int depth_ = 0;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
