/// \file
/// What an AnomalyTrace knows of ops under way, and of memory.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/diagnose/overflow_report.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
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

/// Memory and what is known of it. It is not given to other tensors meanwhile.
template <class Fact>
class KnownMemory {
 public:
  void note(const at::Tensor& tensor, Fact fact) {
    if (!tensor.has_storage()) return;
    known_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(),
                            std::pair(tensor.storage().getWeakStorageImpl(), std::move(fact)));
  }
  const Fact* find(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return nullptr;
    const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
    return found == known_.end() ? nullptr : &found->second.second;
  }
  void forget(const at::Tensor& tensor) { known_.erase(tensor.storage().unsafeGetStorageImpl()); }

 private:
  std::unordered_map<const c10::StorageImpl*,
                     std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, Fact>>
      known_;
};

/// Parameters by their memory, and by that of copies in another dtype.
class ParameterMemory {
 public:
  explicit ParameterMemory(NamedParameters parameters) : parameters_(std::move(parameters)) {}

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
  NamedParameters parameters_;
  KnownMemory<std::string> copies_;
};

/// An op that has begun and not returned.
struct OpenOp final : at::ObserverContext {
  OpenOp(std::shared_ptr<AnomalyRecorder> watcher, c10::OperatorHandle called)
      : recorder(std::move(watcher)), handle(std::move(called)) {}

  std::shared_ptr<AnomalyRecorder> recorder;
  c10::OperatorHandle handle;
  OpenOp* outer = nullptr;
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

/// An eps that was added, or clamped to, and that the dtype rounds to 0.
inline std::optional<double> lost_scalar(const OpenOp& op, at::ScalarType dtype) {
  constexpr std::array<std::string_view, 8> kOps = {
      "aten::add",   "aten::add_",   "aten::sub",       "aten::sub_",
      "aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_min_"};
  if (std::find(kOps.begin(), kOps.end(), op.name()) == kOps.end()) return std::nullopt;
  for (const c10::IValue& input : op.inputs) {
    if (!input.isDouble() || input.toDouble() == 0) continue;
    const auto value = static_cast<float>(input.toDouble());
    const bool is_lost = (dtype == at::kHalf && static_cast<float>(c10::Half(value)) == 0) ||
                         (dtype == at::kBFloat16 && static_cast<float>(c10::BFloat16(value)) == 0);
    if (is_lost) return input.toDouble();
  }
  return std::nullopt;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
