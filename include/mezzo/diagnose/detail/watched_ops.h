/// \file
/// What an AnomalyTrace knows of ops under way, and of memory.
#pragma once

#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/value_range.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

class AnomalyRecorder;

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
class ParameterMemory {
 public:
  explicit ParameterMemory(NamedTensors parameters) : parameters_(std::move(parameters)) {}

  /// The name of the parameter that the tensor is, is a view of, or is a cast copy of.
  std::string name_of(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return {};
    if (const std::string* const copied = copies_.find(tensor)) return *copied;
    const c10::StorageImpl* const memory = tensor.storage().unsafeGetStorageImpl();
    for (const auto& [name, parameter] : parameters_) {
      if (!parameter.has_storage()) continue;
      if (parameter.storage().unsafeGetStorageImpl() != memory) continue;
      const std::int64_t offset = tensor.storage_offset() - parameter.storage_offset();
      if (offset >= 0 && offset < std::max<std::int64_t>(parameter.numel(), 1)) return name;
    }
    return {};
  }

  /// Calls `copy` what `original` is called.
  void note_copy(const at::Tensor& original, const at::Tensor& copy) {
    std::string name = name_of(original);
    if (!name.empty()) copies_.note(copy, std::move(name));
  }

 private:
  NamedTensors parameters_;
  KnownMemory<std::string> copies_;
};

/// An op that has begun and not returned.
struct OpenOp final : at::ObserverContext {
  OpenOp(std::shared_ptr<AnomalyRecorder> watcher, c10::OperatorHandle called)
      : recorder(std::move(watcher)), handle(std::move(called)) {}

  std::shared_ptr<AnomalyRecorder> recorder;
  c10::OperatorHandle handle;
  OpenOp* outer = nullptr;
  std::size_t found_before = 0;          // anomalies, when the op began
  std::vector<c10::IValue> inputs = {};  // as they were, in copies where the op overwrites them
  std::vector<bool> is_read = {};        // not where the op only writes
  std::string module = {};
  bool reads_module = false;

  const std::string& name() const { return handle.schema().name(); }
};

/// An autograd node that runs, on this thread.
struct OpenNode final : at::ObserverContext {
  std::shared_ptr<AnomalyRecorder> outer_recorder = nullptr;
  OpenNode* outer_node = nullptr;
  OpenOp* outer_op = nullptr;
  std::string name = {};
  std::string module = {};
  bool reads_module = false;
};

/// Copies: what they are made of would be named in their place.
inline bool is_copy(const OpenOp& op) {
  return op.name() == "aten::_to_copy" || op.name() == "aten::clone";
}

/// A cast of a number that the program wrote beside a tensor (x * 1e6). Kernels read the number
/// itself, so that a cast of it to inf reaches no result.
inline bool casts_number(const OpenOp& op) {
  return op.name() == "aten::_to_copy" &&
         op.inputs[0].toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

/// Ops that read the shape of a tensor, not its values: ones_like, new_zeros.
inline bool reads_shape_alone(const OpenOp& op) {
  const std::string_view name = op.name();
  return name.ends_with("_like") || name.starts_with("aten::new_");
}

/// Ops whose result is somebody else's: a view, uninitialised memory, or that of ops inside.
inline bool computes(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string_view name = schema.name();
  for (const std::string_view other : {"aten::empty", "aten::new_empty", "aten::resize",
                                       "aten::set_", "aten::_efficientzerotensor"}) {
    if (name.starts_with(other)) return false;
  }
  if (op.hasTag(at::Tag::inplace_view)) return false;
  const auto& returns = schema.returns();
  if (!schema.is_mutable() && !returns.empty() && returns[0].alias_info() != nullptr) {
    return false;
  }
  return !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// Whether the op's first output alone is its result. The others are for its backward pass and may
/// hold -inf by design: log_alpha of paths that CTC rules out, logsumexp of rows that are masked.
inline bool results_in_first(const OpenOp& op) {
  const std::string_view name = op.name();
  constexpr std::array<std::string_view, 5> kOps = {
      "aten::_ctc_loss", "aten::_cudnn_ctc_loss", "aten::_efficient_attention_forward",
      "aten::_flash_attention_forward", "aten::_cudnn_attention_forward"};
  if (std::find(kOps.begin(), kOps.end(), name) != kOps.end()) return true;
  return name.starts_with("aten::_scaled_dot_product_") && !name.ends_with("_backward");
}

/// An eps that was added, or clamped to, and that a dtype of 16 bits rounds to 0: float32 would
/// hold it.
inline std::optional<double> lost_scalar(const OpenOp& op, at::ScalarType dtype) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) return std::nullopt;
  constexpr std::array<std::string_view, 8> kOps = {
      "aten::add",   "aten::add_",   "aten::sub",       "aten::sub_",
      "aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_min_"};
  if (std::find(kOps.begin(), kOps.end(), op.name()) == kOps.end()) return std::nullopt;
  for (const c10::IValue& input : op.inputs) {
    if (input.isDouble() && vanishes(input.toDouble(), dtype)) return input.toDouble();
  }
  return std::nullopt;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
