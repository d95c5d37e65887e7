/// \file
/// OpListener, the base of classes that hear the ops of their thread, and the ops' boxed arguments,
/// as at::RecordFunction carries them into a start callback.
#pragma once

#include <mezzo/base/detail/private_member.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <unordered_set>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using OpArguments = c10::ArrayRef<const c10::IValue>;

struct RecordedInputsMember {
  friend constexpr auto private_member(RecordedInputsMember);
};
template struct PrivateMember<RecordedInputsMember, &at::RecordFunction::inputs_>;

/// Returns the op's arguments. In units compiled without NDEBUG RecordFunction::inputs() asserts a
/// flag that only a libtorch compiled without NDEBUG ever sets, and so throws in every debug build
/// against a release libtorch; this function reads the member itself. TorchScript's interpreter
/// records its whole stack, whose last values are the op's arguments.
inline OpArguments recorded_inputs(const at::RecordFunction& function) {
  const OpArguments stack = function.*private_member(RecordedInputsMember());
  return stack.slice(stack.size() - std::min(stack.size(), function.num_inputs()));
}

/// Calls `visit` with every tensor among the arguments, those in lists included.
template <class Visit>
void for_each_tensor(OpArguments arguments, const Visit& visit) {
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      visit(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) visit(tensor);
    } else if (argument.isOptionalTensorList()) {
      for (const auto& tensor : argument.toOptionalTensorVector()) {
        if (tensor.has_value()) visit(*tensor);
      }
    }
  }
}

/// The base of a class that hears this thread's ops while it lives. `Listener` derives from it and
/// has `Note entered(const at::RecordFunction&)`, called before an op, and, called after it with
/// the Note that `entered` returned, `void left(const Note&)`, or `void left(const
/// at::RecordFunction&, const Note&)` to read the op's outputs. Only the innermost listener of a
/// class is called. Listeners of one class end in reverse order, on their own thread.
template <class Listener, class Note>
class OpListener {
 public:
  OpListener(const OpListener&) = delete;
  OpListener& operator=(const OpListener&) = delete;

 protected:
  using Scopes = std::unordered_set<at::RecordScope, std::hash<at::RecordScope>>;

  explicit OpListener(const Scopes& scopes = {at::RecordScope::FUNCTION})
      : outer_(std::exchange(active(), static_cast<Listener*>(this))) {
    if (outer_ != nullptr) return;  // one callback serves all of a class
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&start, &end)
                                               .needsInputs(true)
                                               .needsOutputs(reads_outputs())
                                               .scopes(scopes));
  }
  ~OpListener() { stop(); }

  /// Whether the thread had a listener of this class already. A constructor that does not want that
  /// throws, and the other goes on.
  bool is_nested() const noexcept { return outer_ != nullptr; }

  /// Stops listening.
  void stop() {
    if (active() != this) return;
    if (outer_ == nullptr) at::removeCallback(callback_);
    active() = outer_;
  }

 private:
  struct Context final : at::ObserverContext {
    explicit Context(Note of_start) : note(std::move(of_start)) {}
    Note note;
  };

  static constexpr bool reads_outputs() {
    return requires(Listener & listener, const at::RecordFunction& function, const Note& note) {
      listener.left(function, note);
    };
  }

  static Listener*& active() {
    static thread_local Listener* listener = nullptr;
    return listener;
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    if (active() == nullptr) return nullptr;
    return std::make_unique<Context>(active()->entered(function));
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    if (active() == nullptr || context == nullptr) return;
    const Note& note = static_cast<Context*>(context)->note;
    if constexpr (reads_outputs()) {
      active()->left(function, note);
    } else {
      active()->left(note);
    }
  }

  Listener* outer_;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
