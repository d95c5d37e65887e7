#include "op_samples.h"

#include <torch/torch.h>

#include <cstring>
#include <sstream>

namespace op_overrides_test {
namespace {

using at::Tensor;
using Ints = std::vector<int64_t>;

const auto kNone = c10::IValue();

Tensor normal(at::IntArrayRef sizes) { return torch::randn(sizes); }

// In (0.1, 0.9): valid for logarithms, probabilities and inverse functions.
Tensor unit(at::IntArrayRef sizes) { return torch::rand(sizes) * 0.8 + 0.1; }

Tensor longs(const Ints& values) { return torch::tensor(values, torch::kLong); }

Tensor signs(int64_t count) { return torch::sign(torch::randn({count})); }

Tensor positive_definite() {
  const Tensor a = torch::randn({4, 4});
  return a.mm(a.t()) + 4 * torch::eye(4);
}

Tensor with_names(const Tensor& tensor) {
  const std::vector<at::Dimname> names = {at::Dimname::fromSymbol(at::Symbol::dimname("rows")),
                                          at::Dimname::fromSymbol(at::Symbol::dimname("columns"))};
  return tensor.refine_names(names);
}

c10::IValue tensors(std::vector<Tensor> list) { return c10::List<Tensor>(list); }

c10::IValue name(const char* text) { return std::string("dimname::") + text; }

c10::IValue names(const char* text) {
  return c10::List<std::string>({std::string("dimname::") + text});
}

void add_matrix_products(std::vector<OpSample>& all) {
  all.insert(
      all.end(),
      {{"aten::_addmm_activation", {normal({5}), normal({3, 4}), normal({4, 5})}},
       {"aten::addbmm", {normal({3, 5}), normal({2, 3, 4}), normal({2, 4, 5})}},
       {"aten::addmm", {normal({3, 5}), normal({3, 4}), normal({4, 5})}},
       {"aten::addmv", {normal({3}), normal({3, 4}), normal({4})}},
       {"aten::addr", {normal({3, 4}), normal({3}), normal({4})}},
       {"aten::baddbmm", {normal({2, 3, 5}), normal({2, 3, 4}), normal({2, 4, 5})}},
       {"aten::bilinear", {normal({3, 4}), normal({3, 5}), normal({2, 4, 5}), normal({2})}},
       {"aten::bmm", {normal({2, 3, 4}), normal({2, 4, 5})}},
       {"aten::chain_matmul", {tensors({normal({3, 4}), normal({4, 5}), normal({5, 2})})}},
       {"aten::cross", {normal({4, 3}), normal({4, 3}), 1}},
       {"aten::dot", {normal({4}), normal({4})}},
       {"aten::einsum", {"ij,jk->ik", tensors({normal({3, 4}), normal({4, 5})})}},
       {"aten::linalg_multi_dot", {tensors({normal({3, 4}), normal({4, 5}), normal({5, 2})})}},
       {"aten::linalg_vecdot", {normal({3, 4}), normal({3, 4})}},
       {"aten::linear", {normal({3, 4}), normal({5, 4}), normal({5})}},
       {"aten::matmul", {normal({3, 4}), normal({4, 5})}},
       {"aten::mm", {normal({3, 4}), normal({4, 5})}},
       {"aten::mv", {normal({3, 4}), normal({4})}},
       {"aten::prelu", {normal({3, 4}), unit({4})}},
       {"aten::tensordot", {normal({3, 4}), normal({4, 5}), Ints{1}, Ints{0}}},
       {"aten::vdot", {normal({4}), normal({4})}}});
}

void add_attention_and_cells(std::vector<OpSample>& all) {
  const auto heads = [] { return normal({2, 2, 5, 4}); };
  all.insert(
      all.end(),
      {{"aten::_native_multi_head_attention",
        {normal({2, 5, 8}), normal({2, 5, 8}), normal({2, 5, 8}), 8, 2, normal({24, 8}),
         normal({24}), normal({8, 8}), normal({8}), kNone, false}},
       {"aten::_scaled_dot_product_flash_attention", {heads(), heads(), heads()}},
       {"aten::scaled_dot_product_attention", {heads(), heads(), heads()}},
       {"aten::_thnn_fused_gru_cell", {normal({2, 12}), normal({2, 12}), normal({2, 4})}},
       {"aten::_thnn_fused_lstm_cell", {normal({2, 16}), normal({2, 16}), normal({2, 4})}},
       {"aten::gru_cell", {normal({2, 3}), normal({2, 4}), normal({12, 3}), normal({12, 4})}},
       {"aten::lstm_cell",
        {normal({2, 3}), tensors({normal({2, 4}), normal({2, 4})}), normal({16, 3}),
         normal({16, 4})}},
       {"aten::rnn_relu_cell", {normal({2, 3}), normal({2, 4}), normal({4, 3}), normal({4, 4})}},
       {"aten::rnn_tanh_cell", {normal({2, 3}), normal({2, 4}), normal({4, 3}), normal({4, 4})}},
       {"aten::mkldnn_rnn_layer",
        {normal({5, 2, 3}), normal({16, 3}), normal({16, 4}), normal({16}), normal({16}),
         normal({1, 2, 4}), normal({1, 2, 4}), false, Ints{}, 2, 4, 1, true, false, false,
         false}}});
}

void add_convolutions(std::vector<OpSample>& all) {
  const auto image = [] { return normal({2, 3, 6, 6}); };
  const auto kernel = [] { return normal({4, 3, 3, 3}); };
  const auto volume = [] { return normal({1, 2, 5, 5, 5}); };
  all.insert(
      all.end(),
      {{"aten::_convolution",
        {image(), kernel(), normal({4}), Ints{1, 1}, Ints{0, 0}, Ints{1, 1}, false, Ints{0, 0}, 1,
         false, false, false, false}},
       {"aten::_convolution.deprecated",
        {image(), kernel(), normal({4}), Ints{1, 1}, Ints{0, 0}, Ints{1, 1}, false, Ints{0, 0}, 1,
         false, false, false}},
       {"aten::convolution",
        {image(), kernel(), normal({4}), Ints{1, 1}, Ints{0, 0}, Ints{1, 1}, false, Ints{0, 0}, 1}},
       {"aten::conv1d", {normal({2, 3, 8}), normal({4, 3, 3}), normal({4})}},
       {"aten::conv1d.padding", {normal({2, 3, 8}), normal({4, 3, 3}), normal({4})}},
       {"aten::conv2d", {image(), kernel(), normal({4})}},
       {"aten::conv2d.padding", {image(), kernel(), normal({4})}},
       {"aten::conv3d", {volume(), normal({3, 2, 2, 2, 2}), normal({3})}},
       {"aten::conv3d.padding", {volume(), normal({3, 2, 2, 2, 2}), normal({3})}},
       {"aten::conv_tbc", {normal({6, 2, 3}), normal({3, 3, 4}), normal({4})}},
       {"aten::conv_transpose1d", {normal({2, 3, 6}), normal({3, 4, 3}), normal({4})}},
       {"aten::conv_transpose2d.input", {image(), normal({3, 4, 3, 3}), normal({4})}},
       {"aten::conv_transpose3d.input", {volume(), normal({2, 3, 2, 2, 2}), normal({3})}},
       {"aten::cudnn_convolution",
        {image(), kernel(), Ints{0, 0}, Ints{1, 1}, Ints{1, 1}, 1, false, false, false}},
       {"aten::cudnn_convolution_transpose",
        {image(), normal({3, 4, 3, 3}), Ints{0, 0}, Ints{0, 0}, Ints{1, 1}, Ints{1, 1}, 1, false,
         false, false}}});
}

void add_pointwise(std::vector<OpSample>& all) {
  for (const char* op : {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p",
                         "log2", "reciprocal", "rsqrt", "sinh", "softplus", "tan"}) {
    all.push_back({std::string("aten::") + op, {unit({3, 4})}});
  }
  all.insert(all.end(),
             {{"aten::addcdiv", {normal({3, 4}), normal({3, 4}), unit({3, 4})}},
              {"aten::addcmul", {normal({3, 4}), normal({3, 4}), normal({3, 4})}},
              {"aten::atan2", {normal({3, 4}), normal({3, 4})}},
              {"aten::fake_quantize_per_tensor_affine", {normal({3, 4}), 0.1, 0, 0, 255}},
              {"aten::polar", {unit({3, 4}), normal({3, 4})}},
              {"aten::pow.Scalar", {2, normal({3, 4})}},
              {"aten::pow.Tensor_Scalar", {unit({3, 4}), 3}},
              {"aten::pow.Tensor_Tensor", {unit({3, 4}), normal({3, 4})}},
              {"aten::view_as_complex", {normal({3, 2})}}});
}

void add_reductions(std::vector<OpSample>& all) {
  const auto named = [] { return with_names(normal({3, 4})); };
  all.insert(all.end(), {{"aten::cumprod", {normal({3, 4}), 1}},
                         {"aten::cumprod.dimname", {named(), name("columns")}},
                         {"aten::cumsum", {normal({3, 4}), 1}},
                         {"aten::cumsum.dimname", {named(), name("columns")}},
                         {"aten::frobenius_norm.dim", {normal({3, 4}), Ints{0, 1}}},
                         {"aten::linalg_matrix_norm", {normal({3, 4}), 2}},
                         {"aten::linalg_matrix_norm.str_ord", {normal({3, 4})}},
                         {"aten::linalg_vector_norm", {normal({3, 4})}},
                         {"aten::log_softmax.Dimname", {named(), name("columns")}},
                         {"aten::log_softmax.int", {normal({3, 4}), 1}},
                         {"aten::logsumexp", {normal({3, 4}), Ints{1}}},
                         {"aten::nanquantile", {normal({6}), torch::tensor({0.25F, 0.5F})}},
                         {"aten::nanquantile.scalar", {normal({6}), 0.5}},
                         {"aten::norm.Scalar", {normal({3, 4}), 2}},
                         {"aten::norm.ScalarOpt_dim", {normal({3, 4}), 2, Ints{1}}},
                         {"aten::norm.names_ScalarOpt_dim", {named(), 2, names("columns")}},
                         {"aten::nuclear_norm", {normal({3, 4})}},
                         {"aten::nuclear_norm.dim", {normal({3, 4}), Ints{0, 1}}},
                         {"aten::prod", {normal({3, 4})}},
                         {"aten::prod.dim_Dimname", {named(), name("columns")}},
                         {"aten::prod.dim_int", {normal({3, 4}), 1}},
                         {"aten::quantile", {normal({6}), torch::tensor({0.25F, 0.5F})}},
                         {"aten::quantile.scalar", {normal({6}), 0.5}},
                         {"aten::renorm", {normal({3, 4}), 2, 0, 1}},
                         {"aten::softmax.Dimname", {named(), name("columns")}},
                         {"aten::softmax.int", {normal({3, 4}), 1}},
                         {"aten::sum", {normal({3, 4})}},
                         {"aten::sum.dim_DimnameList", {named(), names("columns")}},
                         {"aten::sum.dim_IntList", {normal({3, 4}), Ints{1}}},
                         {"aten::trace", {normal({4, 4})}}});
}

void add_normalisation_and_distances(std::vector<OpSample>& all) {
  all.insert(all.end(), {{"aten::cdist", {normal({3, 4}), normal({5, 4})}},
                         {"aten::cosine_similarity", {normal({3, 4}), normal({3, 4})}},
                         {"aten::dist", {normal({3, 4}), normal({3, 4})}},
                         {"aten::group_norm", {normal({2, 4, 3}), 2, normal({4}), normal({4})}},
                         {"aten::layer_norm", {normal({3, 4}), Ints{4}, normal({4}), normal({4})}},
                         {"aten::native_layer_norm",
                          {normal({3, 4}), Ints{4}, normal({4}), normal({4}), 1e-5}},
                         {"aten::pdist", {normal({3, 4})}}});
}

void add_losses(std::vector<OpSample>& all) {
  for (const char* op : {"huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"}) {
    all.push_back({std::string("aten::") + op, {normal({3, 4}), normal({3, 4})}});
  }
  all.insert(all.end(),
             {{"aten::binary_cross_entropy", {unit({3, 4}), unit({3, 4})}},
              {"aten::binary_cross_entropy_with_logits", {normal({3, 4}), unit({3, 4})}},
              {"aten::cosine_embedding_loss", {normal({3, 4}), normal({3, 4}), signs(3)}},
              {"aten::cross_entropy_loss", {normal({3, 4}), longs({0, 3, 1})}},
              {"aten::ctc_loss.IntList",
               {normal({6, 2, 4}).log_softmax(2), longs({1, 2, 3, 1}).view({2, 2}), Ints{6, 6},
                Ints{2, 2}}},
              {"aten::ctc_loss.Tensor",
               {normal({6, 2, 4}).log_softmax(2), longs({1, 2, 3, 1}).view({2, 2}), longs({6, 6}),
                longs({2, 2})}},
              {"aten::hinge_embedding_loss", {normal({4}), signs(4)}},
              {"aten::kl_div", {normal({3, 4}), unit({3, 4})}},
              {"aten::margin_ranking_loss", {normal({4}), normal({4}), signs(4)}},
              {"aten::multi_margin_loss", {normal({3, 4}), longs({0, 3, 1})}},
              {"aten::multilabel_margin_loss", {normal({3}), longs({0, 2, -1})}},
              {"aten::multilabel_margin_loss_forward", {normal({3}), longs({0, 2, -1}), 1}},
              {"aten::nll_loss", {normal({3, 4}), longs({0, 3, 1})}},
              {"aten::nll_loss2d", {normal({1, 4, 1, 3}), longs({0, 3, 1}).view({1, 1, 3})}},
              {"aten::poisson_nll_loss", {normal({3, 4}), unit({3, 4}), true, false, 1e-8, 1}},
              {"aten::soft_margin_loss", {normal({4}), signs(4)}},
              {"aten::triplet_margin_loss", {normal({3, 4}), normal({3, 4}), normal({3, 4})}}});
}

void add_pooling_padding_and_sampling(std::vector<OpSample>& all) {
  const auto volume = [] { return normal({1, 2, 4, 4, 4}); };
  all.insert(all.end(),
             {{"aten::_grid_sampler_2d_cpu_fallback",
               {normal({1, 2, 4, 4}), unit({1, 3, 3, 2}), 0, 0, false}},
              {"aten::adaptive_avg_pool3d", {volume(), Ints{2, 2, 2}}},
              {"aten::adaptive_max_pool3d", {volume(), Ints{2, 2, 2}}},
              {"aten::avg_pool3d", {volume(), Ints{2, 2, 2}}},
              {"aten::fractional_max_pool2d",
               {normal({1, 2, 6, 6}), Ints{2, 2}, Ints{3, 3}, unit({1, 2, 2})}},
              {"aten::fractional_max_pool3d",
               {normal({1, 2, 6, 6, 6}), Ints{2, 2, 2}, Ints{3, 3, 3}, unit({1, 2, 3})}},
              {"aten::grid_sampler", {normal({1, 2, 4, 4}), unit({1, 3, 3, 2}), 0, 0, false}},
              {"aten::grid_sampler_2d", {normal({1, 2, 4, 4}), unit({1, 3, 3, 2}), 0, 0, false}},
              {"aten::grid_sampler_3d", {volume(), unit({1, 2, 2, 2, 3}), 0, 0, false}},
              {"aten::max_pool3d", {volume(), Ints{2, 2, 2}}},
              {"aten::max_unpool2d",
               {normal({1, 1, 2, 2}), longs({0, 3, 8, 15}).view({1, 1, 2, 2}), Ints{4, 4}}},
              {"aten::max_unpool3d",
               {normal({1, 1, 1, 2, 2}), longs({0, 3, 8, 15}).view({1, 1, 1, 2, 2}), Ints{1, 4, 4},
                Ints{1, 2, 2}, Ints{0, 0, 0}}},
              {"aten::reflection_pad1d", {normal({2, 3, 4}), Ints{1, 1}}},
              {"aten::reflection_pad2d", {normal({2, 3, 4, 4}), Ints{1, 1, 1, 1}}},
              {"aten::replication_pad1d", {normal({2, 3, 4}), Ints{1, 1}}},
              {"aten::replication_pad2d", {normal({2, 3, 4, 4}), Ints{1, 1, 1, 1}}},
              {"aten::replication_pad3d", {volume(), Ints{1, 1, 1, 1, 1, 1}}}});
}

void add_upsampling(std::vector<OpSample>& all) {
  for (const char* op : {"upsample_nearest1d", "_upsample_nearest_exact1d"}) {
    all.push_back({std::string("aten::") + op, {normal({1, 2, 4}), Ints{7}}});
  }
  for (const char* op : {"upsample_nearest2d", "_upsample_nearest_exact2d"}) {
    all.push_back({std::string("aten::") + op, {normal({1, 2, 4, 4}), Ints{7, 6}}});
  }
  for (const char* op : {"upsample_nearest3d", "_upsample_nearest_exact3d"}) {
    all.push_back({std::string("aten::") + op, {normal({1, 2, 3, 3, 3}), Ints{4, 5, 6}}});
  }
  for (const char* op : {"upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d",
                         "_upsample_bicubic2d_aa"}) {
    all.push_back({std::string("aten::") + op, {normal({1, 2, 4, 4}), Ints{7, 6}, false}});
  }
  all.push_back({"aten::upsample_linear1d", {normal({1, 2, 4}), Ints{7}, false}});
  all.push_back({"aten::upsample_trilinear3d", {normal({1, 2, 3, 3, 3}), Ints{4, 5, 6}, false}});
}

void add_indexing(std::vector<OpSample>& all) {
  const c10::IValue indices = c10::List<std::optional<Tensor>>({longs({0, 2})});
  all.insert(
      all.end(),
      {{"aten::cat", {tensors({normal({3, 4}), normal({2, 4})})}},
       {"aten::index_copy", {normal({3, 4}), 0, longs({2, 0}), normal({2, 4})}},
       {"aten::index_copy.dimname",
        {with_names(normal({3, 4})), name("rows"), longs({2, 0}), with_names(normal({2, 4}))}},
       {"aten::index_put", {normal({3, 4}), indices, normal({2, 4})}},
       {"aten::scatter_add", {normal({3, 4}), 0, longs({0, 1, 2, 0}).view({1, 4}), normal({1, 4})}},
       {"aten::stack", {tensors({normal({3, 4}), normal({3, 4})})}}});
}

void add_linear_algebra(std::vector<OpSample>& all) {
  std::istringstream of_one_matrix(
      "inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh "
      "linalg_eigvals "
      "linalg_eigvalsh linalg_inv linalg_inv_ex linalg_qr linalg_svd linalg_svdvals cholesky geqrf "
      "pinverse qr svd _lu_with_info linalg_matrix_rank.atol_rtol_float "
      "linalg_matrix_rank.atol_rtol_tensor");
  for (std::string op; of_one_matrix >> op;) all.push_back({"aten::" + op, {positive_definite()}});
  const auto triangle = [] { return torch::linalg_cholesky(positive_definite()); };
  const auto reflectors = torch::geqrf(normal({4, 4}));
  const Tensor a = std::get<0>(reflectors);
  const Tensor tau = std::get<1>(reflectors);
  const auto lu = torch::linalg_lu_factor(positive_definite());
  all.insert(
      all.end(),
      {{"aten::cholesky_inverse", {triangle()}},
       {"aten::cholesky_solve", {normal({4, 2}), triangle()}},
       {"aten::linalg_cond.p_str", {positive_definite(), "fro"}},
       {"aten::linalg_householder_product", {a, tau}},
       // LAPACK's least squares differ in the last bit from call to call; not on this matrix.
       {"aten::linalg_lstsq", {4 * torch::eye(4), normal({4, 2})}},
       {"aten::linalg_matrix_rank", {positive_definite(), 0.1}},
       {"aten::linalg_matrix_rank.tol_tensor", {positive_definite(), torch::tensor(0.1F)}},
       {"aten::linalg_solve", {positive_definite(), normal({4, 2})}},
       {"aten::linalg_tensorinv", {positive_definite().view({2, 2, 2, 2})}},
       {"aten::linalg_tensorsolve", {positive_definite().view({2, 2, 2, 2}), normal({2, 2})}},
       {"aten::lu_solve", {normal({4, 2}), std::get<0>(lu), std::get<1>(lu)}},
       {"aten::orgqr", {a, tau}},
       {"aten::ormqr", {a, tau, normal({4, 2})}},
       {"aten::triangular_solve", {normal({4, 2}), triangle(), false}}});
}

void add_fourier_transforms(std::vector<OpSample>& all) {
  for (const char* op : {"fft_fft", "fft_fft2", "fft_fftn", "fft_hfft", "fft_ifft", "fft_ifft2",
                         "fft_ifftn", "fft_ihfft", "fft_irfft", "fft_irfft2", "fft_irfftn",
                         "fft_rfft", "fft_rfft2", "fft_rfftn"}) {
    all.push_back({std::string("aten::") + op, {normal({4, 8})}});
  }
  all.push_back(
      {"aten::stft", {normal({16}), 8, kNone, kNone, torch::hann_window(8), false, kNone, true}});
  all.push_back({"aten::stft.center",
                 {normal({16}), 8, kNone, kNone, torch::hann_window(8), true, "reflect", false,
                  kNone, true}});
}

std::vector<OpSample> make_samples() {
  torch::manual_seed(7);
  std::vector<OpSample> all;
  add_matrix_products(all);
  add_attention_and_cells(all);
  add_convolutions(all);
  add_pointwise(all);
  add_reductions(all);
  add_normalisation_and_distances(all);
  add_losses(all);
  add_pooling_padding_and_sampling(all);
  add_upsampling(all);
  add_indexing(all);
  add_linear_algebra(all);
  add_fourier_transforms(all);
  return all;
}

std::vector<uint8_t> bytes_of(const Tensor& tensor) {
  const Tensor flat = tensor.detach().rename(std::nullopt).cpu().contiguous();
  std::vector<uint8_t> bytes(flat.nbytes());
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), flat.const_data_ptr(), bytes.size());
  }
  return bytes;
}

std::string difference(const Tensor& expected, const Tensor& found, Values values) {
  if (expected.defined() != found.defined()) {
    return "one result is undefined";
  }
  if (!expected.defined()) {
    return "";
  }
  if (expected.scalar_type() != found.scalar_type()) {
    return std::string("dtype ") + c10::toString(found.scalar_type()) + " in place of " +
           c10::toString(expected.scalar_type());
  }
  if (expected.sizes() != found.sizes()) {
    return "shapes differ";
  }
  const bool agree = values == Values::bitwise_equal
                         ? bytes_of(expected) == bytes_of(found)
                         : torch::allclose(expected, found, /*rtol=*/1e-5, /*atol=*/1e-5);
  return agree ? "" : "values differ";
}

}  // namespace

const std::vector<OpSample>& op_samples() {
  static const std::vector<OpSample> samples = make_samples();
  return samples;
}

c10::OperatorHandle find_op(const std::string& name) {
  const auto dot = name.find('.');
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(),
                                                        overload.c_str());
}

std::vector<c10::IValue> complete_arguments(const OpSample& sample) {
  auto arguments = sample.arguments;
  const auto op = find_op(sample.op);
  const auto& declared = op.schema().arguments();
  for (std::size_t i = arguments.size(); i < declared.size(); ++i) {
    const auto& argument = declared[i];
    const bool optional = argument.type()->kind() == c10::TypeKind::OptionalType;
    TORCH_CHECK(argument.default_value().has_value() || optional, sample.op, " lacks ",
                argument.name());
    arguments.push_back(argument.default_value().value_or(c10::IValue()));
  }
  return arguments;
}

Outcome call(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments) {
  const torch::NoGradGuard no_grad;
  Outcome outcome;
  try {
    op.callBoxed(arguments);
    outcome.results = std::move(arguments);
  } catch (const std::exception& error) {
    outcome.threw = true;
    outcome.error = error.what();
  }
  return outcome;
}

std::string difference(const Outcome& expected, const Outcome& found, Values values) {
  if (expected.threw != found.threw) {
    return expected.threw ? "no exception, expected: " + expected.error
                          : "exception: " + found.error;
  }
  if (expected.results.size() != found.results.size()) {
    return "number of results";
  }
  for (std::size_t i = 0; i < expected.results.size(); ++i) {
    if (!expected.results[i].isTensor()) {
      continue;
    }
    const auto text =
        difference(expected.results[i].toTensor(), found.results[i].toTensor(), values);
    if (!text.empty()) {
      return "result " + std::to_string(i) + ": " + text;
    }
  }
  return "";
}

}  // namespace op_overrides_test
