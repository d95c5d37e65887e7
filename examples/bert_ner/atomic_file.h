#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace bert_ner {

/// A file that appears at its place whole or not at all.
///
/// Bytes go to a temporary file of its own name in the same folder. commit() brings them to the
/// disk and renames the temporary over the target, so a reader sees either what was there before or
/// all of the new file, also after a crash or a `kill -9`. The temporary that such an end leaves
/// behind, ".NAME.PID-N.tmp", is removed by the next AtomicFile of that NAME: it is locked (flock)
/// as long as its writer lives. A symbolic link in the target's place is replaced, not followed.
///
/// One thread at a time may use an object; several objects, even with the same target, do not
/// disturb each other. A program that may run under a file size limit (`ulimit -f`) ignores SIGXFSZ
/// so that the limit arrives here as an error rather than as a signal.
class AtomicFile {
 public:
  /// What is known after the rename: kept even if the power fails now, or the folder could not be
  /// synchronised.
  enum class Durability { durable, unknown };

  /// Creates the temporary. Throws InputError if the folder does not exist or cannot be written, or
  /// if the target is itself a folder.
  explicit AtomicFile(std::filesystem::path target);
  /// Removes the temporary unless it was committed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends. Throws InputError with the system's reason (a full disk, a quota, a limit); the
  /// target is untouched.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);

  /// fsync, rename, fsync of the folder; to be called once, as the last thing. Throws InputError if
  /// the file could not be put in place: the target is then untouched. If only the last fsync fails
  /// the file is in place and `unknown` comes back.
  [[nodiscard]] Durability commit();

 private:
  bool create_temporary();
  [[noreturn]] void fail(std::string_view what, int error) const;
  void close_temporary() noexcept;

  std::filesystem::path target_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
  bool committed_ = false;
};

}  // namespace bert_ner
