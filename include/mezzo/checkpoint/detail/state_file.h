#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_folder.h>
#include <mezzo/checkpoint/detail/part_of.h>
#include <mezzo/optim/detail/ema_params.h>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// A training state to and from a file, of one process or of one rank of several.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- Saving ------------------------------------------------------------------------------------

inline void check_can_be_saved(const char* caller, const std::vector<NamedPart>& parts,
                               std::int64_t step) {
  TORCH_CHECK(!parts.empty(), caller,
              ": the state is empty; add what training goes on from, as in "
              "state.add(\"model\", model)");
  TORCH_CHECK(step >= 0, caller, ": step is ", step, "; it should be at least 0");
}

/// Throws if parameters hold averages in place of their weights: see averaged_parameters.h.
inline void check_not_averaged() {
  TORCH_CHECK(averaged_parameters().withLock([](const auto& all) { return all.empty(); }),
              "a parameter holds an average, for an EmaGuard is alive; let it end first (to export "
              "the averages, torch::save the model)");
}

/// Returns a sentence on the first buffer of a module that holds inf or NaN; empty if there is
/// none. Waits for the devices of the buffers.
inline std::string nonfinite_buffer(const std::vector<NamedPart>& parts) {
  const ParameterNames parameters = parameter_names(parts);
  for (const NamedPart& one : parts) {
    if (!one.part.state_dict) continue;
    for (const auto& [name, tensor] : one.part.state_dict()) {
      const bool is_read = tensor.is_floating_point() && tensor.layout() == at::kStrided &&
                           !tensor.is_meta() && tensor.element_size() > 1 && tensor.numel() > 0 &&
                           parameters.count(tensor.unsafeGetTensorImpl()) == 0;
      if (!is_read || tensor.detach().isfinite().all().item<bool>()) continue;
      return "the buffer \"" + one.name + "." + name +
             "\" holds inf or NaN, which no step repairs: load an earlier checkpoint, or reset it";
    }
  }
  return {};
}

/// Returns the values of a state's objects by name, with their own tensors.
inline PythonDict values_of(const std::vector<NamedPart>& parts) {
  check_not_averaged();
  const ParameterNames names = parameter_names(parts);
  PythonDict values = python_dict();
  for (const NamedPart& one : parts) {
    try {
      values.insert(one.name, one.part.save(names));
    } catch (...) {
      TORCH_CHECK(false, "\"", one.name, "\" cannot be saved: ", message_of_current_exception());
    }
  }
  return values;
}

/// Returns what a file holds: the values, and mezzo's own entry.
inline c10::IValue document_of(const PythonDict& values, std::int64_t step,
                               const c10::IValue& ranks = {}) {
  PythonDict own = python_dict();
  own.insert("format", std::int64_t{2});
  own.insert("step", step);
  if (!ranks.isNone()) own.insert("ranks", ranks);
  PythonDict document = values.copy();
  document.insert(kMezzoKey, own);
  return document;
}

/// Writes a file, and returns its size. `folder_error` is the system's from flushing the folder's
/// own name, or 0.
inline std::uint64_t write_file(const std::filesystem::path& target, const c10::IValue& document,
                                int folder_error,
                                const std::function<void(const std::string&)>& warn) {
  AtomicFile file(target);
  write_zip(file, document);
  const int file_error = file.commit();
  const int error = file_error != 0 ? file_error : folder_error;
  if (error != 0) {
    warn(target.string() +
         " is in its place, but whether it would survive a crash of the machine is not known: it "
         "cannot be closed, or its folder not be flushed to the disk: " +
         errno_message(error));
  }
  return file.total();
}

// --- Loading: everything is compared and checked before the first object changes ----------------

/// One of the ranks that read together. `ranks` is 0 for a process without ranks.
struct RankOf {
  std::int64_t rank = 0;
  std::int64_t ranks = 0;
};

/// What remains to be done for a file that fits.
struct CheckedLoad {
  std::filesystem::path file{};
  std::int64_t step = 0;
  std::vector<std::pair<std::string, CheckpointPart::Apply>> pending{};
  /// Differences because another number of ranks wrote the file, one sentence each.
  std::vector<std::string> notes{};
};

inline void check_names(const std::string& file, const ReadCheckpoint& read,
                        const std::vector<NamedPart>& parts, bool subset) {
  std::string missing, extra;
  for (const NamedPart& one : parts) {
    if (read.values.contains(one.name)) continue;
    missing += (missing.empty() ? " \"" : ", \"") + one.name + "\"";
  }
  for (const auto& entry : read.values) {
    const std::string& name = entry.key().toStringRef();
    const bool is_wanted = std::any_of(parts.begin(), parts.end(),
                                       [&name](const NamedPart& one) { return one.name == name; });
    if (!is_wanted && !subset) extra += (extra.empty() ? " \"" : ", \"") + name + "\"";
  }
  TORCH_CHECK(missing.empty() && extra.empty(), file, " is another training state's:",
              missing.empty() ? std::string() : " it lacks" + missing + ";",
              extra.empty()
                  ? std::string()
                  : " it has" + extra +
                        ", which the state does not name: add them, or load with {.subset = true};",
              " nothing was loaded");
}

/// Moves the tensors of a bare state_dict, as Python's `torch.save(model.state_dict(), path)`
/// writes it, under the name of the module, if the module is the only object.
inline void name_state_dict(ReadCheckpoint& read, const std::vector<NamedPart>& parts) {
  if (read.is_training || parts.size() != 1 || !parts[0].part.state_dict) return;
  for (const auto& entry : read.values) {
    if (!entry.value().isTensor()) return;
  }
  PythonDict named = python_dict();
  named.insert(parts[0].name, read.values);
  read.values = named;
}

/// Returns a state_dict with its floating tensors cast to the dtypes of `own`, as Python's
/// load_state_dict does. Adds a note with the number of tensors that were cast.
inline c10::IValue cast_state_dict(const c10::IValue& value, const std::string& name,
                                   const TensorsByName& own, std::vector<std::string>& notes) {
  if (!value.isGenericDict()) return value;
  PythonDict cast = value.toGenericDict().copy();
  std::string first;
  std::size_t count = 0;
  for (const auto& [key, tensor] : own) {
    const c10::IValue saved = item(value, key);
    if (!saved.isTensor() || !tensor.is_floating_point()) continue;
    const at::Tensor read = saved.toTensor();
    const bool is_cast = read.is_floating_point() && read.scalar_type() != tensor.scalar_type() &&
                         read.layout() == at::kStrided && read.sizes() == tensor.sizes();
    if (!is_cast) continue;
    cast.insert_or_assign(key, read.to(tensor.scalar_type()));
    if (count++ > 0) continue;
    first = c10::str(", \"", key, "\" from ", dtype_name(read.scalar_type()), " to ",
                     dtype_name(tensor.scalar_type()));
  }
  if (count > 0) {
    notes.push_back(
        c10::str('"', name, "\" is cast to the dtypes of the model: ", count, " tensors", first));
  }
  return cast;
}

/// Checks one object. Returns the function that changes it; null to leave it as it is.
inline CheckpointPart::Apply check_part(const NamedPart& one, const ReadCheckpoint& read,
                                        const ParameterNames& names, RankOf who,
                                        std::vector<std::string>& notes) {
  const c10::IValue of_ranks = item(read.ranks, one.name);
  const auto ranks = static_cast<std::int64_t>(of_ranks.isNone() ? 1 : of_ranks.toListRef().size());
  const std::string name = '"' + one.name + '"', had = std::to_string(ranks) + " ranks had";
  if (one.is_per_rank && who.ranks > 0 && who.ranks != ranks) {
    notes.push_back(name + " is left as it is: the file has what " + had + ", and here are " +
                    std::to_string(who.ranks));
    return nullptr;
  }
  if (one.is_per_rank && who.ranks > 1) {
    return one.part.load(of_ranks.toListRef()[static_cast<std::size_t>(who.rank)], names);
  }
  if (ranks > 1) notes.push_back(name + " is rank 0's: the file has what " + had);
  const c10::IValue value = read.values.at(one.name);
  const bool may_cast = !read.is_training && one.part.state_dict;
  return one.part.load(
      may_cast ? cast_state_dict(value, one.name, one.part.state_dict(), notes) : value, names);
}

/// \throws UnusableCheckpoint, or c10::Error for a file that is whole but does not fit
inline CheckedLoad check_file(const std::filesystem::path& path,
                              const std::vector<NamedPart>& parts, bool subset, RankOf who = {}) {
  check_not_averaged();
  const std::string file = path.string();
  ReadCheckpoint read = read_checkpoint(path);
  name_state_dict(read, parts);
  CheckedLoad checked{.file = path, .step = read.step};
  check_names(file, read, parts, subset);
  const ParameterNames names = parameter_names(parts);
  for (const bool is_archive : {false, true}) {
    for (const NamedPart& one : parts) {
      if (one.part.is_archive != is_archive) continue;
      try {
        auto apply = check_part(one, read, names, who, checked.notes);
        if (apply) checked.pending.emplace_back(one.name, std::move(apply));
      } catch (...) {
        TORCH_CHECK(false, file, ": \"", one.name,
                    "\" does not fit: ", message_of_current_exception(), "; nothing was loaded");
      }
    }
  }
  return checked;
}

/// Gives the objects their values, in their order.
inline void apply(CheckedLoad& checked) {
  const c10::NoGradGuard no_grad;
  const auto end = c10::make_scope_exit([] { clear_autocast_cache(); });
  for (auto& [name, apply_one] : checked.pending) {
    try {
      apply_one();
      apply_one = nullptr;  // with what it holds of the file
    } catch (...) {
      TORCH_CHECK(false, checked.file.string(), ": \"", name,
                  "\" refuses its value: ", message_of_current_exception(),
                  "; the objects before it are loaded, and those behind it are not: load another "
                  "checkpoint, or begin anew, before you go on");
    }
  }
}

inline void check_can_be_loaded(const char* caller, const std::vector<NamedPart>& parts) {
  TORCH_CHECK(!parts.empty(), caller,
              ": the state is empty; add what was saved, as in state.add(\"model\", model)");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
