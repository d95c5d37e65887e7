#include "safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "../support/scratch.h"
#include "text.h"

namespace bert_ner {
namespace {

using test_support::bytes_of;
using test_support::Scratch;
using Shape = std::vector<std::int64_t>;

const std::filesystem::path kSample = BERT_NER_TEST_DATA "/sample.safetensors";

std::string with_length(std::string_view header, std::uint64_t length) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes.append(header);
}

class SafetensorsTest : public testing::Test {
 protected:
  // The complaint about a file of this header and as many bytes of data.
  std::string error_of(std::string_view header, std::size_t data_bytes) {
    return error_of_file(with_length(header, header.size()) + std::string(data_bytes, 'x'));
  }

  std::string error_of_file(std::string_view bytes) {
    const auto path = folder_.write("model.safetensors", bytes);
    try {
      read_safetensors(path);
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

  Scratch folder_;
};

TEST_F(SafetensorsTest, ReadsWhatHuggingFaceWrote) {
  const auto file = read_safetensors(kSample);
  EXPECT_EQ(file.tensors.size(), 13u);
  EXPECT_EQ(file.metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_TRUE(torch::equal(file.find("weight"), torch::arange(6.0F).view({2, 3})));
  EXPECT_TRUE(torch::equal(file.find("ids"), torch::tensor({int64_t{-1}, int64_t{1} << 40})));
  EXPECT_EQ(file.find("double").item<double>(), 0.1);
  EXPECT_EQ(file.find("double").scalar_type(), torch::kDouble);
  EXPECT_TRUE(torch::equal(file.find("brain"), torch::ones({1}, torch::kBFloat16)));
  EXPECT_EQ(file.find("count").dim(), 0);
  EXPECT_EQ(file.find("empty").sizes(), (torch::IntArrayRef{0, 4}));
  EXPECT_TRUE(file.find("名 \"quoted\"\\").defined());
  EXPECT_FALSE(file.find("pooler").defined());
}

TEST_F(SafetensorsTest, WritesTheBytesThatHuggingFaceWrites) {
  auto file = read_safetensors(kSample);
  std::reverse(file.tensors.begin(), file.tensors.end());
  write_safetensors(folder_ / "copy", file.tensors, file.metadata);
  EXPECT_EQ(test_support::bytes_of(folder_ / "copy"), test_support::bytes_of(kSample));
}

TEST_F(SafetensorsTest, RoundTripsAFileWithoutTensors) {
  write_safetensors(folder_ / "none", {});
  EXPECT_TRUE(read_safetensors(folder_ / "none").tensors.empty());
}

TEST_F(SafetensorsTest, MayBeOverwrittenWhileItIsMapped) {
  std::filesystem::copy_file(kSample, folder_ / "model");
  const auto file = read_safetensors(folder_ / "model");
  write_safetensors(folder_ / "model", {});
  EXPECT_TRUE(torch::equal(file.find("bias"), torch::tensor({-1.0F, 0.5F, 1e30F})));
}

TEST_F(SafetensorsTest, ReadsTensorsThatAreNotAligned) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} )";
  ASSERT_NE(header.size() % 4, 0u);
  folder_.write("odd", with_length(header, header.size()) + std::string("\0\0\x80\x3F", 4));
  EXPECT_EQ(read_safetensors(folder_ / "odd").find("a").item<float>(), 1);
}

TEST_F(SafetensorsTest, RefusesToWriteTensorsThatMakeNoFile) {
  const auto tensor = torch::zeros({2});
  EXPECT_THROW(write_safetensors(folder_ / "out", {{"a", tensor}, {"a", tensor}}), c10::Error);
  EXPECT_THROW(write_safetensors(folder_ / "out", {{"__metadata__", tensor}}), c10::Error);
  EXPECT_THROW(write_safetensors(folder_ / "out", {{"a", tensor.to(torch::kComplexFloat)}}),
               c10::Error);
}

TEST_F(SafetensorsTest, RefusesALengthThatTheFileDoesNotHave) {
  EXPECT_NE(error_of_file("").find("too short"), std::string::npos);
  EXPECT_NE(error_of_file("1234567").find("too short"), std::string::npos);
  EXPECT_NE(error_of_file(with_length("{}", 3)).find("a header of 3 bytes"), std::string::npos);
  EXPECT_NE(error_of_file(with_length("{}", ~0ull)).find("a header of 1844674407370955161"),
            std::string::npos);
  EXPECT_NE(error_of_file(with_length("", 0)).find("no JSON object"), std::string::npos);
}

TEST_F(SafetensorsTest, RefusesAHeaderAbove100Megabytes) {
  const auto path = folder_.write("big", with_length("{}", 100'000'001));
  std::filesystem::resize_file(path, 100'000'100);  // a sparse file: it takes no room
  try {
    read_safetensors(path);
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("at most 100000000 are allowed"), std::string::npos);
  }
}

TEST_F(SafetensorsTest, RefusesAHeaderThatIsNoStrictJson) {
  expect_error("[]", 0, "no JSON object");
  expect_error(" {}", 0, "no JSON object");
  expect_error("{", 0, "not valid JSON");
  expect_error("{} {}", 0, "not valid JSON");
  expect_error("{\"a\xFF\":1}", 0, "UTF-8");
  expect_error(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},)"
               R"("a":{"dtype":"U8","shape":[],"data_offsets":[1,2]}})",
               2, "stands twice");
  expect_error(R"({"a":{"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,1]}})", 1,
               "stands twice");
  expect_error("{\"a\":" + std::string(100'000, '['), 0, "not valid JSON");
}

TEST_F(SafetensorsTest, RefusesMetadataThatAreNotStrings) {
  expect_error(R"({"__metadata__":[]})", 0, "\"__metadata__\" [json.exception");
  expect_error(R"({"__metadata__":{"epoch":3}})", 0, "type must be string, but is number");
}

TEST_F(SafetensorsTest, RefusesATensorThatIsNotFullyDescribed) {
  expect_error(R"({"a":3})", 0, "\"a\" is not described");
  expect_error(R"({"a":{"dtype":"U8","shape":[1]}})", 1, "\"a\" is not described");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"stride":[1]}})", 1,
               "\"a\" is not described");
}

TEST_F(SafetensorsTest, RefusesDtypesByName) {
  expect_error(R"({"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})", 1,
               "the dtype F8_E4M3");
  expect_error(R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "must be string");
}

TEST_F(SafetensorsTest, RefusesShapesThatAreNoCountsOrDoNotFit) {
  const auto header = [](const std::string& shape) {
    return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,8]}})";
  };
  EXPECT_EQ(error_of(header("[2]"), 8), "no error");
  expect_error(header("2"), 8, "must be array");
  expect_error(header("[-2]"), 8, "has -2 for a count");
  expect_error(header("[2.0]"), 8, "has 2.0 for a count");
  expect_error(header("[\"2\"]"), 8, "has \"2\" for a count");
  expect_error(header("[18446744073709551615]"), 8, "has 18446744073709551615 for a count");
  expect_error(header("[1e400]"), 8, "number overflow");
  expect_error(header("[4294967296,4294967296]"), 8, "63 bits");
  // 2^62 elements of 4 bytes are 2^64, which would wrap round to 0.
  expect_error(header("[4611686018427387904]"), 8, "63 bits");
  expect_error(header("[3]"), 8, "needs 12 bytes by its shape and dtype, but has the bytes [0,8]");
}

TEST_F(SafetensorsTest, RefusesOffsetsThatOverlapOrLeaveTheFileOrAHole) {
  const auto header = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_EQ(error_of(header("[4,8]", "[0,4]"), 8), "no error");
  expect_error(header("[0,4]", "[3,7]"), 7, "\"b\" overlaps");
  expect_error(header("[0,4]", "[0,4]"), 4, "\"b\" overlaps");
  expect_error(header("[0,4]", "[5,9]"), 9, "or leaves a hole");
  expect_error(header("[1,5]", "[5,9]"), 9, "\"a\" overlaps the one before it, or leaves a hole");
  expect_error(header("[0,4]", "[4,8]"), 9, "has 1 bytes behind the last tensor");
  expect_error(header("[0,4]", "[4,8]"), 7, "has the bytes [4,8] of 7");
  expect_error(header("[4,0]", "[4,8]"), 8, "has the bytes [4,0]");
  expect_error(header("[-4,0]", "[4,8]"), 8, "has -4 for a count");
  expect_error(header("[0,4]", "[4,8,12]"), 8, "has the bytes [4,8,12]");
  expect_error(header("[0,4]", "[4,18446744073709551615]"), 8,
               "has 18446744073709551615 for a count");
}

TEST_F(SafetensorsTest, TellsOtherFormatsByTheirFirstBytes) {
  EXPECT_NE(error_of_file("PK\x03\x04 and more of a zip file").find("PyTorch pickle"),
            std::string::npos);
  EXPECT_NE(error_of_file("version https://git-lfs.github.com/spec/v1\n").find("Git LFS pointer"),
            std::string::npos);
}

}  // namespace
}  // namespace bert_ner
