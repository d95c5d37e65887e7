#include "tensor_views.h"

#include <array>
#include <cstring>
#include <utility>

namespace bert_ner {
namespace {

constexpr std::array<std::pair<Dtype, torch::ScalarType>, 10> kDtypes{{
    {Dtype::f64, torch::kFloat64},
    {Dtype::f32, torch::kFloat32},
    {Dtype::f16, torch::kFloat16},
    {Dtype::bf16, torch::kBFloat16},
    {Dtype::i64, torch::kInt64},
    {Dtype::i32, torch::kInt32},
    {Dtype::i16, torch::kInt16},
    {Dtype::i8, torch::kInt8},
    {Dtype::u8, torch::kUInt8},
    {Dtype::boolean, torch::kBool},
}};

torch::ScalarType scalar_type_of(Dtype dtype) {
  for (const auto& [ours, torchs] : kDtypes) {
    if (ours == dtype) return torchs;
  }
  TORCH_CHECK(false, "no libtorch dtype for ", name_of(dtype));
}

Dtype dtype_of(torch::ScalarType type) {
  for (const auto& [ours, torchs] : kDtypes) {
    if (torchs == type) return ours;
  }
  TORCH_CHECK(false, "a safetensors file of this example cannot hold ", type);
}

}  // namespace

torch::Tensor to_tensor(const TensorView& view) {
  auto tensor = torch::empty(view.shape, scalar_type_of(view.dtype));
  TORCH_INTERNAL_ASSERT(tensor.nbytes() == view.bytes.size());
  if (!view.bytes.empty()) std::memcpy(tensor.data_ptr(), view.bytes.data(), view.bytes.size());
  return tensor;
}

TensorView view_of(std::string name, const torch::Tensor& tensor) {
  TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "tensor ", name,
              " must be contiguous and on the CPU to be viewed; call .cpu().contiguous() first");
  const auto* bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {std::move(name),
          dtype_of(tensor.scalar_type()),
          tensor.sizes().vec(),
          {bytes, tensor.nbytes()}};
}

}  // namespace bert_ner
