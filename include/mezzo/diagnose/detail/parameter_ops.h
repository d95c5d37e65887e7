/// \file
/// Which module an op works for, told by the parameters that it reads: modules in C++ have no
/// hooks.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/StorageImpl.h>
#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/version.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The modules that have parameters of their own, by name, with those parameters. The model itself
/// is called "(model)".
inline std::vector<std::pair<std::string, std::vector<at::Tensor>>> parameter_owners(
    torch::nn::Module& model) {
  std::vector<std::pair<std::string, std::vector<at::Tensor>>> owners;
  const auto add = [&owners](std::string name, torch::nn::Module& module) {
    auto own = module.parameters(/*recurse=*/false);
    if (!own.empty()) owners.emplace_back(std::move(name), std::move(own));
  };
  add("(model)", model);
  for (const auto& entry : model.named_modules("", /*include_self=*/false)) {
    add(entry.key(), *entry.value());
  }
  return owners;
}

/// While it lives, ops of this thread that read one of some parameters and that autocast would run
/// in low precision run in float32. Autocast's kernels ask for the dtype when they are called, so
/// it is another during such an op.
class Float32ForParameters {
 public:
  Float32ForParameters(c10::DeviceType device, const std::vector<at::Tensor>& parameters)
      : device_(device) {
    for (const at::Tensor& parameter : parameters) {
      if (parameter.has_storage()) memory_.insert(parameter.storage().unsafeGetStorageImpl());
    }
    active() = this;
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&Float32ForParameters::start, &Float32ForParameters::end)
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~Float32ForParameters() {
    at::removeCallback(callback_);
    active() = nullptr;
  }
  Float32ForParameters(const Float32ForParameters&) = delete;
  Float32ForParameters& operator=(const Float32ForParameters&) = delete;

 private:
  struct Context final : at::ObserverContext {
    bool switched = false;
    at::ScalarType dtype = at::ScalarType::Undefined;
  };

  static Float32ForParameters*& active() {
    static thread_local Float32ForParameters* scope = nullptr;
    return scope;
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    auto context = std::make_unique<Context>();
    const Float32ForParameters* const scope = active();
    if (scope == nullptr || !scope->reads_one(function)) return context;
    context->switched = true;
    context->dtype = at::autocast::get_autocast_dtype(scope->device_);
    at::autocast::set_autocast_dtype(scope->device_, at::kFloat);
    return context;
  }

  static void end(const at::RecordFunction& /*function*/, at::ObserverContext* context) {
    const auto* const started = static_cast<Context*>(context);
    if (active() == nullptr || started == nullptr || !started->switched) return;
    at::autocast::set_autocast_dtype(active()->device_, started->dtype);
  }

  bool reads_one(const at::RecordFunction& function) const {
    for (const c10::IValue& input : recorded_inputs(function)) {
      if (!input.isTensor()) continue;
      const at::Tensor& tensor = input.toTensor();
      if (tensor.defined() && tensor.has_storage() &&
          memory_.contains(tensor.storage().unsafeGetStorageImpl())) {
        return true;
      }
    }
    return false;
  }

  c10::DeviceType device_;
  std::unordered_set<const c10::StorageImpl*> memory_;  // which a view, such as weight.t(), shares
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
