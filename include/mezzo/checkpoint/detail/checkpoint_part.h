#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the message of the exception that is being handled.
inline std::string message_of_current_exception() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of a type of its own";
  }
}

/// An object in a form that Python reads: a number, a string, a tensor, or lists and dicts of them.
struct SavedValue {
  c10::IValue value{};
  /// Type information that Python's types lack, for ArchivePart: see archive_value.h.
  std::vector<std::string> types{};
};

struct NamedPart;

/// One object of a training state.
class CheckpointPart {
 public:
  using VisitParameter = std::function<void(const std::string& name, const at::Tensor& parameter)>;

  CheckpointPart() = default;
  CheckpointPart(const CheckpointPart&) = delete;
  CheckpointPart& operator=(const CheckpointPart&) = delete;
  virtual ~CheckpointPart() = default;

  /// Returns the kind of object. The file records it; a part loads only values of its own kind.
  virtual const char* kind() const = 0;

  /// Returns the properties that loading cannot change and that must match the file, one per line:
  /// for a module, the names, dtypes and shapes of its tensors.
  virtual std::string layout() const { return {}; }

  /// Returns the properties that are compared by rules of their own, one per line: an optimizer's
  /// class and parameters (optimizer_identity.h). `parts` are all parts of the state; its models
  /// give the parameters their names.
  virtual std::string identity(const std::vector<NamedPart>& parts) const {
    (void)parts;
    return {};
  }

  /// Calls `visit` with each parameter, if the object is a module.
  virtual void each_parameter(const VisitParameter& visit) const { (void)visit; }

  /// Throws if `save` would throw before its first collective. Ranks that save together call this
  /// first, so that no rank misses a collective.
  virtual void check_savable() const {}

  /// Returns the object's value, with the object's own tensors, not copies of them. May call
  /// collectives (ShardedOptimizer).
  virtual SavedValue save() const = 0;

  /// Checks `saved`, and returns a function that changes the object. Does not change it itself.
  virtual std::function<void()> load(SavedValue saved) const = 0;

  /// Loads an object that differs between ranks, when the number of ranks has changed. `of_rank_0`
  /// is rank 0's value; `salt` is a text that is different on each rank. Returns the function that
  /// changes the object; an empty function leaves the object as it is.
  virtual std::function<void()> load_on_other_ranks(const SavedValue& of_rank_0,
                                                    const std::string& salt) const {
    (void)of_rank_0, (void)salt;
    return nullptr;
  }

  /// Returns a short text that represents the value, by which ranks compare what they share: a
  /// checksum, or a line for each number. Empty where ranks may differ, or another rank would be
  /// needed.
  virtual std::string value_in_common() const { return {}; }

  /// Copies the object's present value, and returns a function that restores it.
  virtual std::function<void()> snapshot() const {
    SavedValue copy = save();
    copy.value = copy.value.deepcopy();
    return [this, copy] { load(copy)(); };
  }
};

struct NamedPart {
  std::string name;
  std::shared_ptr<const CheckpointPart> part;
  bool is_per_rank = false;  ///< each rank has its own
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
