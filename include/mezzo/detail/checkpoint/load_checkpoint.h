#pragma once

#include <mezzo/detail/checkpoint/checkpoint_part.h>
#include <mezzo/detail/checkpoint/checkpoint_reader.h>
#include <mezzo/version.h>

#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

// Loading: what the file has is compared with what the state wants, then read, and only then given
// to the objects.
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

inline const CheckpointEntry* entry_named(const CheckpointIndex& index, const std::string& name) {
  for (const CheckpointEntry& entry : index.entries) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

inline void check_names(const CheckpointReader& reader, const std::vector<NamedPart>& parts,
                        bool subset) {
  std::string missing, extra;
  for (const NamedPart& part : parts) {
    if (entry_named(reader.index(), part.name) == nullptr) missing += " \"" + part.name + "\"";
  }
  for (const CheckpointEntry& entry : reader.index().entries) {
    const bool is_wanted = std::any_of(parts.begin(), parts.end(), [&entry](const NamedPart& part) {
      return part.name == entry.name;
    });
    if (!is_wanted && !subset) extra += " \"" + entry.name + "\"";
  }
  TORCH_CHECK(
      missing.empty() && extra.empty(), reader.path().string(), " is another training state's:",
      missing.empty() ? std::string() : " it lacks" + missing + ";",
      extra.empty() ? std::string() : " it has" + extra + ", which the state does not name;",
      " nothing was loaded");
}

inline std::map<std::string, std::string> layout_lines(const std::string& layout) {
  std::map<std::string, std::string> lines;
  std::istringstream stream(layout);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t colon = line.find(": ");
    lines[line.substr(0, colon)] = colon == std::string::npos ? "" : line.substr(colon + 2);
  }
  return lines;
}

/// The first thing in which they differ; empty if there is none.
inline std::string layout_difference(const std::string& in_file, const std::string& here) {
  if (in_file == here) return {};
  const auto file_lines = layout_lines(in_file), own_lines = layout_lines(here);
  for (const auto& [name, shape] : file_lines) {
    const auto own = own_lines.find(name);
    if (own == own_lines.end()) return "the file has the " + name + ", and the module does not";
    if (own->second != shape) {
      return "the " + name + " is " + shape + " in the file, and " + own->second + " here";
    }
  }
  for (const auto& [name, shape] : own_lines) {
    if (file_lines.count(name) == 0) return "the file lacks the " + name;
  }
  return {};
}

/// What is left to do for one object once all is read.
struct PendingPart {
  const NamedPart* part;
  std::function<void()> apply;
};

/// \throws DamagedCheckpoint, or c10::Error for a file that is whole but does not fit
inline std::vector<PendingPart> decode_parts(const CheckpointReader& reader,
                                             const std::vector<NamedPart>& parts, bool subset,
                                             std::optional<at::Device> device) {
  const std::string file = reader.path().string();
  check_names(reader, parts, subset);
  for (const auto& [name, part] : parts) {
    const CheckpointEntry& entry = *entry_named(reader.index(), name);
    TORCH_CHECK(entry.kind == part->kind(), file, ": \"", name, "\" is of the kind \"", entry.kind,
                "\" there, and \"", part->kind(), "\" here; nothing was loaded");
    const std::string difference = layout_difference(entry.layout, part->layout());
    TORCH_CHECK(difference.empty(), file, ": \"", name, "\" does not fit: ", difference,
                "; nothing was loaded");
  }
  std::vector<PendingPart> pending;
  for (const NamedPart& named : parts) {
    try {
      const ByteSource source = reader.source(*entry_named(reader.index(), named.name));
      pending.push_back({&named, named.part->decode(source, device)});
    } catch (const DamagedCheckpoint&) {
      throw;
    } catch (...) {
      TORCH_CHECK(false, file, ": \"", named.name,
                  "\" cannot be read: ", message_of_current_exception(), "; nothing was loaded");
    }
  }
  return pending;
}

/// Gives the objects what was read; all or none.
inline void apply_parts(const std::string& file, std::vector<PendingPart>& pending) {
  const c10::NoGradGuard no_grad;
  std::vector<std::function<void()>> undo;
  for (const PendingPart& one : pending) {
    try {
      undo.push_back(one.part->part->snapshot());
    } catch (...) {
      TORCH_CHECK(false, file, ": nothing was loaded, because \"", one.part->name,
                  "\" cannot be kept for the case of a failure: ", message_of_current_exception());
    }
  }
  for (std::size_t i = 0; i < pending.size(); ++i) {
    try {
      pending[i].apply();
      pending[i].apply = nullptr;  // with the memory of what was read
    } catch (...) {
      const std::string message = message_of_current_exception();
      std::string left;
      for (std::size_t k = 0; k <= i; ++k) {
        try {
          undo[k]();
        } catch (...) {
          left += "; and \"" + pending[k].part->name +
                  "\" could not be put back: " + message_of_current_exception();
        }
      }
      if (left.empty()) left = "; everything is as it was before";
      TORCH_CHECK(false, file, ": \"", pending[i].part->name, "\" cannot be loaded: ", message,
                  left);
    }
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
