/// \file
/// A folder of checkpoints: `step-000240`, which holds one, and `latest`, a symbolic link to it
/// that is only ever replaced by renaming.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "atomic_file.h"

namespace bert_ner {

/// By this file a checkpoint is told from other folders. It is written last.
inline constexpr const char* kRunRecordFile = "training_state.json";

/// `dir/latest` if there is one, else `dir` itself. \throws InputError for a link that cannot be
/// followed
std::filesystem::path latest_checkpoint(const std::filesystem::path& dir);

/// Puts the folder `name`, as `write` fills it, into `dir` and points `latest` to it. What was
/// there before is removed only when the new folder is on the disk and in its place, so that a
/// crash, a kill or a full disk at any moment leaves the previous checkpoint or the new one.
/// \returns `unknown` if all is in place and only the last flush of `dir` failed
/// \throws InputError if the system refuses (a full disk); `dir/latest` is then what it was
[[nodiscard]] AtomicFile::Durability replace_checkpoint(
    const std::filesystem::path& dir, const std::string& name,
    const std::function<void(const std::filesystem::path&)>& write);

/// Creates `dir` if need be and tries it out. \throws InputError if checkpoints cannot be put there
void prepare_checkpoints(const std::filesystem::path& dir);

}  // namespace bert_ner
