/// \file
/// Which parameter is this tensor, and to which module does an op belong? C++ modules have no
/// hooks: they are known by the memory of the parameters that an op reads.
#pragma once

#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What is known of memory, by the bytes that a tensor takes: gradients in a flat bucket share
/// their storage. While something is known of it memory is not given to other tensors.
template <class Fact>
class KnownMemory {
 public:
  void note(const at::Tensor& tensor, Fact fact) {
    if (!tensor.has_storage()) return;
    forget(tensor);
    const auto [known, is_new] =
        known_.try_emplace(tensor.storage().unsafeGetStorageImpl(),
                           Storage{tensor.storage().getWeakStorageImpl(), {}});
    const Bytes bytes = bytes_of(tensor);
    auto& stretches = known->second.stretches;
    std::erase_if(stretches, [&](const Stretch& one) { return one.bytes == bytes; });
    stretches.push_back({bytes, std::move(fact)});
  }

  /// What was noted last of a tensor that shares a byte with this one.
  const Fact* find(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return nullptr;
    const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == known_.end()) return nullptr;
    const Bytes bytes = bytes_of(tensor);
    const auto& stretches = found->second.stretches;
    const auto last = std::find_if(stretches.rbegin(), stretches.rend(), [&](const Stretch& one) {
      return one.bytes.begin < bytes.end && bytes.begin < one.bytes.end;
    });
    return last == stretches.rend() ? nullptr : &last->fact;
  }

  /// Nothing is known any more of what the tensor holds. Does nothing where it has gaps.
  void forget(const at::Tensor& tensor) {
    if (!tensor.has_storage() || tensor.is_nested()) return;
    const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == known_.end() || !tensor.is_non_overlapping_and_dense()) return;
    const Bytes gone = bytes_of(tensor);
    std::vector<Stretch> left;
    for (const auto& [bytes, fact] : found->second.stretches) {
      const Bytes before{bytes.begin, std::min(bytes.end, gone.begin)};
      const Bytes behind{std::max(bytes.begin, gone.end), bytes.end};
      if (before.begin < before.end) left.push_back({before, fact});
      if (behind.begin < behind.end) left.push_back({behind, fact});
    }
    if (left.empty()) {
      known_.erase(found);
    } else {
      found->second.stretches = std::move(left);
    }
  }

 private:
  struct Bytes {
    std::int64_t begin = 0, end = 0;  // in the storage
    bool operator==(const Bytes&) const = default;
  };
  struct Stretch {
    Bytes bytes;
    Fact fact;
  };
  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> held;
    std::vector<Stretch> stretches;
  };

  /// From a tensor's first element to its last.
  static Bytes bytes_of(const at::Tensor& tensor) {
    if (tensor.is_nested()) return {0, static_cast<std::int64_t>(tensor.storage().nbytes())};
    const auto each = static_cast<std::int64_t>(tensor.element_size());
    std::int64_t elements = tensor.numel() > 0 ? 1 : 0;
    for (std::int64_t i = 0; elements > 0 && i < tensor.dim(); ++i) {
      elements += (tensor.size(i) - 1) * tensor.stride(i);
    }
    const std::int64_t begin = tensor.storage_offset() * each;
    return {begin, begin + elements * each};
  }

  std::unordered_map<const c10::StorageImpl*, Storage> known_;
};

/// Parameters by their memory, and by that of copies in another dtype.
class ParameterNames {
 public:
  explicit ParameterNames(NamedTensors parameters) : parameters_(std::move(parameters)) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& parameter = parameters_[i].second;
      if (parameter.has_storage()) by_memory_[memory_of(parameter)].push_back(i);
    }
  }

  /// The number of the parameter that the tensor is, is a view of, or is a noted copy of.
  std::optional<std::size_t> find(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
    if (const std::size_t* const copied = copies_.find(tensor)) return *copied;
    const auto found = by_memory_.find(memory_of(tensor));
    if (found == by_memory_.end()) return std::nullopt;
    for (const std::size_t i : found->second) {
      const at::Tensor& parameter = parameters_[i].second;
      if (memory_of(parameter) != memory_of(tensor)) continue;  // it has got another since
      const std::int64_t offset = tensor.storage_offset() - parameter.storage_offset();
      if (offset >= 0 && offset < std::max<std::int64_t>(parameter.numel(), 1)) return i;
    }
    return std::nullopt;
  }

  /// The parameter's name; empty of another tensor.
  std::string name_of(const at::Tensor& tensor) const {
    const auto found = find(tensor);
    return found ? parameters_[*found].first : std::string();
  }

  /// The module of the first parameter among an op's inputs; none where it reads no parameter.
  std::optional<std::string> module_of(OpArguments inputs) const {
    std::optional<std::size_t> first;
    for_each_tensor(inputs, [&](const at::Tensor& tensor) {
      if (!first) first = find(tensor);
    });
    if (!first) return std::nullopt;
    return layer_name(parameters_[*first].first);
  }

  /// Calls `copy` what `original` is called.
  void note_copy(const at::Tensor& original, const at::Tensor& copy) {
    if (const auto found = find(original)) copies_.note(copy, *found);
  }

 private:
  static const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  NamedTensors parameters_;
  std::unordered_map<const c10::StorageImpl*, std::vector<std::size_t>> by_memory_;
  KnownMemory<std::size_t> copies_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
