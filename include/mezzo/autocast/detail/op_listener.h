/// \file
/// Who hears the ops of a thread.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <unordered_set>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The base of a class that hears this thread's ops while it lives. `Listener` derives from it and
/// has `Note entered(const at::RecordFunction&)`, called before an op, and `void left(const
/// Note&)`, called after it with what `entered` returned. libtorch's callbacks are plain functions:
/// they find the listener through the thread. Of a class the innermost hears, for itself and for
/// those around it: listeners of one class end in the reverse order, on their own thread.
template <class Listener, class Note>
class OpListener {
 public:
  OpListener(const OpListener&) = delete;
  OpListener& operator=(const OpListener&) = delete;

 protected:
  using Scopes = std::unordered_set<at::RecordScope, std::hash<at::RecordScope>>;

  explicit OpListener(const Scopes& scopes = {at::RecordScope::FUNCTION})
      : outer_(std::exchange(active(), static_cast<Listener*>(this))),
        callback_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&start, &end).needsInputs(true).scopes(scopes))) {}
  ~OpListener() { stop(); }

  /// Whether the thread had a listener of this class already. A constructor that does not want that
  /// throws, and the other goes on.
  bool is_nested() const noexcept { return outer_ != nullptr; }

  /// Hears no more.
  void stop() {
    if (active() != this) return;
    at::removeCallback(callback_);
    active() = outer_;
  }

 private:
  struct Context final : at::ObserverContext {
    explicit Context(Note of_start) : note(std::move(of_start)) {}
    Note note;
  };

  static Listener*& active() {
    static thread_local Listener* listener = nullptr;
    return listener;
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    if (active() == nullptr) return nullptr;
    return std::make_unique<Context>(active()->entered(function));
  }

  static void end(const at::RecordFunction& /*function*/, at::ObserverContext* context) {
    if (active() == nullptr || context == nullptr) return;
    active()->left(static_cast<Context*>(context)->note);
  }

  Listener* outer_;
  at::CallbackHandle callback_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
