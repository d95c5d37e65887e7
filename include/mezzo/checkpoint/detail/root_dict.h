#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/stateful.h>
#include <mezzo/optim/detail/ema_params.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <cstdint>
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
      "export the averages, save_safetensors(model, path))");
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
