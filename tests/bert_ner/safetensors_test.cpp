#include "safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include "input_error.h"
#include "scratch_folder.h"

namespace bert_ner {
namespace {

using test::read_bytes;
using test::ScratchFolder;
using Shape = std::vector<std::int64_t>;

const std::filesystem::path kSample = BERT_NER_TEST_DATA "/sample.safetensors";

std::string with_length(std::string_view header, std::uint64_t length) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes.append(header);
}

template <class T>
std::vector<T> values(const TensorView& view) {
  std::vector<T> out(view.bytes.size() / sizeof(T));
  std::memcpy(out.data(), view.bytes.data(), view.bytes.size());
  return out;
}

class Safetensors : public testing::Test {
 protected:
  // The complaint about a file of this header and as many bytes of data.
  std::string error_of(std::string_view header, std::size_t data_bytes) {
    return error_of_file(with_length(header, header.size()) + std::string(data_bytes, 'x'));
  }

  std::string error_of_file(std::string_view bytes) {
    const auto path = folder_.write("model.safetensors", bytes);
    try {
      SafetensorsFile file(path);
    } catch (const InputError& error) {
      const std::string message = error.what();
      EXPECT_TRUE(message.starts_with(path.string() + ":")) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      return message;
    }
    return "no error";
  }

  void expect_error(std::string_view header, std::size_t data_bytes, std::string_view expected) {
    EXPECT_NE(error_of(header, data_bytes).find(expected), std::string::npos)
        << header << "\n"
        << error_of(header, data_bytes);
  }

  ScratchFolder folder_;
};

TEST_F(Safetensors, ReadsWhatHuggingFaceWrote) {
  const SafetensorsFile file(kSample);
  EXPECT_EQ(file.tensors().size(), 13u);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  const TensorView* weight = file.find("weight");
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(weight->dtype, Dtype::f32);
  EXPECT_EQ(weight->shape, (Shape{2, 3}));
  EXPECT_EQ(values<float>(*weight), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(values<std::int64_t>(*file.find("ids")), (std::vector<std::int64_t>{-1, 1LL << 40}));
  EXPECT_EQ(values<double>(*file.find("double")), std::vector<double>{0.1});
  EXPECT_EQ(values<std::uint16_t>(*file.find("brain")), std::vector<std::uint16_t>{0x3F80});
  EXPECT_EQ(file.find("count")->shape, Shape{});
  EXPECT_EQ(file.find("empty")->shape, (Shape{0, 4}));
  EXPECT_TRUE(file.find("empty")->bytes.empty());
  EXPECT_EQ(values<std::uint8_t>(*file.find("名 \"quoted\"\\")), (std::vector<std::uint8_t>{1, 2}));
  EXPECT_EQ(file.find("pooler"), nullptr);
}

TEST_F(Safetensors, WritesTheBytesThatHuggingFaceWrites) {
  const SafetensorsFile file(kSample);
  auto tensors = file.tensors();
  std::reverse(tensors.begin(), tensors.end());
  EXPECT_EQ(write_safetensors(folder_ / "copy", tensors, file.metadata()),
            AtomicFile::Durability::durable);
  EXPECT_EQ(read_bytes(folder_ / "copy"), read_bytes(kSample));
}

TEST_F(Safetensors, RoundTripsAFileWithoutTensors) {
  EXPECT_EQ(write_safetensors(folder_ / "none", {}), AtomicFile::Durability::durable);
  const SafetensorsFile file(folder_ / "none");
  EXPECT_TRUE(file.tensors().empty());
  EXPECT_TRUE(file.metadata().empty());
}

TEST_F(Safetensors, MayBeOverwrittenWhileItIsMapped) {
  std::filesystem::copy_file(kSample, folder_ / "model");
  const SafetensorsFile file(folder_ / "model");
  EXPECT_EQ(write_safetensors(folder_ / "model", {}), AtomicFile::Durability::durable);
  EXPECT_EQ(values<float>(*file.find("bias")), (std::vector<float>{-1, 0.5, 1e30f}));
}

TEST_F(Safetensors, KeepsItsViewsWhenMoved) {
  SafetensorsFile file(kSample);
  const SafetensorsFile moved = std::move(file);
  EXPECT_EQ(values<float>(*moved.find("bias"))[1], 0.5f);
}

TEST_F(Safetensors, RefusesToWriteTensorsThatMakeNoFile) {
  const std::vector<std::byte> bytes(8);
  const TensorView fits{"a", Dtype::f32, {2}, bytes};
  const auto write = [&](std::vector<TensorView> tensors) {
    return write_safetensors(folder_ / "out", tensors);
  };
  EXPECT_EQ(write({fits}), AtomicFile::Durability::durable);
  EXPECT_THROW(write({fits, fits}), std::invalid_argument);
  EXPECT_THROW(write({{"__metadata__", Dtype::f32, {2}, bytes}}), std::invalid_argument);
  EXPECT_THROW(write({{"a", Dtype::f32, {3}, bytes}}), std::invalid_argument);
  EXPECT_THROW(write({{"a", Dtype::f32, {-2}, bytes}}), std::invalid_argument);
  EXPECT_THROW(write({{"\xFF", Dtype::f32, {2}, bytes}}), std::invalid_argument);
  EXPECT_THROW(write_safetensors(folder_ / "out", {}, {{"a", "\xFF"}}), std::invalid_argument);
}

TEST_F(Safetensors, RefusesALengthThatTheFileDoesNotHave) {
  EXPECT_NE(error_of_file("").find("too short"), std::string::npos);
  EXPECT_NE(error_of_file("1234567").find("too short"), std::string::npos);
  EXPECT_NE(error_of_file(with_length("{}", 3)).find("a header of 3 bytes"), std::string::npos);
  EXPECT_NE(error_of_file(with_length("{}", ~0ull)).find("a header of 1844674407370955161"),
            std::string::npos);
  EXPECT_NE(error_of_file(with_length("", 0)).find("no JSON object"), std::string::npos);
}

TEST_F(Safetensors, RefusesAHeaderAbove100Megabytes) {
  const auto path = folder_.write("big", with_length("{}", 100'000'001));
  std::filesystem::resize_file(path, 100'000'100);  // a sparse file: it takes no room
  try {
    SafetensorsFile file(path);
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("at most 100000000 are allowed"), std::string::npos);
  }
}

TEST_F(Safetensors, RefusesAHeaderThatIsNoStrictJson) {
  expect_error("[]", 0, "no JSON object");
  expect_error(" {}", 0, "no JSON object");
  expect_error("{", 0, "no valid JSON");
  expect_error("{} {}", 0, "no valid JSON");
  expect_error("{\"a\xFF\":1}", 0, "not UTF-8");
  expect_error(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},)"
               R"("a":{"dtype":"U8","shape":[],"data_offsets":[1,2]}})",
               2, "stands twice");
  expect_error(R"({"a":{"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,1]}})", 1,
               "stands twice");
  expect_error("{\"a\":" + std::string(100'000, '['), 0, "nested deeper");
}

TEST_F(Safetensors, RefusesMetadataThatAreNotStrings) {
  expect_error(R"({"__metadata__":[]})", 0, "metadata are no JSON object");
  expect_error(R"({"__metadata__":{"epoch":3}})", 0, "metadata \"epoch\" is no string");
}

TEST_F(Safetensors, RefusesATensorThatIsNotFullyDescribed) {
  expect_error(R"({"a":3})", 0, "tensor \"a\" is not described");
  expect_error(R"({"a":{"dtype":"U8","shape":[1]}})", 1, "tensor \"a\" is not described");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"stride":[1]}})", 1,
               "tensor \"a\" is not described");
}

TEST_F(Safetensors, RefusesDtypesByName) {
  expect_error(R"({"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})", 1,
               "the dtype F8_E4M3, which is not read here");
  expect_error(R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "no string");
}

TEST_F(Safetensors, RefusesShapesThatAreNoCountsOrDoNotFit) {
  const auto header = [](const std::string& shape) {
    return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,8]}})";
  };
  EXPECT_EQ(error_of(header("[2]"), 8), "no error");
  expect_error(header("2"), 8, "a shape that is no list");
  expect_error(header("[-2]"), 8, "-2 in its shape");
  expect_error(header("[2.0]"), 8, "2.0 in its shape");
  expect_error(header("[\"2\"]"), 8, "\"2\" in its shape");
  expect_error(header("[18446744073709551615]"), 8, "18446744073709551615 in its shape");
  expect_error(header("[1e400]"), 8, "out of range");
  expect_error(header("[4294967296,4294967296]"), 8, "64 bits");
  // 2^62 elements of 4 bytes are 2^64, which would wrap round to 0.
  expect_error(header("[4611686018427387904]"), 8, "64 bits");
  expect_error(header("[3]"), 8, "needs 12 bytes by its shape and dtype, but has 8");
}

TEST_F(Safetensors, RefusesOffsetsThatOverlapOrLeaveTheFileOrAHole) {
  const auto header = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_EQ(error_of(header("[4,8]", "[0,4]"), 8), "no error");
  expect_error(header("[0,4]", "[3,7]"), 7, "tensor \"b\" overlaps");
  expect_error(header("[0,4]", "[0,4]"), 4, "tensor \"b\" overlaps");
  expect_error(header("[0,4]", "[5,9]"), 9, "tensor \"b\" leaves a hole");
  expect_error(header("[1,5]", "[5,9]"), 9, "tensor \"a\" leaves a hole");
  expect_error(header("[0,4]", "[4,8]"), 9, "has 1 bytes behind the last tensor");
  expect_error(header("[0,4]", "[4,8]"), 7, "tensor \"b\" lies at bytes 4 to 8 of 7");
  expect_error(header("[4,0]", "[4,8]"), 8, "tensor \"a\" lies at bytes 4 to 0");
  expect_error(header("[-4,0]", "[4,8]"), 8, "not two counts");
  expect_error(header("[0,4]", "[4,8,12]"), 8, "not two counts");
  expect_error(header("[0,4]", "[4,18446744073709551615]"), 8, "tensor \"b\" lies at bytes");
}

TEST_F(Safetensors, TellsOtherFormatsByTheirFirstBytes) {
  EXPECT_NE(error_of_file("PK\x03\x04 and more of a zip file").find("PyTorch pickle"),
            std::string::npos);
  EXPECT_NE(error_of_file("version https://git-lfs.github.com/spec/v1\n").find("Git LFS pointer"),
            std::string::npos);
}

TEST_F(Safetensors, AcceptsAHeaderWhoseLengthLooksLikeAPickle) {
  const std::string header = "{}" + std::string(0x0280 - 2, ' ');
  ASSERT_TRUE(with_length(header, header.size()).starts_with("\x80\x02"));
  EXPECT_EQ(error_of(header, 0), "no error");
  EXPECT_NE(error_of_file("\x80\x02}q").find("PyTorch pickle"), std::string::npos);
}

// Whatever happens to the header, the file is refused or holds what its header says; never a crash,
// never a read outside of the file (which the sanitizers would see).
TEST_F(Safetensors, SurvivesThousandsOfDamagedHeaders) {
  const std::string whole = read_bytes(kSample);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, whole.data(), sizeof header_bytes);
  std::mt19937_64 random(17);
  int refused = 0;
  constexpr int kTries = 4000;
  for (int i = 0; i < kTries; ++i) {
    std::string damaged = whole;
    if (i % 4 == 0) {
      damaged.resize(random() % whole.size());
    } else {
      for (int flips = i % 4; flips > 0; --flips) {
        damaged[random() % (8 + header_bytes)] ^= static_cast<char>(1 << random() % 8);
      }
    }
    // A name of its own: truncating the last file would make some file systems wait for the disk.
    const auto path = folder_.write(std::to_string(i), damaged);
    try {
      const SafetensorsFile file(path);
      std::string data;
      for (const auto& view : file.tensors()) {
        data.append(reinterpret_cast<const char*>(view.bytes.data()), view.bytes.size());
      }
      EXPECT_EQ(data, whole.substr(8 + header_bytes));
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, kTries / 2);
  EXPECT_LT(refused, kTries);
}

}  // namespace
}  // namespace bert_ner
