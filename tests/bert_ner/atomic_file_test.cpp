#include "atomic_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

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
