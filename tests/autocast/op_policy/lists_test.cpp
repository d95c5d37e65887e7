#include <mezzo/autocast/op_policy.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>

#include "libtorch_2_11.h"

namespace {

using mezzo::OpCategory;
using Lists = std::map<std::string, OpCategory>;

Lists as_map(const mezzo::OpList& list) {
  Lists map;
  for (const auto& entry : list.entries()) {
    map.emplace(entry.name, entry.category);
  }
  return map;
}

template <class Table>
Lists of_table(const Table& table) {
  Lists map;
  for (const auto& entry : table) {
    map.emplace(entry.name, entry.category);
  }
  return map;
}

// CUDA's lists as libtorch's header has them.
std::string overload(const char* op) { return std::string("aten::") + op; }
std::string overload(const char* op, const char* name) { return overload(op) + "." + name; }

template <class... Name>
void list(Lists& lists, OpCategory category, Name... name) {
  lists.emplace(overload(name...), category);
}

#define NAME_OF_1(op) #op
#define NAME_OF_2(op, overload) #op, #overload
#define PICK(first, second, macro, ...) macro
#define NAME_OF(...) PICK(__VA_ARGS__, NAME_OF_2, NAME_OF_1)(__VA_ARGS__)
#define LOWER(...) list(lists, OpCategory::lower_precision, NAME_OF(__VA_ARGS__));
#define FP32(...) list(lists, OpCategory::fp32, NAME_OF(__VA_ARGS__));
#define SET_DTYPE(...) list(lists, OpCategory::fp32_set_opt_dtype, NAME_OF(__VA_ARGS__));
#define APPEND_DTYPE(function, name, ...) list(lists, OpCategory::fp32_append_dtype, name);
#define PROMOTE(...) list(lists, OpCategory::promote, NAME_OF(__VA_ARGS__));

Lists lists_of_the_header() {
  Lists lists;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(APPEND_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
  return lists;
}

#undef NAME_OF_1
#undef NAME_OF_2
#undef PICK
#undef NAME_OF
#undef LOWER
#undef FP32
#undef SET_DTYPE
#undef APPEND_DTYPE
#undef PROMOTE

TEST(OpLists, CountWhatLibtorch211Registers) {
#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR != 11
  GTEST_SKIP() << "the counts are those of libtorch 2.11";
#endif
  const auto cpu = mezzo::autocast_op_lists(torch::kCPU);
  EXPECT_EQ(cpu.entries().size(), 129U);
  EXPECT_EQ(cpu.count(OpCategory::lower_precision), 24U);
  EXPECT_EQ(cpu.count(OpCategory::fp32), 101U);
  EXPECT_EQ(cpu.count(OpCategory::promote), 4U);

  const auto cuda = mezzo::autocast_op_lists(torch::kCUDA);
  EXPECT_EQ(cuda.entries().size(), 125U);
  EXPECT_EQ(cuda.count(OpCategory::lower_precision), 35U);
  EXPECT_EQ(cuda.count(OpCategory::fp32), 58U);
  EXPECT_EQ(cuda.count(OpCategory::fp32_set_opt_dtype), 17U);
  EXPECT_EQ(cuda.count(OpCategory::fp32_append_dtype), 3U);
  EXPECT_EQ(cuda.count(OpCategory::promote), 11U);
  EXPECT_EQ(cuda.count(OpCategory::banned), 1U);
}

// Two independent ways to the same lists: a probe of every kernel, and what libtorch's sources say.
TEST(OpLists, AgreeWithLibtorchsSources) {
#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR != 11
  GTEST_SKIP() << "the table is that of libtorch 2.11";
#endif
  EXPECT_EQ(as_map(mezzo::autocast_op_lists(torch::kCPU)), of_table(op_policy_test::kCpuOpsOf2_11));
  EXPECT_EQ(as_map(mezzo::autocast_op_lists(torch::kCUDA)),
            of_table(op_policy_test::kCudaOpsOf2_11));
}

TEST(OpLists, AgreeWithCudasMacros) {
  auto lists = lists_of_the_header();
  // Registered beside the macros.
  lists.emplace("aten::cudnn_convolution", OpCategory::lower_precision);
  lists.emplace("aten::cudnn_convolution_transpose", OpCategory::lower_precision);
  lists.emplace("aten::binary_cross_entropy", OpCategory::banned);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  lists.emplace("aten::linalg_matrix_sqrth", OpCategory::fp32);
#endif
  EXPECT_EQ(as_map(mezzo::autocast_op_lists(torch::kCUDA)), lists);
}

TEST(OpLists, PutEveryOtherOpUnderFallthrough) {
  const auto list = mezzo::autocast_op_lists(torch::kCPU);
  EXPECT_EQ(list.category("aten::relu"), OpCategory::fallthrough);
  EXPECT_EQ(list.category("aten::add_.Tensor"), OpCategory::fallthrough);
}

TEST(OpLists, DoNotChangeWhenAPolicyOverridesOps) {
  const auto cpu = as_map(mezzo::autocast_op_lists(torch::kCPU));
  const auto cuda = as_map(mezzo::autocast_op_lists(torch::kCUDA));
  mezzo::install_op_overrides(mezzo::OpPolicy().deny("mm").allow("relu").ignore("linear"));
  EXPECT_EQ(as_map(mezzo::autocast_op_lists(torch::kCPU)), cpu);
  EXPECT_EQ(as_map(mezzo::autocast_op_lists(torch::kCUDA)), cuda);
}

TEST(OpLists, PrintAsATable) {
  std::ostringstream text;
  text << mezzo::autocast_op_lists(torch::kCUDA);
  EXPECT_THAT(text.str(),
              testing::ContainsRegex("cuda  aten::softmax\\.int +fp32_set_opt_dtype\n"));
}

TEST(OpLists, AreRefusedForDevicesWithoutLists) {
  EXPECT_THROW(mezzo::autocast_op_lists(torch::kXPU), c10::Error);
}

TEST(Probe, SaysUnknownOfAKernelThatNeitherCastsNorRefuses) {
  auto library =
      torch::Library(torch::Library::DEF, "mezzo_probe_test", std::nullopt, __FILE__, __LINE__);
  library.def("odd(Tensor x) -> Tensor");
  auto kernels = torch::Library(torch::Library::IMPL, "mezzo_probe_test",
                                c10::DispatchKey::AutocastCPU, __FILE__, __LINE__);
  kernels.impl("odd", [](const torch::Tensor& x) { return x; });
  EXPECT_EQ(mezzo::OpPolicy().category("mezzo_probe_test::odd", torch::kCPU), OpCategory::unknown);
}

}  // namespace
