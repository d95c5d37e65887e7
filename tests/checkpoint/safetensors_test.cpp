#include <mezzo/checkpoint/safetensors.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/temp_dir.h"

namespace safetensors {
namespace {

using mezzo::load_safetensors;
using mezzo::save_safetensors;
using mezzo::TensorDict;
using test_support::message_of;
using test_support::read_file;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Key;

/// Returns a file whose header may have any length field.
std::string file_of(const std::string& header, const std::string& data, std::uint64_t length) {
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
}
std::string file_of(const std::string& header, const std::string& data = "") {
  return file_of(header, data, header.size());
}
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":[)" + shape + R"(],"data_offsets":[)" + offsets +
         "]}";
}

// --- Reading -------------------------------------------------------------------------------------

struct InvalidFile {
  const char* name;
  std::string bytes;
  const char* error;
};

std::vector<InvalidFile> invalid_files() {
  const std::string four(4, '\0'), f32 = entry("F32", "1", "0,4");
  const auto with_key = [&](const std::string& key) {
    return file_of("{\"" + key + "\":" + f32 + "}", four);
  };
  const auto with_shape = [&](const std::string& shape, const std::string& offsets = "0,4") {
    return file_of("{\"x\":" + entry("F32", shape, offsets) + "}", four);
  };
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  return {
      {"Empty", "", "is truncated"},
      {"Short", "1234567", "not a safetensors file, or is truncated"},
      {"NoHeader", file_of(""), "not a safetensors file"},
      {"GitLfsPointer", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"},
      {"HeaderBeyondFile", file_of("{}", "", 3), "is truncated"},
      {"LongestHeader", file_of("{}", "", ~std::uint64_t{0}), "is truncated"},
      {"HeaderStartsWithSpace", file_of(" {}"), "not a safetensors file"},
      {"HeaderEnds", file_of("{"), "invalid JSON at byte 1: expected \""},
      {"TextAfterHeader", file_of("{}{}"), "expected the end"},
      {"TrailingComma", file_of("{\"x\":" + f32 + ",}", four), "expected \""},
      {"NameTwice", file_of("{\"x\":" + f32 + ",\"x\":" + f32 + "}", four), "duplicate key \"x\""},
      {"EscapedNameTwice", file_of("{\"x\":" + f32 + ",\"\\u0078\":" + f32 + "}", four),
       "duplicate key \"x\""},
      {"FieldTwice", file_of(R"({"x":{"dtype":"F32","dtype":"F16"}})"), "duplicate key \"dtype\""},
      {"MetadataTwice", file_of(R"({"__metadata__":{"a":"","a":""}})"), "duplicate key \"a\""},
      {"MetadataIsNumber", file_of(R"({"__metadata__":{"a":1}})"), "expected \""},
      {"FieldMissing", file_of(R"({"x":{"dtype":"F32","data_offsets":[0,4]}})", four), "x lacks"},
      {"ThreeOffsets", with_shape("1", "0,4,4"), "x lacks"},
      {"SixtyFiveDimensions", with_shape(ones), "at most 64 dimensions"},
      {"DtypeF4", file_of("{\"x\":" + entry("F4", "8", "0,4") + "}", four), "x has the dtype F4"},
      {"ControlCharacter", with_key("a\nb"), "control character"},
      {"UnknownEscape", with_key("\\x"), "unknown escape"},
      {"ShortEscape", with_key("\\u12"), "four hex digits"},
      {"UnpairedHighSurrogate", with_key("\\ud83d"), "not a Unicode character"},
      {"UnpairedLowSurrogate", with_key("\\ude00\\ud83d"), "not a Unicode character"},
      {"TwoHighSurrogates", with_key("\\ud83d\\ud83d"), "unpaired surrogate"},
      {"StrayContinuation", with_key("\x80"), "not UTF-8"},
      {"TruncatedUtf8", with_key("\xC3"), "not UTF-8"},
      {"OverlongUtf8", with_key("\xC0\x80"), "not UTF-8"},
      {"SurrogateInUtf8", with_key("\xED\xA0\x80"), "not a Unicode character"},
      {"BeyondUnicode", with_key("\xF4\x90\x80\x80"), "not a Unicode character"},
      {"NegativeSize", with_shape("-1"), "expected an integer"},
      {"RealSize", with_shape("1.0"), "expected ,"},
      {"LeadingZero", with_shape("01"), "expected an integer"},
      {"SizeOf2To64", with_shape("18446744073709551616"), "expected an integer"},
      {"SizesOverflow", with_shape("4294967296,4294967296"), "do not match F32 of shape"},
      {"SizesWithZeroOverflow", with_shape("0,4611686018427387904,4", "0,0"), "do not match"},
      {"SizeAbove2To63", with_shape("0,18446744073709551615", "0,0"), "do not match"},
      {"SizeOfOtherData", with_shape("2"), "data_offsets [0, 4] do not match F32 of shape [2]"},
      {"EndBeforeBegin", with_shape("1", "4,0"), "do not match"},
      {"OffsetsBeyondFile", with_shape("2", "0,8"), "4 bytes of data, and its tensors have 8"},
      {"Hole", file_of("{\"x\":" + entry("F32", "1", "4,8") + "}", four + four),
       "x begins at byte 4 of the data, and the tensors before it end at byte 0"},
      {"Overlap",
       file_of("{\"x\":" + entry("F32", "2", "0,8") + ",\"y\":" + entry("F32", "1", "4,8") + "}",
               four + four),
       "y begins at byte 4"},
      {"TrailingBytes", with_key("x") + "0", "5 bytes of data, and its tensors have 4"},
      {"BoolOf2", file_of("{\"x\":" + entry("BOOL", "1", "0,1") + "}", "\2"), "other than 0 and 1"},
  };
}

TEST(Safetensors, ThrowsForInvalidFiles) {
  const test_support::TempDir temp_dir;
  for (const InvalidFile& file : invalid_files()) {
    const auto path = temp_dir.write("x.safetensors", file.bytes);
    const std::string error = message_of([&] { load_safetensors(path); });
    EXPECT_THAT(error, testing::AllOf(HasSubstr(file.error), HasSubstr("x.safetensors: ")))
        << file.name;
  }
  for (const char* path : {"/nonexistent", "/dev/zero", "/dev/null/x"}) {
    EXPECT_THAT(message_of([&] { load_safetensors(path); }), HasSubstr(path));
  }
}

TEST(Safetensors, LoadsUnusualFiles) {
  const test_support::TempDir temp_dir;
  const std::string nested(1 << 20, '[');  // a recursive reader would overflow the stack
  const auto path = temp_dir.write(
      "x.safetensors",
      file_of("{ \"empty\" :" + entry("F32", "0,1152921504606846976", "4,4") +
                  ",\n\"\\u00e9\\ud83d\\ude00\\\"\\/\\n\xC3\xA9\":" + entry("F32", "", "0,4") +
                  R"(,"misaligned":{"other":{"a":)" + nested + std::string(nested.size(), ']') +
                  R"(,"b":"]}"},"data_offsets":[5,9],"shape":[1,1],"dtype":"F32"},"half":)" +
                  entry("BOOL", "1", "4,5") + "} \n",
              std::string("\0\0\x80\x3f\1\0\0\0\x40", 9)));
  const TensorDict tensors = load_safetensors(path);
  EXPECT_THAT(tensors, ElementsAre(Key("empty"), Key("half"), Key("misaligned"),
                                   Key("\xC3\xA9\xF0\x9F\x98\x80\"/\n\xC3\xA9")));
  EXPECT_EQ(tensors.at("empty").sizes(), at::IntArrayRef({0, 1152921504606846976}));
  EXPECT_EQ(tensors.rbegin()->second.item<float>(), 1);
  EXPECT_EQ(tensors.at("misaligned").item<float>(), 2);
  for (const auto& [name, tensor] : tensors) {
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    EXPECT_EQ(address % tensor.element_size(), 0) << name;
  }
}

TEST(Safetensors, TensorsOutliveFileAndWritesStayPrivate) {
  const test_support::TempDir temp_dir;
  const auto path = temp_dir / "x.safetensors";
  save_safetensors({{"x", torch::ones({100000})}, {"y", torch::ones({2})}}, path);
  const std::string before = read_file(path);
  at::Tensor x = load_safetensors(path).at("x");
  x.fill_(2);
  EXPECT_EQ(read_file(path), before);
  save_safetensors({{"x", torch::zeros({100000})}}, path);
  EXPECT_TRUE(x.eq(2).all().item<bool>());
  EXPECT_EQ(x.storage().nbytes(), x.nbytes());  // torch::save would write the whole storage
  std::filesystem::remove(path);
  EXPECT_TRUE(x.eq(2).all().item<bool>());
}

TEST(Safetensors, LoadsShards) {
  const test_support::TempDir temp_dir;
  save_safetensors({{"a", torch::ones({1})}, {"b", torch::ones({2})}}, temp_dir / "1.safetensors");
  save_safetensors({{"c", torch::ones({3})}}, temp_dir / "2.safetensors");
  const auto load = [&](const std::string& weight_map) {
    const auto index = temp_dir.write("model.safetensors.index.json",
                                      R"({"metadata":{"total_size":2.4e1,"nested":[{}]},)"
                                      R"("weight_map":)" +
                                          weight_map + "}");
    EXPECT_EQ(message_of([&] { load_safetensors(index); }),
              message_of([&] { load_safetensors(temp_dir.path()); }));
    return load_safetensors(index);
  };
  EXPECT_THAT(load(R"({"c":"2.safetensors","a":"1.safetensors","b":"1.safetensors"})"),
              ElementsAre(Key("a"), Key("b"), Key("c")));
  const std::vector<std::pair<std::string, const char*>> invalid{
      {R"({"a":"1.safetensors"})", "it does not list b of 1.safetensors"},
      {R"({"c":"2.safetensors","d":"2.safetensors"})", "d is missing in 2.safetensors"},
      {R"({"c":"3.safetensors"})", "3.safetensors"},
      {R"({"c":"../2.safetensors"})", "../2.safetensors is not a file name"},
      {R"({"c":1})", "invalid JSON"},
      {"{}", "lacks a weight_map"}};
  for (const auto& [weight_map, error] : invalid) {
    EXPECT_THAT(message_of([&, &map = weight_map] { load(map); }),
                testing::AllOf(HasSubstr(error), HasSubstr("index.json")));
  }
}

// --- Modules -------------------------------------------------------------------------------------

struct TiedModel : torch::nn::Module {
  TiedModel() {
    body = register_module("body", torch::nn::Linear(3, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
    head = register_parameter("head", body->weight);
  }
  torch::nn::Linear body = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
  torch::Tensor head;
};

TEST(SafetensorsModule, RoundTripsBuffersAndTiedWeights) {
  const test_support::TempDir temp_dir;
  const auto path = temp_dir / "x.safetensors";
  TiedModel saved, loaded;
  saved.norm->num_batches_tracked.fill_(7);
  save_safetensors(saved, path);
  EXPECT_THAT(read_file(path), HasSubstr(R"({"format":"pt","head":"body.weight"})"));
  EXPECT_THAT(load_safetensors(path),
              ElementsAre(Key("body.bias"), Key("body.weight"), Key("norm.bias"),
                          Key("norm.num_batches_tracked"), Key("norm.running_mean"),
                          Key("norm.running_var"), Key("norm.weight")));
  load_safetensors(loaded, path);
  EXPECT_TRUE(loaded.body->weight.equal(saved.body->weight));
  EXPECT_EQ(loaded.norm->num_batches_tracked.item<std::int64_t>(), 7);

  TensorDict both = load_safetensors(path);
  both["head"] = both["body.weight"].clone();
  load_safetensors(loaded, both);
  both.erase("body.weight");
  load_safetensors(loaded, both);
  both["body.weight"] = torch::zeros({2, 3});
  EXPECT_THAT(message_of([&] { load_safetensors(loaded, both); }),
              HasSubstr("head is tied to a weight that has other values"));
  EXPECT_TRUE(loaded.body->weight.equal(saved.body->weight));
}

TEST(SafetensorsModule, ListsAllMismatchesAndLoadsNothing) {
  const test_support::TempDir temp_dir;
  torch::nn::Linear model(torch::nn::LinearOptions(3, 2));
  model->register_buffer("mask", torch::ones({2}));
  const auto before = model->bias.clone();
  const auto path = temp_dir / "x.safetensors";
  save_safetensors({{"bias", torch::zeros({2})}, {"weight", torch::zeros({3, 2})}, {"x", before}},
                   path);
  for (const bool strict : {true, false}) {
    const auto error = message_of([&] { load_safetensors(model, path, {.strict = strict}); });
    EXPECT_THAT(error, HasSubstr("size mismatch for weight: float32 [3, 2] on cpu in the file, "
                                 "float32 [2, 3] on cpu in the current model"));
    EXPECT_EQ(error.find("Missing key(s) in state_dict: \"mask\"") != std::string::npos, strict);
    EXPECT_EQ(error.find("Unexpected key(s) in state_dict: \"x\"") != std::string::npos, strict);
    EXPECT_TRUE(model->bias.equal(before));
  }
  save_safetensors({{"bias", torch::zeros({2})}, {"x", before}}, path);
  const auto keys = load_safetensors(model, path, {.strict = false});
  EXPECT_THAT(keys.missing_keys, ElementsAre("mask", "weight"));
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("x"));
  EXPECT_TRUE(model->bias.equal(torch::zeros({2})));
}

TEST(SafetensorsModule, RemovesPrefixAndConvertsDtype) {
  const test_support::TempDir temp_dir;
  const auto path = temp_dir / "x.safetensors";
  const auto values = torch::randn({2, 3});
  save_safetensors({{"bert.weight", values.to(torch::kBFloat16)},
                    {"bert.bias", torch::ones({2}, torch::kFloat8_e4m3fn)},
                    {"head.weight", values}},
                   path);
  torch::nn::Linear model(3, 2);
  load_safetensors(model, path, {.prefix = "bert."});
  EXPECT_TRUE(model->weight.equal(values.to(torch::kBFloat16).to(torch::kFloat)));
  EXPECT_TRUE(model->bias.equal(torch::ones({2})));
  EXPECT_TRUE(model->weight.requires_grad() && model->weight.is_leaf());
}

TEST(SafetensorsModule, ThrowsBeforeWritingIfAnyTensorCannotBeLoaded) {
  torch::nn::Linear model(3, 2);
  mezzo::Ema ema(model->parameters());
  TensorDict zeros{{"bias", torch::zeros({2})}, {"weight", torch::zeros({2, 3})}};
  {
    const mezzo::EmaGuard guard(ema);
    EXPECT_THAT(message_of([&] { load_safetensors(model, zeros); }), HasSubstr("EmaGuard"));
  }
  zeros["expanded"] = torch::zeros({2});
  model->register_buffer("expanded", torch::ones({1}).expand({2}));
  EXPECT_THAT(message_of([&] { load_safetensors(model, zeros); }), HasSubstr("is expanded"));
  EXPECT_TRUE(model->weight.ne(0).any().item<bool>());
  model->register_buffer("meta", torch::ones({1}, torch::kMeta));
  EXPECT_THAT(message_of([&] { load_safetensors(model, zeros); }), HasSubstr("meta is float32"));
  EXPECT_THAT(message_of([&] { load_safetensors(torch::nn::Linear(nullptr), zeros); }),
              HasSubstr("module holder is empty"));
}

// --- Writing -------------------------------------------------------------------------------------

TEST(Safetensors, ThrowsBeforeReplacingFile) {
  const test_support::TempDir temp_dir;
  const auto path = temp_dir.write("x.safetensors", "before");
  const std::vector<std::pair<TensorDict, const char*>> invalid{
      {{{"x", torch::ones({2}, torch::kComplexDouble)}}, "x (ComplexDouble [2]"},
      {{{"x", torch::ones({2}).to_sparse()}}, "x is Sparse"},
      {{{"x", torch::Tensor()}}, "x is undefined"},
      {{{"__metadata__", torch::ones({2})}}, "reserves this name"},
      {{{"\xC3", torch::ones({2})}}, "not UTF-8"}};
  for (const auto& [tensors, error] : invalid) {
    EXPECT_THAT(message_of([&, &t = tensors] { save_safetensors(t, path); }), HasSubstr(error));
  }
  EXPECT_EQ(read_file(path), "before");
}

/// Tensors of all dtypes, with names that JSON escapes, and views.
TensorDict all_tensors() {
  TensorDict tensors{{"\"\\\x01\x7f\xC3\xA9 name", torch::arange(6).view({2, 3}).t()},
                     {"scalar", torch::tensor(1.5F)},
                     {"empty", torch::ones({0, 3})},
                     {"conjugate", torch::randn({3}, torch::kComplexFloat).conj()},
                     {"z", torch::arange(12, torch::kInt).slice(0, 0, 12, 5)}};
  for (const at::ScalarType dtype : mezzo::detail::kSafetensorsDtypes) {
    const auto bytes = torch::arange(16, torch::kByte);
    tensors[c10::toString(dtype)] =
        dtype == torch::kBool ? bytes.remainder(2).to(torch::kBool) : bytes.view(dtype);
  }
  return tensors;
}

std::string bytes_of(const torch::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

TEST(Safetensors, RoundTripsAllDtypes) {
  const test_support::TempDir temp_dir;
  const auto path = temp_dir / "x.safetensors";
  const TensorDict saved = all_tensors();
  save_safetensors(saved, path);
  const TensorDict loaded = load_safetensors(path);
  EXPECT_EQ(loaded.size(), saved.size());
  for (const auto& [name, tensor] : loaded) {
    const auto expected = saved.at(name).resolve_conj().contiguous();
    ASSERT_EQ(tensor.scalar_type(), expected.scalar_type()) << name;
    ASSERT_EQ(tensor.sizes(), expected.sizes()) << name;
    EXPECT_EQ(bytes_of(tensor), bytes_of(expected)) << name;
  }
}

#ifdef MEZZO_PYTHON_WITH_SAFETENSORS

// Python's bindings, without torch or NumPy, read the file and write it again.
TEST(Safetensors, FileEqualsPythons) {
  const test_support::TempDir temp_dir;
  const auto path = temp_dir / "x.safetensors";
  const auto script = temp_dir.write("rewrite.py", R"python(
import ctypes, re, sys, safetensors
def name(dtype):
    names = {"BOOL": "bool", "BF16": "bfloat16", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3": "float8_e4m3fn",
             "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
    kind, size = re.match("([A-Z]+)(.*)", dtype).groups()
    return names.get(dtype) or {"F": "float", "C": "complex", "I": "int", "U": "uint"}[kind] + size
specs, buffers = {}, []
for key, tensor in safetensors.deserialize(open(sys.argv[1], "rb").read()):
    data = bytes(tensor["data"])
    buffers.append(ctypes.create_string_buffer(data, len(data)))
    specs[key] = safetensors.TensorSpec(dtype=name(tensor["dtype"]), shape=tensor["shape"],
                                        data_ptr=ctypes.addressof(buffers[-1]), data_len=len(data))
safetensors.serialize_file(specs, sys.argv[2], metadata={"format": "pt"})
)python");
  save_safetensors(all_tensors(), path);
  const std::string rewritten = (temp_dir / "rewritten").string();
  const std::string command = "'" MEZZO_PYTHON_WITH_SAFETENSORS "' '" + script.string() + "' '" +
                              path.string() + "' '" + rewritten + "'";
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(read_file(rewritten), read_file(path));
}

#endif

}  // namespace
}  // namespace safetensors
