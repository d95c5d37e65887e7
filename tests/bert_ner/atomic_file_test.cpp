#include "atomic_file.h"

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <iterator>
#include <string>

#include "input_error.h"
#include "scratch_folder.h"

namespace bert_ner {
namespace {

using test::read_bytes;
using test::ScratchFolder;

std::size_t files_in(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

// Files of this process may not grow beyond `bytes`; a write that tries fails as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : previous_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &previous_);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = previous_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &previous_);
    std::signal(SIGXFSZ, previous_handler_);
  }

 private:
  rlimit previous_{};
  void (*previous_handler_)(int);
};

TEST(AtomicFile, AppearsOnlyWhenCommitted) {
  const ScratchFolder folder;
  AtomicFile file(folder / "out");
  file.write("whole ");
  file.write("text");
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
  EXPECT_EQ(file.commit(), AtomicFile::Durability::durable);
  EXPECT_EQ(read_bytes(folder / "out"), "whole text");
  EXPECT_EQ(files_in(folder.path()), 1u);
}

TEST(AtomicFile, LeavesThePreviousFileAndNoTemporaryWhenAbandoned) {
  const ScratchFolder folder;
  folder.write("out", "previous");
  { AtomicFile(folder / "out").write("half"); }
  EXPECT_EQ(read_bytes(folder / "out"), "previous");
  EXPECT_EQ(files_in(folder.path()), 1u);
}

TEST(AtomicFile, ReplacesThePreviousFileAsAWhole) {
  const ScratchFolder folder;
  folder.write("out", "a longer previous text");
  AtomicFile file(folder / "out");
  file.write("new");
  EXPECT_EQ(file.commit(), AtomicFile::Durability::durable);
  EXPECT_EQ(read_bytes(folder / "out"), "new");
}

TEST(AtomicFile, KeepsTwoWritersOfOneTargetApart) {
  const ScratchFolder folder;
  AtomicFile first(folder / "out"), second(folder / "out");
  first.write("first");
  second.write("second");
  EXPECT_EQ(second.commit(), AtomicFile::Durability::durable);
  EXPECT_EQ(first.commit(), AtomicFile::Durability::durable);
  EXPECT_EQ(read_bytes(folder / "out"), "first");
}

/// Writes half a file in a process of its own that stands still, or is killed on the spot.
pid_t write_half(const std::filesystem::path& target, bool then_be_killed) {
  std::array<int, 2> written{};
  EXPECT_EQ(::pipe(written.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile file(target);
    file.write("half");
    if (then_be_killed) ::raise(SIGKILL);
    ::close(written[1]);
    while (true) ::pause();
  }
  ::close(written[1]);
  char nothing = 0;
  EXPECT_EQ(::read(written[0], &nothing, 1), 0);  // until the child has closed its end, or died
  ::close(written[0]);
  if (then_be_killed) ::waitpid(child, nullptr, 0);
  return child;
}

TEST(AtomicFile, RemovesWhatAKilledWriterOfItsNameLeft) {
  const ScratchFolder folder;
  write_half(folder / "out", /*then_be_killed=*/true);
  write_half(folder / "other", /*then_be_killed=*/true);
  ASSERT_EQ(files_in(folder.path()), 2u);
  AtomicFile file(folder / "out");
  file.write("whole");
  EXPECT_EQ(file.commit(), AtomicFile::Durability::durable);
  EXPECT_EQ(read_bytes(folder / "out"), "whole");
  EXPECT_EQ(files_in(folder.path()), 2u);  // and the one of "other", which is not its own
}

TEST(AtomicFile, LeavesTheTemporaryOfALivingWriter) {
  const ScratchFolder folder;
  const pid_t writer = write_half(folder / "out", /*then_be_killed=*/false);
  EXPECT_EQ(AtomicFile(folder / "out").commit(), AtomicFile::Durability::durable);
  EXPECT_EQ(files_in(folder.path()), 2u);
  ::kill(writer, SIGKILL);
  ::waitpid(writer, nullptr, 0);
}

TEST(AtomicFile, LeavesFilesThatOnlyLookLikeItsTemporaries) {
  const ScratchFolder folder;
  for (const char* name : {".out.tmp", ".out.7.tmp", ".out.7-.tmp", ".out.-7.tmp", ".out.7-0.tmp~",
                           ".out.x-0.tmp", ".out2.7-0.tmp", "out.7-0.tmp", ".out.7-0-0.tmp"}) {
    folder.write(name, "somebody's");
  }
  const auto before = files_in(folder.path());
  EXPECT_EQ(AtomicFile(folder / "out").commit(), AtomicFile::Durability::durable);
  EXPECT_EQ(files_in(folder.path()), before + 1);
}

TEST(AtomicFile, NamesFileAndReasonAndKeepsThePreviousFileWhenTheDiskIsFull) {
  const ScratchFolder folder;
  folder.write("out", "previous");
  {
    const FileSizeLimit limit(1 << 16);
    AtomicFile file(folder / "out");
    try {
      file.write(std::string(1 << 17, 'x'));
      FAIL() << "the write went through";
    } catch (const InputError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find((folder / "out").string() + ": cannot be written (File too large)"),
                std::string::npos)
          << message;
      EXPECT_NE(message.find("the previous file is untouched"), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos);
    }
  }
  EXPECT_EQ(read_bytes(folder / "out"), "previous");
  EXPECT_EQ(files_in(folder.path()), 1u);
}

TEST(AtomicFile, RefusesAFolderThatIsNotThereAndATargetThatIsAFolder) {
  const ScratchFolder folder;
  EXPECT_THROW(AtomicFile(folder / "missing" / "out"), InputError);
  EXPECT_THROW(AtomicFile{folder.path()}, InputError);
  EXPECT_THROW(AtomicFile{folder.path() / ""}, InputError);
}

TEST(AtomicFile, FollowsTheUmask) {
  const ScratchFolder folder;
  const mode_t previous = ::umask(027);
  AtomicFile file(folder / "out");
  ::umask(previous);
  EXPECT_EQ(file.commit(), AtomicFile::Durability::durable);
  EXPECT_EQ(std::filesystem::status(folder / "out").permissions(), std::filesystem::perms(0640));
}

}  // namespace
}  // namespace bert_ner
