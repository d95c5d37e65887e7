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

/// To be called while an exception is handled.
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

/// An object as Python can read it: a number, a string, a tensor, or lists and dicts of them.
struct SavedValue {
  c10::IValue value{};
  /// What Python's types do not tell, for ArchivePart: see archive_value.h.
  std::vector<std::string> types{};
};

struct NamedPart;

/// One object of the user's in a checkpoint.
class CheckpointPart {
 public:
  using VisitParameter = std::function<void(const std::string& name, const at::Tensor& parameter)>;

  CheckpointPart() = default;
  CheckpointPart(const CheckpointPart&) = delete;
  CheckpointPart& operator=(const CheckpointPart&) = delete;
  virtual ~CheckpointPart() = default;

  /// The file records it too; a part loads only what its own kind saved.
  virtual const char* kind() const = 0;

  /// What loading cannot change, and the file must therefore agree with, a line each: of a module
  /// the names, dtypes and shapes of its tensors.
  virtual std::string layout() const { return {}; }

  /// What the object is, a line each, for who compares it in a way of its own: an optimizer's class
  /// and parameters (optimizer_identity.h). `parts` are those of the state, of which models name
  /// parameters.
  virtual std::string identity(const std::vector<NamedPart>& parts) const {
    (void)parts;
    return {};
  }

  /// Of a module: calls `visit` with each of its parameters.
  virtual void each_parameter(const VisitParameter& visit) const { (void)visit; }

  /// Throws where `save` would refuse before it needs other ranks. Ranks that save together call
  /// this first, so that none of them stays away from a collective.
  virtual void check_savable() const {}

  /// Holds the object's own tensors, not copies of them. May need other ranks (ShardedOptimizer).
  virtual SavedValue save() const = 0;

  /// Checks `saved` and leaves the object alone; the function that comes back changes the object.
  virtual std::function<void()> load(SavedValue saved) const = 0;

  /// For what each rank had of its own when the number of ranks has changed: `of_rank_0` is what
  /// rank 0 had, `salt` a text that no two ranks share. Without a function to call the object is
  /// left as it is.
  virtual std::function<void()> load_on_other_ranks(const SavedValue& of_rank_0,
                                                    const std::string& salt) const {
    (void)of_rank_0, (void)salt;
    return nullptr;
  }

  /// A short text for the value, by which ranks compare what they share: a checksum, or a line for
  /// each number. Empty where ranks may differ, or another rank would be needed.
  virtual std::string value_in_common() const { return {}; }

  /// Copies the object as it is now; the function that comes back restores it.
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
