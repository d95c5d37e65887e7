#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <string>

// Entries as torch::optim writes them: options and counts as IValues, tensors too, and tensors that
// are not there as no entry.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class T>
T read_key(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value), "The archive of an optimizer lacks \"", key,
              "\"; it is another optimizer's, or damaged");
  return value.to<T>();
}

inline void read_tensor_if_there(torch::serialize::InputArchive& archive, const std::string& key,
                                 at::Tensor& tensor) {
  c10::IValue value;
  tensor = archive.try_read(key, value) ? value.toTensor() : at::Tensor();
}

inline void write_tensor_if_defined(torch::serialize::OutputArchive& archive,
                                    const std::string& key, const at::Tensor& tensor) {
  if (tensor.defined()) archive.write(key, c10::IValue(tensor));
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
