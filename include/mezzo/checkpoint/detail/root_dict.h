#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/stateful.h>
#include <mezzo/optim/detail/ema_params.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_saveable(const char* caller, const std::vector<CheckpointEntry>& entries,
                           std::int64_t step) {
  TORCH_CHECK(!entries.empty(), caller,
              ": the state is empty; add the objects of the training run, as in "
              "state.add(\"model\", model)");
  TORCH_CHECK(step >= 0, caller, ": step is ", step, "; it should be at least 0");
}

/// \throws c10::Error while an EmaGuard replaces weights by averages
inline void check_no_ema_guard() {
  TORCH_CHECK(
      averaged_parameters().withLock([](const auto& all) { return all.empty(); }),
      "a parameter holds an average while an EmaGuard is alive; destroy the guard first (to "
      "export the averages, torch::save the model)");
}

/// Returns a warning about the first module buffer with inf or NaN, or an empty string.
/// Synchronizes with the devices of the buffers.
inline std::string get_nonfinite_buffer_warning(const std::vector<CheckpointEntry>& entries) {
  const ParameterFqns parameters = get_parameter_fqns(entries);
  for (const CheckpointEntry& entry : entries) {
    if (!entry.stateful.state_dict) continue;
    for (const auto& [name, tensor] : entry.stateful.state_dict()) {
      const bool is_checked = tensor.is_floating_point() && tensor.layout() == at::kStrided &&
                              !tensor.is_meta() && tensor.element_size() > 1 &&
                              tensor.numel() > 0 &&
                              parameters.count(tensor.unsafeGetTensorImpl()) == 0;
      if (!is_checked || tensor.detach().isfinite().all().item<bool>()) continue;
      return "the buffer \"" + entry.name + "." + name +
             "\" contains inf or NaN, which further steps do not repair: load an earlier "
             "checkpoint, or reset the buffer";
    }
  }
  return {};
}

/// Returns the values of all objects by name. Tensors are not copied.
inline PythonDict collect_values(const std::vector<CheckpointEntry>& entries) {
  check_no_ema_guard();
  const ParameterFqns names = get_parameter_fqns(entries);
  PythonDict values = make_dict();
  for (const CheckpointEntry& entry : entries) {
    try {
      values.insert(entry.name, entry.stateful.save(names));
    } catch (...) {
      TORCH_CHECK(false, "\"", entry.name, "\" cannot be saved: ", current_exception_message());
    }
  }
  return values;
}

/// Returns the dict that a checkpoint stores: `values`, and metadata under "mezzo".
inline c10::IValue make_root_dict(const PythonDict& values, std::int64_t step,
                                  const c10::IValue& per_rank_values = {}) {
  PythonDict metadata = make_dict();
  metadata.insert("format", std::int64_t{2});
  metadata.insert("step", step);
  if (!per_rank_values.isNone()) metadata.insert("per_rank", per_rank_values);
  PythonDict root_dict = values.copy();
  root_dict.insert(kMezzoKey, metadata);
  return root_dict;
}

/// Writes a checkpoint, and returns its size in bytes.
/// \param directory_error  errno of a failed fsync of the directory's parents, or 0
inline std::uint64_t write_checkpoint_file(const std::filesystem::path& target,
                                           const c10::IValue& root_dict, int directory_error,
                                           const std::function<void(const std::string&)>& warn) {
  AtomicFile file(target);
  write_zip(file, root_dict);
  const int file_error = file.commit();
  const int error = file_error != 0 ? file_error : directory_error;
  if (error != 0) {
    warn(target.string() +
         " is written, but may not survive a system crash: closing it, or fsync "
         "of its directory, failed: " +
         errno_message(error));
  }
  return file.size();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
