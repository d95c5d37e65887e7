/// \file
/// Loads and saves weights in the safetensors format of Hugging Face.
#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/exception_message.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/model_refs.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/safetensors_header.h>
#include <mezzo/optim/detail/ema_params.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/from_file.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Tensors by name, as Python's state_dict.
using TensorDict = std::map<std::string, at::Tensor>;

/// Keys that did not match, as torch's load_state_dict returns them.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys{};     ///< only in the module
  std::vector<std::string> unexpected_keys{};  ///< only in the file, without the prefix
};

/// Options for loading a module.
struct LoadSafetensorsOptions {
  bool strict = true;    ///< throw for missing and unexpected keys
  std::string prefix{};  ///< load only names that begin with it, such as "bert.", and remove it
};

namespace detail {

/// Maps a file copy-on-write, as a tensor of bytes.
inline at::Tensor map_file(const std::filesystem::path& path) {
  const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path));
  return at::from_file(path.string(), /*shared=*/false, size, at::kByte);
}
inline std::string_view to_string_view(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

inline TensorDict load_safetensors_file(const std::filesystem::path& path) try {
  const at::Tensor file = map_file(path);
  TensorDict tensors;
  for (const auto& [name, dtype_index, sizes, begin, end] :
       read_safetensors_header(to_string_view(file))) {
    at::Tensor bytes =
        file.slice(0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end));
    const at::ScalarType dtype = kSafetensorsDtypes[dtype_index];
    TORCH_CHECK(dtype != at::kBool || bytes.le(1).all().item<bool>(), name,
                " has a BOOL other than 0 and 1");
    if (begin % c10::elementSize(dtype) != 0) bytes = bytes.clone();  // misaligned
    tensors[name] = at::from_blob(
        bytes.mutable_data_ptr(), sizes, [bytes](void*) {}, dtype);
  }
  return tensors;
} catch (...) {
  TORCH_CHECK(false, path.string(), ": ", current_exception_message());
}

/// Loads the files that an index such as model.safetensors.index.json lists.
inline TensorDict load_safetensors_shards(const std::filesystem::path& index) try {
  const at::Tensor file = map_file(index);
  std::map<std::string, std::set<std::string>> names;  // by shard
  JsonReader json(to_string_view(file));
  json.read_object([&](const std::string& key) {
    if (key != "weight_map") return json.skip_value();
    json.read_object([&](const std::string& name) { names[json.read_string()].insert(name); });
  });
  json.check_end();
  TORCH_CHECK(!names.empty(), "it lacks a weight_map; pass model.safetensors.index.json");
  TensorDict tensors;
  for (const auto& [shard, shard_names] : names) {
    TORCH_CHECK(shard.find_first_of("/\\:") == std::string::npos, shard, " is not a file name");
    for (const auto& [name, tensor] : load_safetensors_file(index.parent_path() / shard)) {
      TORCH_CHECK(shard_names.contains(name), "it does not list ", name, " of ", shard);
      tensors[name] = tensor;
    }
    for (const std::string& name : shard_names) {
      TORCH_CHECK(tensors.contains(name), name, " is missing in ", shard);
    }
  }
  return tensors;
} catch (...) {
  TORCH_CHECK(false, index.string(), ": ", current_exception_message());
}

inline void check_is_dense(const TensorDict& tensors) {
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta(), name,
                " is ", describe(tensor), "; safetensors needs dense tensors with memory");
  }
}

/// Returns the parameters and buffers of a module.
inline TensorDict get_dense_state_dict(const ModelRef& model) {
  TORCH_CHECK(model.module != nullptr, "the module holder is empty; construct the module first");
  const TensorsByName tensors = get_state_dict(*model.module);
  TensorDict state_dict(tensors.begin(), tensors.end());
  check_is_dense(state_dict);
  return state_dict;
}

}  // namespace detail

/// Reads the tensors of a file, of the shards that a model.safetensors.index.json lists, or of a
/// model directory that has either.
///
/// The tensors are on the CPU. They refer to the file, which is mapped into memory until the last
/// of them is destroyed, and is read when they are used. Writes to them do not change the file. The
/// file may be removed or replaced, as by save_safetensors, but must not be changed in place.
/// \throws c10::Error for an invalid file, and for a dtype that libtorch lacks (F4, F6)
inline TensorDict load_safetensors(const std::filesystem::path& path) {
  std::filesystem::path file = path;
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    file /= "model.safetensors";
    if (!std::filesystem::exists(file, ignored)) file += ".index.json";
  }
  return file.extension() == ".json" ? detail::load_safetensors_shards(file)
                                     : detail::load_safetensors_file(file);
}

/// Copies tensors to the parameters and buffers of a module with the same names, converted to their
/// dtypes and devices. One name of a tied weight suffices. Reports mismatches as load_state_dict.
/// \throws c10::Error, before anything is written, for a tensor of another shape, for different
///   values of a tied weight, and if `strict` for missing and unexpected keys
inline IncompatibleKeys load_safetensors(const detail::ModelRef& model, const TensorDict& tensors,
                                         const LoadSafetensorsOptions& options = {}) {
  const TensorDict state_dict = detail::get_dense_state_dict(model);
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> copies;  // target and source
  std::string errors;
  for (const auto& [name, tensor] : state_dict) {
    const auto found = tensors.find(options.prefix + name);
    if (found == tensors.end()) continue;
    const at::Tensor& saved = found->second;
    TORCH_CHECK(!detail::is_averaged(tensor), name,
                " holds an average while an EmaGuard is alive; destroy the guard first");
    TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, name,
                " is expanded; register a contiguous() copy");
    if (saved.sizes() != tensor.sizes()) {
      errors += c10::str("\n  size mismatch for ", name, ": ", detail::describe(saved),
                         " in the file, ", detail::describe(tensor), " in the current model");
      continue;
    }
    if (saved.scalar_type() != tensor.scalar_type()) {  // throws if there is no conversion
      at::empty({1}, tensor.options()).copy_(at::zeros({1}, saved.options()));
    }
    const auto [copy, is_new] = copies.try_emplace(detail::memory_key(tensor), tensor, saved);
    const auto to_bytes = [](const at::Tensor& t) {
      return t.contiguous().flatten().view(at::kByte);
    };
    if (is_new || at::equal(to_bytes(copy->second.second), to_bytes(saved))) continue;
    errors += "\n  " + name + " is tied to a weight that has other values in the file";
  }
  IncompatibleKeys keys;
  for (const auto& [name, tensor] : state_dict) {
    const bool is_loaded =
        tensors.contains(options.prefix + name) || copies.contains(detail::memory_key(tensor));
    if (!is_loaded) keys.missing_keys.push_back(name);
  }
  for (const auto& [name, tensor] : tensors) {
    if (!name.starts_with(options.prefix)) continue;
    const std::string key = name.substr(options.prefix.size());
    if (!state_dict.contains(key)) keys.unexpected_keys.push_back(key);
  }
  const auto list = [](const char* kind, const std::vector<std::string>& names) {
    if (names.empty()) return std::string();
    return c10::str("\n  ", kind, " key(s) in state_dict: \"", c10::Join("\", \"", names), "\"");
  };
  if (options.strict) {
    errors += list("Missing", keys.missing_keys) + list("Unexpected", keys.unexpected_keys);
  }
  TORCH_CHECK(errors.empty(), "Error(s) in loading state_dict for ", model.module->name(), ":",
              errors, "\nNothing was loaded");
  for (const auto& [memory, copy] : copies) {
    const detail::NoGradInferenceGuard no_grad(copy.first.is_inference());
    copy.first.copy_(copy.second);
  }
  detail::clear_autocast_cache();
  return keys;
}

/// Loads a module from the files at `path`.
inline IncompatibleKeys load_safetensors(const detail::ModelRef& model,
                                         const std::filesystem::path& path,
                                         const LoadSafetensorsOptions& options = {}) {
  const TensorDict tensors = load_safetensors(path);
  IncompatibleKeys keys;
  try {
    keys = load_safetensors(model, tensors, options);
  } catch (...) {
    TORCH_CHECK(false, path.string(), ": ", detail::current_exception_message());
  }
  return keys;
}

/// Writes tensors to `path`, and replaces an existing file atomically, as checkpoints do. The file
/// equals that of Python's save_file. Device and non-contiguous tensors are copied one at a time.
/// \param metadata  transformers requires the default
/// \throws c10::Error for a dtype or layout that the format lacks, and on system errors; an
///   existing file is then unchanged
inline void save_safetensors(const TensorDict& tensors, const std::filesystem::path& path,
                             const std::map<std::string, std::string>& metadata = {
                                 {"format", "pt"}}) {
  detail::check_is_dense(tensors);
  std::vector<detail::SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    const auto dtype = detail::find_index(detail::kSafetensorsDtypes, tensor.scalar_type());
    TORCH_CHECK(dtype < detail::kSafetensorsDtypes.size() && name != "__metadata__", name, " (",
                detail::describe(tensor), "): safetensors lacks this dtype or reserves this name");
    entries.push_back({name, dtype, tensor.sizes().vec(), 0, tensor.nbytes()});
  }
  const std::string header = detail::make_safetensors_header(entries, metadata);
  detail::replace_atomically(path, [&](detail::AtomicFile& file) {
    const c10::NoGradGuard no_grad;
    file.write(header.data(), header.size());
    for (const auto& entry : entries) {
      const at::Tensor tensor =
          tensors.at(entry.name).resolve_conj().resolve_neg().to(at::kCPU).contiguous();
      file.write(tensor.const_data_ptr(), tensor.nbytes());
    }
  });
}

/// Saves the parameters and buffers of a module. A tied weight is saved under the first of its
/// names, and the metadata has the others, as Python's save_model does. Under an EmaGuard, saves
/// the averages.
inline void save_safetensors(const detail::ModelRef& model, const std::filesystem::path& path,
                             std::map<std::string, std::string> metadata = {{"format", "pt"}}) {
  TensorDict tensors;
  std::map<std::string, std::string> first_names;
  for (const auto& [name, tensor] : detail::get_dense_state_dict(model)) {
    const auto [first, is_new] = first_names.emplace(detail::memory_key(tensor), name);
    is_new ? (void)tensors.emplace(name, tensor) : (void)metadata.emplace(name, first->second);
  }
  save_safetensors(tensors, path, metadata);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
