#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/op_overrides.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>

namespace {

using mezzo::CastPolicy;
using Lists = std::map<std::string, CastPolicy>;

Lists as_map(const mezzo::AutocastOpList& list) {
  Lists map;
  for (const auto& entry : list.entries()) {
    map.emplace(entry.name, entry.cast_policy);
  }
  return map;
}

/// The CPU's lists in the sources of libtorch 2.15, which are in no header.
Lists make_cpu_lists_2_15() {
  Lists lists;
  const auto list = [&lists](CastPolicy cast_policy, const std::string& names) {
    std::istringstream words(names);
    for (std::string name; words >> name;) lists.emplace("aten::" + name, cast_policy);
  };
  // clang-format off
  list(CastPolicy::lower_precision_fp,
    "_addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm "
    "baddbmm bmm conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc "
    "conv_transpose1d conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear "
    "matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention");
  list(CastPolicy::fp32,
    "_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d "
    "avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist "
    "cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss "
    "ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft fft_fft2 "
    "fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn "
    "fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf "
    "grid_sampler grid_sampler_2d grid_sampler_3d hinge_embedding_loss huber_loss inverse "
    "kl_div l1_loss linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str "
    "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product "
    "linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_sqrth "
    "linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor "
    "linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals "
    "linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d max_unpool2d "
    "max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr "
    "ormqr pinverse poisson_nll_loss polar prod prod.dim_int quantile "
    "quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
    "replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center svd trace "
    "triangular_solve triplet_margin_loss view_as_complex");
  list(CastPolicy::promote,
    "cat index_copy stack");
  // clang-format on
  return lists;
}

// CUDA's lists in libtorch's header.
std::string overload(const char* op) { return std::string("aten::") + op; }
std::string overload(const char* op, const char* name) { return overload(op) + "." + name; }

template <class... Name>
void list(Lists& lists, CastPolicy cast_policy, Name... name) {
  lists.emplace(overload(name...), cast_policy);
}

#define NAME_OF_1(op) #op
#define NAME_OF_2(op, overload) #op, #overload
#define PICK(first, second, macro, ...) macro
#define NAME_OF(...) PICK(__VA_ARGS__, NAME_OF_2, NAME_OF_1)(__VA_ARGS__)
#define LOWER(...) list(lists, CastPolicy::lower_precision_fp, NAME_OF(__VA_ARGS__));
#define FP32(...) list(lists, CastPolicy::fp32, NAME_OF(__VA_ARGS__));
#define SET_DTYPE(...) list(lists, CastPolicy::fp32_set_opt_dtype, NAME_OF(__VA_ARGS__));
#define APPEND_DTYPE(function, name, ...) list(lists, CastPolicy::fp32_append_dtype, name);
#define PROMOTE(...) list(lists, CastPolicy::promote, NAME_OF(__VA_ARGS__));

Lists read_header_lists() {
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

// A probe of every kernel returns the lists of libtorch's sources.
TEST(AutocastOpList, MatchesLibtorchSources) {
#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR != 15
  GTEST_SKIP() << "the table is that of libtorch 2.15";
#endif
  const auto cpu = mezzo::autocast_op_list(torch::kCPU);
  EXPECT_EQ(as_map(cpu), make_cpu_lists_2_15());
  EXPECT_EQ(cpu.count(CastPolicy::fp32), 99U);
}

TEST(AutocastOpList, MatchesCudaMacros) {
  auto lists = read_header_lists();
  // Registered without the macros.
  lists.emplace("aten::cudnn_convolution", CastPolicy::lower_precision_fp);
  lists.emplace("aten::cudnn_convolution_transpose", CastPolicy::lower_precision_fp);
  lists.emplace("aten::binary_cross_entropy", CastPolicy::banned);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  lists.emplace("aten::linalg_matrix_sqrth", CastPolicy::fp32);
#endif
  EXPECT_EQ(as_map(mezzo::autocast_op_list(torch::kCUDA)), lists);
}

TEST(AutocastOpList, ReturnsFallthroughForOtherOps) {
  const auto list = mezzo::autocast_op_list(torch::kCPU);
  EXPECT_EQ(list.cast_policy("aten::relu"), CastPolicy::fallthrough);
  EXPECT_EQ(list.cast_policy("aten::add_.Tensor"), CastPolicy::fallthrough);
}

TEST(AutocastOpList, UnchangedByOverrides) {
  const auto cpu = as_map(mezzo::autocast_op_list(torch::kCPU));
  const auto cuda = as_map(mezzo::autocast_op_list(torch::kCUDA));
  mezzo::install_op_overrides(mezzo::OpOverrides().deny("mm").allow("relu").ignore("linear"));
  EXPECT_EQ(as_map(mezzo::autocast_op_list(torch::kCPU)), cpu);
  EXPECT_EQ(as_map(mezzo::autocast_op_list(torch::kCUDA)), cuda);
}

TEST(AutocastOpList, PrintsTable) {
  std::ostringstream text;
  text << mezzo::autocast_op_list(torch::kCUDA);
  EXPECT_THAT(text.str(),
              testing::ContainsRegex("cuda  aten::softmax\\.int +fp32_set_opt_dtype\n"));
}

TEST(AutocastOpList, ListsOtherDevices) {
  EXPECT_EQ(mezzo::autocast_op_list(torch::kXPU).cast_policy("aten::mm"),
            mezzo::CastPolicy::lower_precision_fp);
  EXPECT_TRUE(mezzo::autocast_op_list(torch::kHPU).entries().empty()) << "its backend has them";
  EXPECT_THROW(mezzo::autocast_op_list(torch::kMeta), c10::Error);
}

TEST(AutocastKernelProbe, ReturnsUnknownForOtherKernels) {
  auto library =
      torch::Library(torch::Library::DEF, "mezzo_probe_test", std::nullopt, __FILE__, __LINE__);
  library.def("odd(Tensor x) -> Tensor");
  auto kernels = torch::Library(torch::Library::IMPL, "mezzo_probe_test",
                                c10::DispatchKey::AutocastCPU, __FILE__, __LINE__);
  kernels.impl("odd", [](const torch::Tensor& x) { return x; });
  EXPECT_EQ(mezzo::OpOverrides().cast_policy("mezzo_probe_test::odd", torch::kCPU),
            CastPolicy::unknown);
}

TEST(AutocastOpList, ProbesOpsOnDemand) {
  static int calls = 0;
  auto library =
      torch::Library(torch::Library::DEF, "mezzo_lazy_test", std::nullopt, __FILE__, __LINE__);
  library.def("twice(Tensor x) -> Tensor");
  library.impl("twice", [](const torch::Tensor& x) { return x * 2; });
  auto kernels = torch::Library(torch::Library::IMPL, "mezzo_lazy_test",
                                c10::DispatchKey::AutocastCPU, __FILE__, __LINE__);
  kernels.impl("twice", [](const torch::Tensor& x) {
    ++calls;
    return at::autocast::cached_cast(torch::kBFloat16, x, torch::kCPU) * 2;
  });
  const auto overrides =
      mezzo::install_op_overrides(mezzo::OpOverrides().deny("mezzo_lazy_test::twice"));
  EXPECT_EQ(calls, 0);
  const mezzo::AutocastGuard<torch::kCPU> autocast({.op_overrides = overrides});  // not the probe's
  const auto cpu = mezzo::autocast_op_list(torch::kCPU);
  EXPECT_EQ(cpu.cast_policy("mezzo_lazy_test::twice"), CastPolicy::lower_precision_fp);
  EXPECT_GT(calls, 0);
  const auto cuda = mezzo::autocast_op_list(torch::kCUDA);
  EXPECT_EQ(cuda.cast_policy("mezzo_lazy_test::twice"), CastPolicy::fallthrough);
}

}  // namespace
