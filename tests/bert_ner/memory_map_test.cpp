#include "memory_map.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace bert_ner {
namespace {

constexpr int64_t kKib = 1024, kMib = 1024 * kKib;

TEST(MemoryMap, TellsFilesFromCompiledKernelsAndTheRest) {
  std::istringstream smaps(
      "5581c0-5581c1 r-xp 00000000 fe:00 1234   /usr/bin/bert_ner\n"
      "Size:  100 kB\n"
      "Rss:  10 kB\n"
      "7f00-7f01 rwxp 00000000 00:00 0 \n"
      "Rss:  20 kB\n"
      "7f01-7f02 rw-p 00000000 00:00 0    [heap]\n"
      "Rss:  40 kB\n"
      "VmFlags: rd wr\n"
      "7f02-7f03 r-xp 00000000 00:00 0    [heap]\n"
      "Rss:  3 kB\n"
      "7f03-7f04 r-xp 00000000 00:00 0    [vdso]\n"
      "Rss:  4 kB\n"
      "7f04-7f05 r--p 00000000 fe:00 99   /a folder/model.safetensors\n"
      "Rss:  80 kB\n");
  const auto map = parse_smaps(smaps);
  EXPECT_EQ(map.files, 90 * kKib);
  EXPECT_EQ(map.kernels, 23 * kKib);  // oneDNN makes parts of malloc's heap executable
  EXPECT_EQ(map.rest, 44 * kKib);
}

TEST(MemoryMap, OfThisProcessGrowsByWhatIsAllocated) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer's malloc tells nobody what it has given out";
#endif
  const auto before = memory_map();
  constexpr std::size_t kBytes = 64 * kMib;
  const auto block = torch::ones({static_cast<int64_t>(kBytes)}, torch::kByte);
  const auto after = memory_map();
  EXPECT_GT(before.files, kMib);
  EXPECT_NEAR(static_cast<double>(after.in_use - before.in_use), kBytes, kMib);
  EXPECT_NEAR(static_cast<double>(after.total() - before.total()), kBytes, 4 * kMib);
}

TEST(MemoryMap, IsPrintedWithTheTensorsApart) {
  const MemoryMap map{.files = 200 * kMib,
                      .kernels = 30 * kMib,
                      .in_use = 300 * kMib,
                      .free = 50 * kMib,
                      .rest = kMib};
  const auto text = format_memory_map(map, 270 * kMib, 640 * kMib);
  EXPECT_THAT(text, testing::HasSubstr("weights and the optimizer's state               |  270 |\n"
                                       "| other objects"));
  EXPECT_THAT(text, testing::ContainsRegex("other objects[^\n]* +30 \\|\n"));
  EXPECT_THAT(text, testing::ContainsRegex("\\| all +\\|  581 \\|\n"));
  EXPECT_THAT(text, testing::ContainsRegex("peak[^\n]* 640 \\|\n"));
}

}  // namespace
}  // namespace bert_ner
