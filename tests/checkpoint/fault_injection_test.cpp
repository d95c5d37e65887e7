// Corruption, system call failures and kills: an intact checkpoint remains, and errors are
// detected.

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/scoped_syscalls.h"
#include "../support/temp_dir.h"

namespace {

using mezzo::CheckpointManager;
using mezzo::TrainingState;
using test_support::libc_syscalls;
using test_support::message_of;
using test_support::read_file;
using test_support::ScopedSyscalls;
using test_support::Syscalls;
using test_support::TempDir;
using test_support::write_file;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr const char* kNoError = "no error";

/// A tensor with equal elements, so that a mixture of two checkpoints would be detected.
struct Training {
  explicit Training(int64_t size = 4) : weights(torch::zeros({size}, torch::kLong)) {
    state.add("weights", weights).add("position", position);
  }
  void set(int64_t value) {
    weights.fill_(value);
    position = value;
  }
  bool is(int64_t value) const { return position == value && weights.eq(value).all().item<bool>(); }

  torch::Tensor weights;
  int64_t position = 0;
  TrainingState state;
};

mezzo::CheckpointManagerOptions record_warnings(std::vector<std::string>& warnings,
                                                int64_t max_to_keep = 2) {
  return {.max_to_keep = max_to_keep,
          .on_warning = [&warnings](const std::string& text) { warnings.push_back(text); }};
}

std::filesystem::path save(CheckpointManager& checkpoints, Training& run, int64_t value) {
  run.set(value);
  return checkpoints.save(run.state, value).path;
}

std::vector<std::string> list_temporaries(const std::filesystem::path& directory) {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() == ".tmp") found.push_back(entry.path().string());
  }
  return found;
}

/// A small checkpoint that is modified in place.
class CorruptibleFile {
 public:
  CorruptibleFile() {
    CheckpointManager checkpoints(temp_dir_.path());
    file_ = save(checkpoints, run_, 7);
    size_ = std::filesystem::file_size(file_);
    descriptor_ = ::open(file_.c_str(), O_RDWR);
  }
  ~CorruptibleFile() { ::close(descriptor_); }

  off_t size() const { return static_cast<off_t>(size_); }
  void truncate(off_t size) { ASSERT_EQ(::ftruncate(descriptor_, size), 0); }
  void flip(off_t at, int bit) {
    unsigned char byte = 0;
    ASSERT_EQ(::pread(descriptor_, &byte, 1, at), 1);
    byte = static_cast<unsigned char>(byte ^ (1 << bit));
    ASSERT_EQ(::pwrite(descriptor_, &byte, 1, at), 1);
  }
  void append(char byte) { ASSERT_EQ(::pwrite(descriptor_, &byte, 1, size()), 1); }

  bool is_detected() {
    const std::string error = message_of([this] { mezzo::load_checkpoint(file_, run_.state); });
    return error.find("is corrupt") != std::string::npos;
  }
  const std::filesystem::path& file() const { return file_; }
  Training& run() { return run_; }

 private:
  TempDir temp_dir_;
  Training run_;
  std::filesystem::path file_;
  std::uintmax_t size_ = 0;
  int descriptor_ = -1;
};

TEST(CheckpointCorruption, DetectsEveryFlippedByte) {
  CorruptibleFile corrupt;
  ASSERT_FALSE(corrupt.is_detected());
  for (off_t i = 0; i < corrupt.size(); ++i) {
    corrupt.flip(i, static_cast<int>(i % 8));
    ASSERT_TRUE(corrupt.is_detected()) << "byte " << i;
    corrupt.flip(i, static_cast<int>(i % 8));
  }
  ASSERT_FALSE(corrupt.is_detected());
}

TEST(CheckpointCorruption, DetectsTruncationAndTrailingBytes) {
  CorruptibleFile corrupt;
  corrupt.append('\0');
  EXPECT_TRUE(corrupt.is_detected());
  for (off_t size = corrupt.size() - 1; size >= 0; --size) {
    corrupt.truncate(size);
    ASSERT_TRUE(corrupt.is_detected()) << "truncated at " << size;
  }
}

TEST(CheckpointCorruption, CorruptFileChangesNothing) {
  CorruptibleFile corrupt;
  corrupt.flip(corrupt.size() / 2, 3);
  corrupt.run().set(1);
  EXPECT_THAT(
      message_of([&] { mezzo::load_checkpoint(corrupt.file(), corrupt.run().state); }),
      AllOf(HasSubstr(corrupt.file().string()), HasSubstr("is corrupt"), HasSubstr("checksum")));
  EXPECT_TRUE(corrupt.run().is(1));
}

TEST(CheckpointCorruption, DetectsSplicedFiles) {
  const TempDir temp_dir;
  CheckpointManager checkpoints(temp_dir.path());
  Training run;
  const std::string first = read_file(save(checkpoints, run, 1));
  const auto file = save(checkpoints, run, 2);
  const std::string second = read_file(file);
  ASSERT_EQ(first.size(), second.size());
  std::size_t begin = 0;
  while (first[begin] == second[begin]) ++begin;
  for (std::size_t cut = begin + 1; cut < first.size(); cut += 61) {
    write_file(file, first.substr(0, cut) + second.substr(cut));
    ASSERT_THAT(message_of([&] { mezzo::load_checkpoint(file, run.state); }),
                HasSubstr("is corrupt"))
        << cut;
  }
}

/// Python's files have no checksum.
TEST(CheckpointCorruption, ThrowsForTensorBeyondStorage) {
  const TempDir temp_dir;
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  dict.insert("weights", torch::zeros({77}, torch::kLong));
  const std::vector<char> saved = torch::pickle_save(dict);
  const std::string bytes(saved.begin(), saved.end());
  torch::Tensor weights;
  TrainingState state;
  state.add("weights", weights);
  const auto file = temp_dir.path() / "python.pt";
  write_file(file, bytes);
  mezzo::load_checkpoint(file, state);
  EXPECT_EQ(weights.numel(), 77);
  std::string longer = bytes;
  int changed = 0;
  for (auto at = longer.find("K\x4d"); at != std::string::npos; at = longer.find("K\x4d", at)) {
    longer[at + 1] = '\x7f';
    ++changed;
  }
  EXPECT_EQ(changed, 2) << "numbers of elements, in the storage and in the shape";
  write_file(file, longer);
  EXPECT_THAT(message_of([&] { mezzo::load_checkpoint(file, state); }),
              HasSubstr("out of bounds of its storage"));
}

/// A directory with checkpoints of the values 1 and 2; the current value of the run is 9.
struct TwoSaved {
  TwoSaved()
      : checkpoints(temp_dir.path(), record_warnings(warnings)),
        first(save(checkpoints, run, 1)),
        second(save(checkpoints, run, 2)) {
    run.set(9);
  }

  std::string load_error() {
    return message_of([this] { checkpoints.load_latest(run.state); });
  }

  TempDir temp_dir;
  std::vector<std::string> warnings;
  Training run;
  CheckpointManager checkpoints;
  std::filesystem::path first, second;
};

TEST(CheckpointCorruption, FallsBackToPreviousWithWarning) {
  TwoSaved saved;
  write_file(saved.second, read_file(saved.second).substr(0, 100));
  const auto loaded = saved.checkpoints.load_latest(saved.run.state);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->step, 1);
  EXPECT_EQ(loaded->path, saved.first);
  EXPECT_TRUE(saved.run.is(1));
  EXPECT_THAT(saved.warnings, ElementsAre(AllOf(HasSubstr(saved.second.string() + " is corrupt"),
                                                HasSubstr("does not end as a checkpoint"))));
}

/// Paths that cannot be opened as files.
void create_dangling_symlink(const std::filesystem::path& path) {
  std::filesystem::create_symlink("nowhere", path);
}
void put_folder(const std::filesystem::path& path) { std::filesystem::create_directory(path); }
void put_pipe(const std::filesystem::path& path) { ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); }
void create_torch_save_file(const std::filesystem::path& path) {
  torch::save(torch::ones({3}), path.string());
}

TEST(CheckpointCorruption, SkipsPathsThatCannotBeOpened) {
  for (auto* const put : {create_dangling_symlink, put_folder, put_pipe, create_torch_save_file}) {
    TwoSaved saved;
    std::filesystem::remove(saved.second);
    put(saved.second);
    const auto loaded = saved.checkpoints.load_latest(saved.run.state);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->path, saved.first);
    EXPECT_TRUE(saved.run.is(1));
    EXPECT_THAT(saved.warnings, ElementsAre(AllOf(HasSubstr(saved.second.string()),
                                                  HasSubstr("trying the previous checkpoint"))));
    EXPECT_THAT(saved.warnings[0], Not(HasSubstr("is corrupt")));
  }
}

TEST(CheckpointCorruption, SkipsFileOnOpenError) {
  for (const int error : {EIO, EACCES}) {
    TwoSaved saved;
    Syscalls calls = libc_syscalls();
    calls.open = [&, real = calls.open](const char* path, int flags, mode_t mode) {
      if (path != saved.second.string()) return real(path, flags, mode);
      errno = error;
      return -1;
    };
    const ScopedSyscalls failing(calls);
    EXPECT_EQ(saved.checkpoints.load_latest(saved.run.state)->path, saved.first);
    EXPECT_THAT(saved.warnings, ElementsAre(HasSubstr("cannot be opened")));
    EXPECT_TRUE(saved.run.is(1));
  }
}

TEST(CheckpointCorruption, ReportsTorchSaveFileAsForeign) {
  const TempDir temp_dir;
  Training run;
  const auto file = temp_dir.path() / "model.pt";
  torch::save(torch::nn::Linear(2, 2), file.string());
  EXPECT_THAT(message_of([&] { mezzo::load_checkpoint(file, run.state); }),
              AllOf(HasSubstr(file.string()), HasSubstr("is not a checkpoint"),
                    HasSubstr("torch::load"), Not(HasSubstr("corrupt"))));
  put_pipe(temp_dir.path() / "pipe");
  EXPECT_THAT(message_of([&] { mezzo::load_checkpoint(temp_dir.path() / "pipe", run.state); }),
              HasSubstr("it is not a regular file"));
}

TEST(CheckpointCorruption, ReportsOtherFileAsForeign) {
  TwoSaved saved;
  write_file(saved.second, "%PDF-1.7, a document that was saved under the wrong name");
  EXPECT_THAT(
      message_of([&] { mezzo::load_checkpoint(saved.second, saved.run.state); }),
      AllOf(HasSubstr("is not a checkpoint (it is not a zip file)"), Not(HasSubstr("corrupt"))));
  EXPECT_EQ(saved.checkpoints.load_latest(saved.run.state)->path, saved.first);
}

TEST(CheckpointCorruption, ReportsOverwrittenHeaderAsCorrupt) {
  TwoSaved saved;
  std::string bytes = read_file(saved.second);
  bytes.replace(0, 4, "....");
  write_file(saved.second, bytes);
  EXPECT_THAT(message_of([&] { mezzo::load_checkpoint(saved.second, saved.run.state); }),
              HasSubstr("is corrupt"));
}

TEST(CheckpointCorruption, MaxToKeepIgnoresCorruptFiles) {
  TwoSaved saved;
  write_file(saved.second, "");
  saved.checkpoints.load_latest(saved.run.state);
  const auto third = save(saved.checkpoints, saved.run, 3);
  EXPECT_THAT(saved.checkpoints.checkpoints(), ElementsAre(third, saved.second, saved.first));
  const auto fourth = save(saved.checkpoints, saved.run, 4);
  EXPECT_THAT(saved.checkpoints.checkpoints(), ElementsAre(fourth, third));
}

TEST(CheckpointCorruption, LoadLatestThrowsIfAllCorrupt) {
  TwoSaved saved;
  write_file(saved.first, "");
  write_file(saved.second, "MEZZOCKP");
  EXPECT_THAT(saved.load_error(),
              AllOf(HasSubstr("no intact checkpoint"), HasSubstr(saved.first.string()),
                    HasSubstr(saved.second.string())));
  EXPECT_TRUE(saved.run.is(9));
}

TEST(CheckpointCorruption, ThrowsForNewerFormat) {
  TwoSaved saved;
  std::string bytes = read_file(saved.second);
  bytes.replace(bytes.rfind("format 2"), 8, "format 3");
  bytes.resize(bytes.size() - 8);
  write_file(saved.second, bytes + mezzo::detail::crc32c_hex(bytes.data(), bytes.size()));
  EXPECT_THAT(saved.load_error(), AllOf(HasSubstr("of format 3"), HasSubstr("update mezzo")));
  EXPECT_THAT(saved.warnings, IsEmpty());
}

/// Counts system calls, one of which fails.
struct Faults {
  std::string failing = "";  // its name
  int number = 0;            // of the failing call among those of that name, from 1; 0 for none
  int error = EIO;
  bool is_short = false;  // writes are short, which is not a failure
  bool kills = false;     // instead of failing
  std::vector<std::string> log = {};

  bool fails(const std::string& name) {
    log.push_back(name);
    if (name != failing || std::count(log.begin(), log.end(), name) != number) return false;
    if (kills) ::raise(SIGKILL);
    errno = error;
    return true;
  }

  Syscalls calls() {
    Syscalls calls = libc_syscalls();
    calls.open = [this, real = calls.open](const char* path, int flags, mode_t mode) {
      const bool creates = (flags & O_EXCL) != 0;
      if (fails(creates ? "create" : "open")) return -1;
      const int file = real(path, flags, mode);
      if (creates) created = file;
      return file;
    };
    calls.write = [this, real = calls.write](int file, const void* from, size_t count) {
      if (is_short) count = std::min<size_t>(count, 300000);
      return fails("write") ? -1 : real(file, from, count);
    };
    calls.fsync = [this, real = calls.fsync](int file) { return fails("fsync") ? -1 : real(file); };
    calls.close = [this, real = calls.close](int file) {
      if (file != created) return real(file);  // a file that is read, or a directory
      created = -1;
      const bool is_refused = fails("close");
      return real(file) == 0 && !is_refused ? 0 : -1;
    };
    calls.rename = [this, real = calls.rename](const char* from, const char* to) {
      return fails("rename") ? -1 : real(from, to);
    };
    calls.unlink = [this, real = calls.unlink](const char* path) {
      return fails("unlink") ? -1 : real(path);
    };
    return calls;
  }

  int created = -1;  // the file that is being written
};

/// 2 MB, for several write calls.
constexpr int64_t kLarge = 1 << 18;

TEST(CheckpointFaultInjection, FsyncsFileAndDirectoryAroundRename) {
  const TempDir temp_dir;
  Faults faults;
  CheckpointManager checkpoints(temp_dir.path());
  Training run;
  {
    const ScopedSyscalls logging(faults.calls());
    save(checkpoints, run, 1);
  }
  faults.log.erase(std::unique(faults.log.begin(), faults.log.end()), faults.log.end());
  EXPECT_THAT(faults.log,
              ElementsAre("open", "create", "write", "fsync", "rename", "close", "open", "fsync"));
}

/// Makes the `number`-th call of `name` fail while a second checkpoint is saved, and expects that
/// the latest checkpoint is intact. Returns whether the call occurred.
bool inject_fault(const std::string& name, int number, int error, bool is_short,
                  bool is_async = false) {
  const TempDir temp_dir;
  std::vector<std::string> warnings;
  Training run(kLarge);
  {
    CheckpointManager checkpoints(temp_dir.path(), record_warnings(warnings));
    save(checkpoints, run, 1);
  }
  Faults faults{.failing = name, .number = number, .error = error, .is_short = is_short};
  bool saved = true;
  {
    CheckpointManager checkpoints(temp_dir.path(), record_warnings(warnings));
    const ScopedSyscalls failing(faults.calls());
    run.set(2);
    const std::string message = message_of([&] {
      if (!is_async) {
        checkpoints.save(run.state, 2);
        return;
      }
      checkpoints.save_async(run.state, 2);
      run.set(8);  // training continues
      checkpoints.wait();
    });
    saved = message == kNoError;
    if (!saved) {
      EXPECT_THAT(message, HasSubstr(std::strerror(error)));
    }
    EXPECT_THAT(list_temporaries(temp_dir.path()), IsEmpty());
  }
  const bool occurred = std::count(faults.log.begin(), faults.log.end(), name) >= number;
  CheckpointManager checkpoints(temp_dir.path());
  run.set(9);
  EXPECT_TRUE(checkpoints.load_latest(run.state));
  EXPECT_TRUE(run.is(saved ? 2 : 1)) << name << ' ' << number;
  EXPECT_EQ(checkpoints.checkpoints().size(), saved ? 2U : 1U);
  // Only close and the fsync of the directory can fail after the checkpoint is saved.
  if (occurred && saved) {
    EXPECT_THAT(warnings, ElementsAre(HasSubstr("may not survive a system crash")));
  }
  save(checkpoints, run, 3);
  EXPECT_TRUE(run.is(3));
  return occurred;
}

TEST(CheckpointFaultInjection, AnySyscallFailurePreservesCheckpoint) {
  for (const bool is_async : {false, true}) {
    for (const std::string name : {"open", "create", "write", "fsync", "close", "rename"}) {
      int number = 1;
      while (inject_fault(name, number, name == "write" ? ENOSPC : EIO, false, is_async) &&
             number < 20)
        ++number;
      EXPECT_GT(number, name == "write" ? 3 : 1) << name << " was never called";
      EXPECT_LT(number, 20);
    }
  }
}

TEST(CheckpointFaultInjection, ContinuesShortWritesAndDetectsFailure) {
  int number = 1;
  while (inject_fault("write", number, EIO, /*is_short=*/true) && number < 20) ++number;
  EXPECT_GT(number, 6);
  EXPECT_LT(number, 20);
}

TEST(CheckpointFaultInjection, RetriesInterruptedCalls) {
  const TempDir temp_dir;
  Training run, read;
  Syscalls calls = libc_syscalls();
  int interrupted = 0;
  const auto interrupts = [&interrupted] { return interrupted++ % 2 == 0 ? (errno = EINTR) : 0; };
  calls.write = [&, real = calls.write](int file, const void* from, size_t count) -> ssize_t {
    return interrupts() != 0 ? -1 : real(file, from, count);
  };
  calls.pread = [&, real = calls.pread](int file, void* to, size_t count, off_t at) -> ssize_t {
    return interrupts() != 0 ? -1 : real(file, to, count, at);
  };
  const ScopedSyscalls failing(calls);
  CheckpointManager checkpoints(temp_dir.path());
  save(checkpoints, run, 3);
  EXPECT_TRUE(checkpoints.load_latest(read.state).has_value());
  EXPECT_TRUE(read.is(3));
  EXPECT_GT(interrupted, 4);
}

/// System calls that fail every fsync of a directory.
Syscalls failing_directory_fsync(int error) {
  Syscalls calls = libc_syscalls();
  calls.fsync = [error](int file) {
    struct stat status {};
    ::fstat(file, &status);
    if (!S_ISDIR(status.st_mode)) return 0;
    errno = error;
    return -1;
  };
  return calls;
}

TEST(CheckpointFaultInjection, WarnsOnceIfDirectoryFsyncFails) {
  for (const int error : {EINVAL, EACCES, EIO}) {
    const ScopedSyscalls failing(failing_directory_fsync(error));
    TwoSaved saved;
    for (int64_t value = 3; value < 9; ++value) save(saved.checkpoints, saved.run, value);
    EXPECT_EQ(saved.checkpoints.checkpoints().size(), 2U);
    EXPECT_THAT(saved.warnings, ElementsAre(HasSubstr("may not survive a system crash")));
  }
}

TEST(CheckpointFaultInjection, FsyncsParentsOfNewDirectories) {
  const TempDir temp_dir;
  Training run;
  std::vector<std::string> warnings;
  Syscalls calls = libc_syscalls();
  calls.open = [&temp_dir, real = calls.open](const char* path, int flags, mode_t mode) {
    if (path != temp_dir.path()) return real(path, flags, mode);
    errno = EIO;
    return -1;
  };
  CheckpointManager checkpoints(temp_dir.path() / "run", record_warnings(warnings));
  const ScopedSyscalls failing(calls);
  checkpoints.save(run.state, 1);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("may not survive a system crash")));
}

TEST(CheckpointFaultInjection, NextWriterRemovesStaleTemporaries) {
  const TempDir temp_dir;
  const auto left = temp_dir.path() / ".best.pt.0.tmp",
             of_0_2 = temp_dir.path() / ".best.pt.471.tmp",
             in_use = temp_dir.path() / ".best.pt.1.tmp",
             other = temp_dir.path() / ".last.pt.0.tmp";
  for (const auto& path : {left, of_0_2, in_use, other})
    write_file(path, "partial data of another file");
  const int writer = ::open(in_use.c_str(), O_RDWR);
  ASSERT_EQ(::flock(writer, LOCK_EX), 0);
  Training run;
  mezzo::save_checkpoint(temp_dir.path() / "best.pt", run.state);
  EXPECT_THAT(list_temporaries(temp_dir.path()),
              testing::UnorderedElementsAre(in_use.string(), other.string()));
  mezzo::load_checkpoint(temp_dir.path() / "best.pt", run.state);
  ::close(writer);
}

TEST(CheckpointFaultInjection, ConcurrentSavesYieldIntactFile) {
  const TempDir temp_dir;
  const auto file = temp_dir.path() / "best.pt";
  std::vector<std::string> errors(4, kNoError);
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < errors.size(); ++number) {
    threads.emplace_back([&, number] {
      Training run(kLarge), read(kLarge);
      for (int64_t round = 0; round < 20 && errors[number] == kNoError; ++round) {
        run.set(round * 10 + static_cast<int64_t>(number));
        errors[number] = message_of([&] {
          mezzo::save_checkpoint(file, run.state, round);
          mezzo::load_checkpoint(file, read.state);
        });
        EXPECT_TRUE(read.is(read.position));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(errors, testing::Each(kNoError));
  EXPECT_THAT(list_temporaries(temp_dir.path()), IsEmpty());
}

TEST(CheckpointFaultInjection, ReadErrorFallsBackToPrevious) {
  TwoSaved saved;
  Syscalls calls = libc_syscalls();
  int reads = 0;
  calls.pread = [&, real = calls.pread](int file, void* to, size_t count, off_t offset) -> ssize_t {
    if (++reads > 1) return real(file, to, count, offset);
    errno = EIO;
    return -1;
  };
  const ScopedSyscalls failing(calls);
  EXPECT_EQ(saved.checkpoints.load_latest(saved.run.state)->step, 1);
  EXPECT_THAT(saved.warnings, ElementsAre(HasSubstr("cannot be read: Input/output error")));
}

TEST(CheckpointFaultInjection, LoadRetriesIfWriterRemovesFile) {
  const TempDir temp_dir;
  Training run, read;
  CheckpointManager writer(temp_dir.path(), {.max_to_keep = 1}), reader(temp_dir.path());
  save(writer, run, 1);
  bool is_first = true;
  Syscalls calls = libc_syscalls();
  calls.open = [&, real = calls.open](const char* path, int flags, mode_t mode) {
    if (std::exchange(is_first, false)) save(writer, run, 2);
    return real(path, flags, mode);
  };
  const ScopedSyscalls saving(calls);
  EXPECT_EQ(reader.load_latest(read.state)->step, 2);
  EXPECT_TRUE(read.is(2));
}

/// Saves in a child process that is killed: in a call of `faults`, or after a random time.
void save_in_killed_child(const std::filesystem::path& directory, int64_t value, Faults faults,
                          bool is_async,
                          std::optional<std::chrono::microseconds> lifetime = std::nullopt) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    at::set_num_threads(1);  // the parent's pool has no threads here
    ::alarm(60);             // if the call never occurs
    Training run(kLarge);
    CheckpointManager checkpoints(directory);
    const ScopedSyscalls failing(faults.calls());
    for (int64_t next = value;; ++next) {
      run.set(next);
      if (is_async) {
        checkpoints.save_async(run.state, next);
      } else {
        checkpoints.save(run.state, next);
      }
    }
  }
  if (lifetime) {
    std::this_thread::sleep_for(*lifetime);
    ::kill(child, SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/// Calls `run` in a forked child, and returns its exit code; -1 if it was killed.
template <class F>
int exit_code_of_child(const F& run) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    run();
    ::_exit(9);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// A thread in the middle of an asynchronous save, whose first write lasts until `release`.
class SlowSave {
 public:
  explicit SlowSave(CheckpointManager& checkpoints) : slow_(calls()) {
    checkpoints.save_async(run_.state, 1);
    while (!is_writing_) std::this_thread::yield();
  }
  ~SlowSave() { release(); }
  void release() { is_released_ = true; }

 private:
  Syscalls calls() {
    Syscalls calls = libc_syscalls();
    calls.write = [this, real = calls.write, pid = ::getpid()](int file, const void* from,
                                                               size_t count) {
      is_writing_ = true;
      while (!is_released_ && ::getpid() == pid) std::this_thread::yield();  // libuv writes in fork
      return real(file, from, count);
    };
    return calls;
  }

  std::atomic<bool> is_writing_ = false, is_released_ = false;
  Training run_;
  ScopedSyscalls slow_;
};

TEST(CheckpointManagerSaveAsync, NextCallThrowsErrorOnce) {
  const TempDir temp_dir;
  std::vector<std::string> warnings;
  Training run;
  Faults faults{.failing = "rename", .number = 1};
  const ScopedSyscalls failing(faults.calls());
  const auto is_named = AllOf(HasSubstr("checkpoint-000001-step-3.pt cannot be renamed"),
                              HasSubstr(std::strerror(EIO)));
  {
    CheckpointManager checkpoints(temp_dir.path(), record_warnings(warnings));
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { checkpoints.save_async(run.state, 4); },
             [&] { checkpoints.load_latest(run.state); }, [&] { checkpoints.load(run.state, 3); },
             [&] { checkpoints.wait(); }}) {
      faults.log.clear();
      checkpoints.save_async(run.state, 3);
      EXPECT_THAT(message_of(call), is_named);
      EXPECT_EQ(message_of([&] { checkpoints.wait(); }), kNoError);
      EXPECT_THAT(checkpoints.checkpoints(), IsEmpty());
    }
    faults.log.clear();
    checkpoints.save_async(run.state, 3);
    EXPECT_THAT(message_of([&] { checkpoints.save(run.state, 4); }), is_named);
    EXPECT_EQ(checkpoints.load_latest(run.state)->step, 4) << "saved before it threw";
    EXPECT_THAT(warnings, IsEmpty());
  }
  const TempDir other_dir;
  {
    CheckpointManager checkpoints(other_dir.path(), record_warnings(warnings));
    faults.log.clear();
    checkpoints.save_async(run.state, 3);
  }
  EXPECT_THAT(warnings, ElementsAre(is_named)) << "of the destructor";
}

int save_in_parent_of_fork() {
  const TempDir temp_dir;
  Training run;
  CheckpointManager checkpoints(temp_dir.path());
  SlowSave save(checkpoints);
  const int code = exit_code_of_child([&] {
    checkpoints.wait();
    const bool throws = message_of([&] { checkpoints.save(run.state, 2); }) != kNoError;
    { const CheckpointManager inherited(std::move(checkpoints)); }
    std::exit(throws ? 3 : 4);
  });
  save.release();
  checkpoints.wait();
  return checkpoints.load_latest(run.state)->step == 1 ? code : 5;
}

// In a new process: std::exit in a forked child fails if other tests have started threads.
TEST(CheckpointManagerSaveAsync, ForkedChildDoesNotWait) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::exit(save_in_parent_of_fork()), testing::ExitedWithCode(3), "");
}

[[noreturn]] void exit_while_saving(const std::filesystem::path& directory) {
  auto& checkpoints = *new CheckpointManager(directory);
  auto& save = *new SlowSave(checkpoints);
  std::thread([&save] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    save.release();
  }).detach();
  std::exit(3);
}

TEST(CheckpointManagerSaveAsync, ExitWaits) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const test_support::SharedTempDir temp_dir;
  EXPECT_EXIT(exit_while_saving(temp_dir.path()), testing::ExitedWithCode(3), "");
  Training run;
  EXPECT_TRUE(CheckpointManager(temp_dir.path()).load_latest(run.state));
}

/// Expects an intact latest checkpoint of at least `at_least`, without warnings. Returns its value.
int64_t load_intact_latest(const std::filesystem::path& directory, int64_t at_least) {
  std::vector<std::string> warnings;
  Training run(kLarge);
  CheckpointManager checkpoints(directory, record_warnings(warnings));
  const auto loaded = checkpoints.load_latest(run.state);
  EXPECT_TRUE(loaded && run.is(loaded->step));
  EXPECT_GE(run.position, at_least);
  EXPECT_THAT(warnings, IsEmpty());
  return run.position;
}

TEST(CheckpointKills, KillInAnySyscallPreservesCheckpoint) {
  for (const std::string name : {"open", "create", "write", "fsync", "close", "rename", "unlink"}) {
    const TempDir temp_dir;
    Training run(kLarge);
    {
      CheckpointManager checkpoints(temp_dir.path());
      save(checkpoints, run, 1);
      save(checkpoints, run, 2);
    }
    int64_t value = 2;
    for (int number = 1; number <= (name == "write" ? 8 : 3); ++number) {
      for (const bool is_async : {false, true}) {
        save_in_killed_child(temp_dir.path(), value + 1,
                             {.failing = name, .number = number, .kills = true}, is_async);
        value = load_intact_latest(temp_dir.path(), value);
      }
    }
    CheckpointManager checkpoints(temp_dir.path());
    save(checkpoints, run, value + 1);
    EXPECT_THAT(list_temporaries(temp_dir.path()), IsEmpty()) << "left by a killed process";
    EXPECT_EQ(checkpoints.checkpoints().size(), 2U);
  }
}

/// 10 rounds (1 s), or MEZZO_KILL_ROUNDS.
TEST(CheckpointKills, RandomKillsPreserveLatestCheckpoint) {
  const char* const kill_rounds = std::getenv("MEZZO_KILL_ROUNDS");
  const int rounds = kill_rounds == nullptr ? 10 : std::atoi(kill_rounds);
  const TempDir temp_dir;
  Training run(kLarge);
  {
    CheckpointManager checkpoints(temp_dir.path());
    save(checkpoints, run, 1);
  }
  std::mt19937 random(1);  // NOLINT: the same moments each time
  int64_t value = 1;
  for (int round = 0; round < rounds; ++round) {
    const std::chrono::microseconds moment(random() % 60000);
    save_in_killed_child(temp_dir.path(), value + 1, {}, /*is_async=*/round % 2 == 0, moment);
    value = load_intact_latest(temp_dir.path(), value);
  }
  EXPECT_GT(value, 1) << "no child lived long enough to save";
}

}  // namespace
