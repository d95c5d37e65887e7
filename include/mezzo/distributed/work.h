/// \file
/// The reductions of collectives, and the handle of a collective under way.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// How the ranks' values of an element become one.
enum class Reduction : uint8_t {
  sum,
  /// The sum divided by the number of ranks, of floating dtypes. bfloat16 and half overflow only
  /// where the average itself does: MPI's are added up and divided in float and rounded once, those
  /// of others are divided before they are added. On a GPU libtorch and NCCL multiply by 1 / ranks
  /// instead: unless the number of ranks is a power of two the last bit may differ.
  average,
  /// Of bools it is "or". Whether a NaN survives is the transport's matter (MPI: always; NCCL:
  /// not).
  max,
};

/// A collective under way: moved, never copied, and waited for. One that is destroyed or assigned
/// to before that warns, and its tensors stay alive until the transport has let go of them. It is
/// used by one thread at a time, not necessarily the one that made it.
class [[nodiscard]] Work {
 public:
  /// A collective as its backend knows it. Destroying one never waits: whatever the transport still
  /// reads or writes, the backend keeps alive.
  class Pending {
   public:
    virtual ~Pending() = default;
    /// Would `wait` return without waiting?
    virtual bool ready() = 0;
    /// Called once at most. Throws c10::Error naming the rank and the collective.
    virtual void wait() = 0;
    /// The collective and the rank, for warnings.
    virtual std::string name() const = 0;
  };

  /// Nothing to wait for.
  Work() noexcept = default;
  explicit Work(std::unique_ptr<Pending> pending) noexcept;
  ~Work();
  Work(Work&&) noexcept = default;
  Work& operator=(Work&& other) noexcept;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// Would `wait` return without waiting? Never waits itself, and moves the transport on: a caller
  /// that computes meanwhile does well to ask now and then.
  bool ready();

  /// Returns when the result may be used: tensors on the CPU may be read; of those on a GPU the
  /// current stream has been told to wait, and the host has not waited. Later calls do nothing.
  /// \throws c10::Error naming the rank, the collective and what the transport said; the tensors
  /// that it writes then hold anything
  void wait();

  /// Lets go of it without waiting or warning, for whoever gives up after an error.
  void abandon() noexcept { pending_.reset(); }

 private:
  void warn_if_unwaited() noexcept;

  std::unique_ptr<Pending> pending_;
};

inline Work::Work(std::unique_ptr<Pending> pending) noexcept : pending_(std::move(pending)) {}

inline Work::~Work() { warn_if_unwaited(); }

inline Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    warn_if_unwaited();
    pending_ = std::move(other.pending_);
  }
  return *this;
}

inline bool Work::ready() { return pending_ == nullptr || pending_->ready(); }

inline void Work::wait() {
  if (const auto pending = std::move(pending_)) pending->wait();
}

inline void Work::warn_if_unwaited() noexcept {
  if (pending_ == nullptr) return;
  try {
    TORCH_WARN("mezzo: nobody waited for ", pending_->name(),
               ": keep the Work that the call returns, and call wait() on it");
  } catch (...) {  // a warning handler may throw; a destructor may not
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
