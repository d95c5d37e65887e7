#include <mezzo/base/mixed_precision_policy.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using mezzo::MixedPrecisionPolicy;
using testing::HasSubstr;
using testing::ThrowsMessage;

MixedPrecisionPolicy make(at::ScalarType param, at::ScalarType compute, at::ScalarType output) {
  return {.param_dtype = param, .compute_dtype = compute, .output_dtype = output};
}

const MixedPrecisionPolicy kMixed{.compute_dtype = torch::kBFloat16};

TEST(MixedPrecisionPolicy, DefaultsToFloat32) {
  EXPECT_EQ(MixedPrecisionPolicy(), make(torch::kFloat, torch::kFloat, torch::kFloat));
  EXPECT_EQ(kMixed, make(torch::kFloat, torch::kBFloat16, torch::kFloat));
}

TEST(MixedPrecisionPolicy, ThrowsForNonTrainingDtype) {
  const torch::Tensor x = torch::ones({1});
  EXPECT_THAT([&] { (void)MixedPrecisionPolicy{.param_dtype = torch::kLong}.cast_to_param(x); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("MixedPrecisionPolicy: param_dtype is Long; it should be float32, "
                            "bfloat16, float16 or float64")));
  EXPECT_THAT(
      [&] {
        (void)MixedPrecisionPolicy{.compute_dtype = torch::kFloat8_e4m3fn}.cast_to_compute(x);
      },
      ThrowsMessage<c10::Error>(HasSubstr("compute_dtype is Float8_e4m3fn")));
  EXPECT_THAT([&] { (void)MixedPrecisionPolicy{.output_dtype = torch::kBool}.cast_to_output(x); },
              ThrowsMessage<c10::Error>(HasSubstr("output_dtype is Bool")));
}

TEST(MixedPrecisionPolicyParse, ToStringMatchesJmp) {
  EXPECT_EQ(kMixed.to_string(), "params=float32,compute=bfloat16,output=float32");
  std::ostringstream stream;
  stream << make(torch::kDouble, torch::kHalf, torch::kBFloat16);
  EXPECT_EQ(stream.str(), "params=float64,compute=float16,output=bfloat16");
}

TEST(MixedPrecisionPolicyParse, RoundTrips) {
  const std::vector<at::ScalarType> dtypes{torch::kFloat, torch::kBFloat16, torch::kHalf,
                                           torch::kDouble};
  for (const auto param : dtypes) {
    for (const auto compute : dtypes) {
      for (const auto output : dtypes) {
        const MixedPrecisionPolicy precision = make(param, compute, output);
        EXPECT_EQ(MixedPrecisionPolicy::parse(precision.to_string()), precision) << precision;
      }
    }
  }
}

TEST(MixedPrecisionPolicyParse, AcceptsShortFormsAndWhitespace) {
  for (const char* text : {"p=f32,c=bf16,o=f32", "o=full,p=float,c=bfloat16",
                           " compute = bf16 ,\t"
                           "output= float32 , param =f32\n"}) {
    EXPECT_EQ(MixedPrecisionPolicy::parse(text), kMixed) << text;
  }
}

TEST(MixedPrecisionPolicyParse, SingleDtypeSetsAllThree) {
  const std::vector<std::pair<const char*, at::ScalarType>> names{
      {"float32", torch::kFloat}, {"full", torch::kFloat}, {"bfloat16", torch::kBFloat16},
      {"half", torch::kHalf},     {"f16", torch::kHalf},   {" double ", torch::kDouble}};
  for (const auto& [name, dtype] : names) {
    EXPECT_EQ(MixedPrecisionPolicy::parse(name), make(dtype, dtype, dtype)) << name;
  }
}

TEST(MixedPrecisionPolicyParse, DefaultsMatchJmp) {
  EXPECT_EQ(MixedPrecisionPolicy::parse("c=f16"), make(torch::kFloat, torch::kHalf, torch::kHalf));
  EXPECT_EQ(MixedPrecisionPolicy::parse("p=f16"), make(torch::kHalf, torch::kHalf, torch::kHalf));
  EXPECT_EQ(MixedPrecisionPolicy::parse("p=f16,c=bf16"),
            make(torch::kHalf, torch::kBFloat16, torch::kBFloat16));
  EXPECT_EQ(MixedPrecisionPolicy::parse("o=f16"), make(torch::kFloat, torch::kFloat, torch::kHalf));
}

TEST(MixedPrecisionPolicyParse, ErrorNamesInvalidPart) {
  const std::vector<std::pair<const char*, const char*>> errors{
      {"c=int8",
       "MixedPrecisionPolicy \"c=int8\": \"int8\" is not a dtype; choose from float32 (f32, float, "
       "full)"},
      {"Float32", "\"Float32\" is not a dtype"},
      {"", "\"\" is not a dtype"},
      {"c=", "\"\" is not a dtype"},
      {"p=f32,grads=f16",
       "\"grads\" is not a key; choose from params (p), compute (c) and output (o)"},
      {"p=f32,", "\"\" should be key=dtype"},
      {"f32,bf16", "\"f32\" should be key=dtype"},
      {"c=f16,compute=bf16", "\"compute\" is specified twice"},
      {"c=f16=f16", "\"f16=f16\" is not a dtype"}};
  for (const auto& [text, error] : errors) {
    EXPECT_THAT([text = text] { MixedPrecisionPolicy::parse(text); },
                ThrowsMessage<c10::Error>(HasSubstr(error)))
        << text;
  }
}

TEST(MixedPrecisionPolicyCast, CastsToNamedDtype) {
  const MixedPrecisionPolicy precision = make(torch::kDouble, torch::kBFloat16, torch::kHalf);
  const torch::Tensor x = torch::ones({2});
  EXPECT_EQ(precision.cast_to_param(x).scalar_type(), torch::kDouble);
  EXPECT_EQ(precision.cast_to_compute(x).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(precision.cast_to_output(x).scalar_type(), torch::kHalf);
  EXPECT_EQ(x.scalar_type(), torch::kFloat);
}

TEST(MixedPrecisionPolicyCast, ReturnsSameTensorForSameDtype) {
  const torch::Tensor x = torch::ones({2});
  EXPECT_TRUE(kMixed.cast_to_output(x).is_same(x));
}

TEST(MixedPrecisionPolicyCast, KeepsNonTrainingDtypes) {
  for (const auto dtype : {torch::kLong, torch::kInt, torch::kBool, torch::kByte,
                           torch::kComplexFloat, torch::kFloat8_e4m3fn}) {
    const torch::Tensor x = torch::ones({2}).to(dtype);
    EXPECT_TRUE(kMixed.cast_to_compute(x).is_same(x)) << dtype;
  }
  const torch::Tensor quantized =
      torch::quantize_per_tensor(torch::ones({2}), 1.0, 0, torch::kQInt8);
  EXPECT_TRUE(kMixed.cast_to_compute(quantized).is_same(quantized));
  EXPECT_FALSE(kMixed.cast_to_compute(torch::Tensor()).defined());
}

TEST(MixedPrecisionPolicyCast, GradientsKeepLeafDtype) {
  const torch::Tensor x = torch::ones({2}, torch::requires_grad());
  (kMixed.cast_to_compute(x) * 3).sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), torch::kFloat);
  EXPECT_EQ(x.grad()[0].item<float>(), 3);
}

struct Output {
  torch::Tensor logits;
  std::string name;
  auto tensors() { return std::tie(logits); }
};

TEST(MixedPrecisionPolicyCast, CastsInsideContainers) {
  const torch::Tensor x = torch::ones({2});
  const torch::Tensor ids = torch::ones({2}, torch::kLong);
  using Batch = std::map<std::string, std::vector<std::optional<torch::Tensor>>>;
  const Batch batch{{"x", {x, std::nullopt}}, {"ids", {ids}}};
  const Batch cast = kMixed.cast_to_compute(batch);
  EXPECT_EQ(cast.at("x")[0]->scalar_type(), torch::kBFloat16);
  EXPECT_FALSE(cast.at("x")[1].has_value());
  EXPECT_TRUE(cast.at("ids")[0]->is_same(ids));
  EXPECT_TRUE(batch.at("x")[0]->is_same(x)) << "the argument is not modified";

  const auto [first, number, output] =
      kMixed.cast_to_compute(std::tuple(x, 7, Output{.logits = x, .name = "head"}));
  EXPECT_EQ(first.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(number, 7);
  EXPECT_EQ(output.logits.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(output.name, "head");
}

TEST(MixedPrecisionPolicyCast, ReturnsVectorForTensorList) {
  const std::vector<torch::Tensor> tensors{torch::ones({2}), torch::ones({3})};
  const std::vector<torch::Tensor> cast = kMixed.cast_to_compute(torch::TensorList(tensors));
  ASSERT_EQ(cast.size(), 2);
  EXPECT_EQ(cast[1].scalar_type(), torch::kBFloat16);
}

TEST(MixedPrecisionPolicyCast, MovesRvalue) {
  std::pair<torch::Tensor, std::unique_ptr<int>> value(torch::ones({2}), std::make_unique<int>(5));
  const auto cast = kMixed.cast_to_compute(std::move(value));
  EXPECT_EQ(cast.first.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(*cast.second, 5);
}

}  // namespace
