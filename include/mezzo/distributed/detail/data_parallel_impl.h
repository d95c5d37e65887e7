#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/data_parallel.h>
#include <torch/nn/module.h>

#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// \throws c10::Error if the handle is empty
template <ModelHandle M>
const torch::nn::Module& module_of(const M& model) {
  const auto pointer = module_pointer(model);
  TORCH_CHECK(pointer != nullptr, "DataParallel: `model` is empty");
  return *pointer;
}

/// Its forward; or where that wants more arguments, its call operator: AutocastModule's knows the
/// default ones.
template <ModelHandle M, class... Args>
decltype(auto) call_forward(M& model, Args&&... args) {
  if constexpr (requires { model->forward(std::forward<Args>(args)...); }) {
    return model->forward(std::forward<Args>(args)...);
  } else {
    return model(std::forward<Args>(args)...);
  }
}

}  // namespace detail

template <detail::ModelHandle M>
DataParallel<M>::DataParallel(M model, AnyCommunicator communicator,
                              const DataParallelOptions& options)
    : model_(std::move(model)),
      replica_(detail::module_of(model_), std::move(communicator), options) {}

template <detail::ModelHandle M>
template <class... Args>
decltype(auto) DataParallel<M>::operator()(Args&&... args) {
  replica_.begin_forward(detail::module_of(model_).is_training());
  return detail::call_forward(model_, std::forward<Args>(args)...);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
