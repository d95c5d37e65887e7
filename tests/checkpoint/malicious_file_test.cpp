// Small malicious files: each loads or throws c10::Error, without excessive time or memory.

#include <mezzo/checkpoint/checkpoint.h>

#include <ATen/core/Tensor.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../support/message_of.h"
#include "../support/pickle_bytes.h"
#include "../support/temp_dir.h"

namespace malicious_files {
namespace {

using test_support::message_of;
using testing::AllOf;
using testing::HasSubstr;
namespace bytes = test_support::pickle_bytes;

/// Returns the error of loading a pickle of {"x": `value`}.
std::string load_error(const std::string& value, const bytes::Records& records = {{"0", "1234"}}) {
  const test_support::TempDir temp_dir;
  const auto file = temp_dir.write("x.pt", bytes::zip(bytes::dict({{"x", value}}), records));
  at::Tensor x;
  return message_of([&] { mezzo::load_checkpoint(file, mezzo::TrainingState().add("x", x)); });
}

struct MaliciousFile {
  const char* name;
  std::string value;
  const char* error;
};

/// A dict of 60 keys with equal hashes: libtorch's hash table doubled its size with every second
/// key.
std::string colliding_keys() {
  constexpr std::uint64_t kFactor = 11400714819323198485ULL;  // of the table's hash
  std::uint64_t inverse = kFactor;
  for (int i = 0; i < 6; ++i) inverse *= 2 - kFactor * inverse;
  std::string items = "}";
  for (std::uint64_t i = 1; i <= 60; ++i) {
    items += bytes::integer(static_cast<std::int64_t>(inverse * i)) + "K" + bytes::byte(1) + "s";
  }
  return items;
}

std::vector<MaliciousFile> malicious_files() {
  using namespace bytes;
  const std::string four = storage("FloatStorage", "0", 1);
  const std::string ones = tensor(four, 0, {1}, {1});
  std::string sharing = "]q" + byte(0);
  for (int i = 1; i < 41; ++i) {
    sharing += "]q" + byte(i) + "h" + byte(i - 1) + "ah" + byte(i - 1) + "a";
  }
  return {
      {"ListInItself", "]q" + byte(0) + "h" + byte(0) + "a", "in itself"},
      {"ListInItselfThroughATuple",
       "]q" + byte(0) + "h" + byte(0) +
           "\x85"
           "a",
       "in itself"},
      {"DictInItself", "}q" + byte(0) + text("a") + "h" + byte(0) + "s", "in itself"},
      {"ListChangedInAnother", "]]q" + byte(0) + "ah" + byte(0) + "K" + byte(1) + "a",
       "in another"},
      {"CollidingKeys", colliding_keys(), "hash collisions"},
      {"DeepLists", std::string(1000, ']') + std::string(999, 'a'), "more than 64 deep"},
      {"DeepTuples", ")" + std::string(1000, '\x85'), "more than 64 deep"},
      {"DoubledLists", sharing, ""},
      {"DoubledTuples",
       "(" +
           [] {
             std::string all = ")q" + byte(0);
             for (int i = 1; i < 60; ++i)
               all += "h" + byte(i - 1) + "h" + byte(i - 1) + "\x86q" + byte(i);
             return all;
           }() +
           "t",
       "more memory"},
      {"ManyDicts",
       "]"
       "(" +
           std::string(2000000, '}') + "e",
       "more memory"},
      {"LongStringShared",
       "](X" + number(900000, 4) + std::string(900000, 'k') + "q" + byte(0) +
           [] {
             std::string all;
             for (int i = 0; i < 20000; ++i) all += "h" + byte(0);
             return all;
           }() +
           "e",
       "more memory"},
      {"ExpandedTensor", tensor(four, 0, {1 << 30}, {0}), "more memory"},
      {"LongTensor", tensor(storage("FloatStorage", "0", 1), 0, {1000000000}, {1}),
       "out of bounds"},
      {"LongStorage", tensor(storage("FloatStorage", "0", 1000000000), 0, {1}, {1}),
       "out of bounds"},
      {"StrideOutside", tensor(four, 0, {2}, {1000000000}), "out of bounds"},
      {"OffsetOutside", tensor(four, 1000000000, {1}, {1}), "out of bounds"},
      {"NegativeStride", tensor(four, 0, {1}, {-1}), "size, stride or offset"},
      {"NegativeSize", tensor(four, 0, {-1}, {1}), "size, stride or offset"},
      {"MoreSizesThanStrides", tensor(four, 0, {1, 1}, {1}), "numbers of sizes and strides"},
      {"OverflowingShape", tensor(four, 0, {int64_t{1} << 62, 4, 0}, {1, 1, 1}), "out of bounds"},
      {"StorageAsValue", four, "a class or a storage"},
      {"QuantizerLongerThanItsBytes",
       quantized(storage("QInt8Storage", "0", 1), {1}, {1}, "per_channel_affine",
                 tensor(four, 0, {1000000000}, {1}) + ones + integer(0)),
       "out of bounds"},
      {"QuantizerOfAnotherSize",
       quantized(storage("QInt8Storage", "0", 4), {4}, {1}, "per_channel_affine",
                 ones + tensor(storage("LongStorage", "1", 1), 0, {1}, {1}) + integer(0)),
       "scales do not match"},
      {"QuantizerOfAnotherAxis",
       quantized(storage("QInt8Storage", "0", 1), {1}, {1}, "per_channel_affine",
                 ones + tensor(storage("LongStorage", "1", 1), 0, {1}, {1}) + integer(7)),
       "scales do not match"},
      {"QuantizedFloats",
       quantized(four, {1}, {1}, "per_tensor_affine", "G" + std::string(8, '\0') + integer(0)),
       "does not match its quantizer"},
      {"CallOfOsSystem", global("os", "system") + "(" + text("true") + "tR", "it names os.system"},
      {"CallOfANumber", integer(1) + ")R", "not a function"},
      {"AttributesOfAList", "]}b", "attributes"},
      {"ListAsKey", "}])s", "a key that is a list"},
      {"LongInteger", "\x8a\x09" + std::string(9, '\1'), "integer of 9 bytes"},
      {"UnknownOpcode", "I1\n", "opcode 73"},
      {"AppendToDict", "a", "not a list"},
      {"MemoWithoutValue", "h" + byte(9), "memo entry"},
      {"MissingMark", "t", "lacks a mark"},
      {"TruncatedString", "X" + number(0xFFFFFFFF, 4) + "a", "truncated"},
      {"MissingRecord", tensor(storage("FloatStorage", "none", 1), 0, {1}, {1}), "data/none"},
  };
}

TEST(CheckpointMaliciousFile, ThrowsWithoutChanges) {
  for (const MaliciousFile& file : malicious_files()) {
    const std::string error = load_error(file.value, {{"0", "1234"}, {"1", std::string(8, '\0')}});
    EXPECT_THAT(error, testing::ContainsRegex(file.error)) << file.name;
    EXPECT_THAT(error, HasSubstr("x.pt")) << file.name;
  }
}

/// A user-defined object that serializes through an archive.
struct Archived {
  friend auto& operator<<(torch::serialize::OutputArchive& archive, const Archived& /*object*/) {
    archive.write("x", at::zeros({1}));
    return archive;
  }
  friend auto& operator>>(torch::serialize::InputArchive& archive, Archived& /*object*/) {
    return archive;
  }
};

// Adding a name to an archive takes time linear in its size.
TEST(CheckpointMaliciousFile, ThrowsForTooManyEntries) {
  std::vector<std::pair<std::string, std::string>> entries;
  for (int i = 0; i < 20000; ++i) entries.emplace_back(std::to_string(i), "}");
  const test_support::TempDir temp_dir;
  const auto file =
      temp_dir.write("x.pt", bytes::zip(bytes::dict({{"object", bytes::dict(entries)}})));
  Archived object;
  EXPECT_THAT(message_of([&] {
                mezzo::load_checkpoint(file, mezzo::TrainingState().add("object", object));
              }),
              HasSubstr("too many entries"));
}

// Regression test: an empty list of groups was indexed.
TEST(CheckpointMaliciousFile, ThrowsForOptimizerWithoutGroups) {
  const test_support::TempDir temp_dir;
  const std::string state = bytes::dict(
      {{"state", "}"}, {"param_groups", "]"}, {"parameters", "]]" + bytes::text("") + "aa"}});
  const auto file = temp_dir.write("x.pt", bytes::zip(bytes::dict({{"optimizer", state}})));
  torch::optim::AdamW optimizer({torch::ones({2})});
  EXPECT_THAT(test_support::message_of([&] {
                mezzo::load_checkpoint(file, mezzo::TrainingState().add("optimizer", optimizer));
              }),
              testing::HasSubstr("0 in the checkpoint, 1 in the current optimizer"));
}

// Operations on such tensors would read out of bounds.
TEST(CheckpointMaliciousFile, ThrowsForInvalidSparseIndices) {
  using namespace bytes;
  const std::string index = tensor(storage("LongStorage", "1", 1), 0, {1}, {1});
  const std::string value = tensor(storage("FloatStorage", "2", 1), 0, {1}, {1});
  const auto error = [](int layout, const std::vector<std::int64_t>& sizes,
                        const std::string& parts) {
    return load_error(global("torch._utils", "_rebuild_sparse_tensor") + "(" + integer(layout) +
                          tuple(sizes) + "\x89" + parts + "tR",
                      {{"0", number(0, 8) + number(1, 8)}, {"1", number(127, 8)}, {"2", "1234"}});
  };
  const std::string starts = tensor(storage("LongStorage", "0", 2), 0, {2}, {1});
  EXPECT_THAT(error(2, {1, 1}, starts + index + value), HasSubstr("col_indices"));
  const std::string coo = tensor(storage("LongStorage", "1", 1), 0, {1, 1}, {1, 1});
  EXPECT_THAT(error(1, {1}, coo + value), HasSubstr("127"));
}

TEST(CheckpointMaliciousFile, ThrowsForOverlappingRecords) {
  const test_support::TempDir temp_dir;
  bytes::Records records{{"0", std::string(4000, 'x')}};
  std::string tensors = "](";
  for (int i = 0; i < 9; ++i) {
    records.emplace(std::to_string(i), "1234");
    tensors +=
        bytes::tensor(bytes::storage("FloatStorage", std::to_string(i), 1000), 0, {1000}, {1});
  }
  std::string zip = bytes::zip(bytes::dict({{"x", tensors + "e"}}), records);
  const auto entry = [&zip](int key) {  // of the directory
    return zip.rfind("archive/data/" + std::to_string(key)) - 46;
  };
  for (int i = 1; i < 9; ++i) {  // all have the first one's sizes and offset
    zip.replace(entry(i) + 20, 8, zip, entry(0) + 20, 8);
    zip.replace(entry(i) + 42, 4, zip, entry(0) + 42, 4);
  }
  --zip[zip.find("archive/data/0") - 2];  // misaligned, so that it is copied
  const auto file = temp_dir.write("x.pt", zip);
  at::Tensor x;
  EXPECT_THAT(message_of([&] { mezzo::load_checkpoint(file, mezzo::TrainingState().add("x", x)); }),
              HasSubstr("overlapping records"));
}

TEST(CheckpointMaliciousFile, ThrowsForOversizedZipEntries) {
  const test_support::TempDir temp_dir;
  at::Tensor x;
  const std::string whole = bytes::zip(
      bytes::dict({{"x", bytes::tensor(bytes::storage("FloatStorage", "0", 1), 0, {1}, {1})}}),
      {{"0", "1234"}});
  const auto error = [&](const std::string& zip) {
    const auto file = temp_dir.write("x.pt", zip);
    return message_of([&] { mezzo::load_checkpoint(file, mezzo::TrainingState().add("x", x)); });
  };
  EXPECT_EQ(error(whole), "no error");
  EXPECT_EQ(x.numel(), 1);
  for (std::size_t at = 0; at < whole.size(); ++at) {  // sizes, offsets and counts among them
    for (const char byte : {'\0', '\x7f', '\xff'}) {
      std::string changed = whole;
      changed[at] = byte;
      (void)error(changed);
    }
  }
  std::string compressed = whole;
  compressed[compressed.rfind("archive/data/0") - 46 + 10] = 8;  // in the directory
  EXPECT_THAT(error(compressed), AllOf(HasSubstr("is compressed"), HasSubstr("data/0")));
}

}  // namespace
}  // namespace malicious_files
