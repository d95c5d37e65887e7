#include "checkpoint_folder.h"

#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>
#include <vector>

#include "input_error.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLatest = "latest";

/// For what goes wrong before `latest` is moved.
[[noreturn]] void refuse(const fs::path& path, const std::string& what, int error) {
  throw InputError(path.string() + ": " + what + ": " + std::generic_category().message(error) +
                   "; the checkpoint that was there before is untouched");
}

void require_flush(const fs::path& folder) {
  const int error = flush_folder(folder);
  if (error != 0) refuse(folder, "cannot be flushed to the disk", error);
}

/// A folder that disappears again unless it is kept.
class ScratchFolder {
 public:
  explicit ScratchFolder(fs::path path) : path_(std::move(path)) {
    std::error_code error;
    fs::remove_all(path_, error);
    fs::create_directories(path_, error);
    if (error) refuse(path_, "cannot be created", error.value());
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (!kept_) fs::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const fs::path& path() const { return path_; }
  void rename_to(const fs::path& target) {
    if (std::rename(path_.c_str(), target.c_str()) != 0) refuse(target, "cannot be made", errno);
    kept_ = true;
  }

 private:
  fs::path path_;
  bool kept_ = false;
};

/// `name`, or `name`-2, `name`-3, ... where that is taken.
std::string free_name(const fs::path& dir, const std::string& name) {
  std::string candidate = name;
  for (int i = 2; fs::exists(fs::symlink_status(dir / candidate)); ++i) {
    candidate = name + "-" + std::to_string(i);
  }
  return candidate;
}

void refuse_folder_named_latest(const fs::path& dir) {
  const auto link = dir / kLatest;
  if (!fs::exists(fs::symlink_status(link)) || fs::is_symlink(link)) return;
  throw InputError(link.string() +
                   ": is in the way of the link to the newest checkpoint; move it elsewhere");
}

void point_latest_to(const fs::path& dir, const std::string& name) {
  const auto link = dir / kLatest, scratch = dir / ".latest.new";
  refuse_folder_named_latest(dir);
  std::error_code error;
  fs::remove(scratch, error);
  fs::create_symlink(name, scratch, error);
  if (error) refuse(link, "cannot be linked", error.value());
  if (std::rename(scratch.c_str(), link.c_str()) != 0) refuse(link, "cannot be replaced", errno);
}

/// Removes checkpoints other than `kept`, and what a killed process left half written.
void remove_others(const fs::path& dir, const std::string& kept) {
  std::error_code ignored;
  std::vector<fs::path> partial, checkpoints;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(".partial-")) {
      partial.push_back(entry.path());
    } else if (name.starts_with("step-") && name != kept &&
               fs::exists(entry.path() / kRunRecordFile)) {
      checkpoints.push_back(entry.path());
    }
  }
  for (const auto& path : partial) fs::remove_all(path, ignored);
  for (const auto& path : checkpoints) {
    // It loses its name first, so that what a kill leaves of it is swept up by the next save.
    const auto old = dir / (".partial-old-" + path.filename().string());
    fs::rename(path, old, ignored);
    fs::remove_all(old, ignored);
  }
}

}  // namespace

fs::path latest_checkpoint(const fs::path& dir) {
  const auto link = dir / kLatest;
  std::error_code error;
  const bool found = fs::exists(link, error);
  // Resolved once: a run that saves to the folder it resumed from moves the link under its feet.
  const auto folder = found && !error ? fs::canonical(link, error) : dir;
  if (error) {
    throw InputError(link.string() + ": cannot be followed: " + error.message() +
                     "; point it to a checkpoint's folder, or name that folder itself");
  }
  return folder;
}

void prepare_checkpoints(const fs::path& dir) {
  const ScratchFolder probe(dir / ".partial-probe");
  refuse_folder_named_latest(dir);
}

AtomicFile::Durability replace_checkpoint(const fs::path& dir, const std::string& name,
                                          const std::function<void(const fs::path&)>& write) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) refuse(dir, "cannot be created", error.value());
  ScratchFolder scratch(dir / (".partial-" + name));
  try {
    write(scratch.path());
  } catch (const InputError& failure) {
    throw InputError(std::string(failure.what()) + "; the checkpoint before is untouched");
  }
  require_flush(scratch.path());
  const auto final_name = free_name(dir, name);
  scratch.rename_to(dir / final_name);
  require_flush(dir);
  point_latest_to(dir, final_name);
  if (flush_folder(dir) != 0) return AtomicFile::Durability::unknown;
  remove_others(dir, final_name);
  return AtomicFile::Durability::durable;
}

}  // namespace bert_ner
