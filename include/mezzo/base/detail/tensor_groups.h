#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A value for each device and dtype, in the order of first occurrence, which is the same on all
/// ranks: for example the tensors of one foreach op, or of one flat buffer.
template <class Value = std::vector<at::Tensor>>
class TensorGroups {
 public:
  struct Group {
    at::Device device;
    at::ScalarType dtype;
    Value value{};
  };

  /// Returns the value of a device and dtype; creates it if there is none.
  Value& get(at::Device device, at::ScalarType dtype) {
    for (Group& group : groups_) {
      if (group.device == device && group.dtype == dtype) return group.value;
    }
    return groups_.emplace_back(Group{device, dtype}).value;
  }
  Value& get(const at::Tensor& tensor) { return get(tensor.device(), tensor.scalar_type()); }

  auto begin() const noexcept { return groups_.begin(); }
  auto end() const noexcept { return groups_.end(); }

 private:
  std::vector<Group> groups_;
};

inline TensorGroups<> group_tensors(at::TensorList tensors) {
  TensorGroups<> groups;
  for (const at::Tensor& tensor : tensors) groups.get(tensor).push_back(tensor);
  return groups;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
