/// \file
/// The state of a GradScaler as named tensors, as in a safetensors file of mezzo's or torch.amp's
/// users. mezzo itself reads and writes no safetensors (examples/bert_ner/safetensors.h does).
#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <map>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Returns the state that `scaler.state_dict()` gave as tensors without dimensions on the CPU, one
/// for each key: counts in int64, since Python's scaler refuses a growth_interval of 2000.0, all
/// else in float64. To load them in Python, which takes its own five keys and leaves mezzo's:
///
///     tensors = safetensors.torch.load_file(path)
///     scaler.load_state_dict({key: tensor.item() for key, tensor in tensors.items()})
std::map<std::string, at::Tensor> scaler_tensors(const GradScaler::StateDict& state);

/// Returns a state for `scaler.load_state_dict` from the tensors of `scaler_tensors`, or from what
/// Python wrote with
///
///     tensors = {key: torch.tensor(value) for key, value in scaler.state_dict().items()}
///     safetensors.torch.save_file(tensors, path)
///
/// Waits for the devices of the tensors.
/// \param tensors  of one element each, of any real dtype and device. torch.tensor writes a float
///   as float32, rounded: scales and the default factors are exact, a factor of 1.1 is not
/// \throws c10::Error for a tensor that is no single number, naming its key
GradScaler::StateDict scaler_state(const std::map<std::string, at::Tensor>& tensors);

inline std::map<std::string, at::Tensor> scaler_tensors(const GradScaler::StateDict& state) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [key, value] : state) {
    tensors[key] = detail::tensor_of_scaler_state(key, value);
  }
  return tensors;
}

inline GradScaler::StateDict scaler_state(const std::map<std::string, at::Tensor>& tensors) {
  GradScaler::StateDict state;
  for (const auto& [key, tensor] : tensors) {
    TORCH_CHECK(tensor.defined() && tensor.numel() == 1, "scaler_state: \"", key, "\" is ",
                detail::tensor_words(tensor),
                "; it should be a tensor of one element, as scaler_tensors() makes them");
    TORCH_CHECK(at::isFloatingType(tensor.scalar_type()) ||
                    at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false),
                "scaler_state: \"", key, "\" is a tensor of ", tensor.scalar_type(),
                "; it should be of real numbers");
    state[key] = tensor.item<double>();
  }
  return state;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
