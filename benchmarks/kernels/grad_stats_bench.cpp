// Time of GradStats: whether a gradient is inf or NaN, and the norm of all gradients.
//
//   grad_stats_bench [rounds] [threads]
//
// Compared with libtorch's ways, and with a read and a copy of as many bytes. Medians of
// interleaved rounds; ratios are medians of each round's ratio. With one thread time is CPU time of
// that thread, which other programs affect less.

#include <mezzo/kernels/compute_grad_stats.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "interleaved.h"
#include "optim/shapes.h"

namespace {

using torch::Tensor;

void print(const Interleaved& variants, std::size_t base, double bytes) {
  for (std::size_t i = 0; i < variants.candidates().size(); ++i) {
    std::printf("  %-44s %8.3f ms  best %8.3f", variants.candidates()[i].name.c_str(),
                variants.median_ms(i), variants.best_ms(i));
    if (bytes > 0) std::printf("  %6.1f GB/s", bytes / variants.median_ms(i) * 1e-6);
    std::printf("  x %.2f\n", variants.median_ratio(i, base));
  }
}

Tensor foreach_norm_and_isfinite(const std::vector<Tensor>& gradients) {
  const auto norm = torch::stack(at::_foreach_norm(gradients)).norm();
  return torch::isfinite(norm);
}

void check(const optim_bench::Model& model, int rounds) {
  std::vector<Tensor> gradients;
  std::vector<Tensor> parameters;
  int64_t count = 0;
  for (const auto& shape : model.shapes) {
    gradients.push_back(torch::randn(shape) * 1e-3);
    parameters.push_back(torch::empty_like(gradients.back()));
    parameters.back().mutable_grad() = gradients.back();
    count += gradients.back().numel();
  }
  const auto inv_scale = torch::full({}, 1.0F / 1024);
  const auto one = torch::ones({});
  const auto flat = torch::randn({count});
  auto copy = torch::empty_like(flat);
  auto found_inf = torch::zeros({});
  const double bytes = 4.0 * static_cast<double>(count);
  std::printf("%s: %.1f M floats in %zu tensors; bytes counted: 4 a parameter\n",
              model.name.c_str(), static_cast<double>(count) * 1e-6, model.shapes.size());
  Interleaved variants(torch::get_num_threads() == 1);
  variants.add("mezzo: found_inf, squared norm, maximum",
               [&] { mezzo::detail::compute_grad_stats(gradients, inv_scale); });
  variants.add("_foreach_norm, norm of norms, isfinite",
               [&] { foreach_norm_and_isfinite(gradients); });
  variants.add("_amp_foreach_... (unscale by 1) + _foreach_norm", [&] {
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, one);
    torch::stack(at::_foreach_norm(gradients)).norm();
  });
  variants.add("clip_grad_norm_ (nothing to clip)",
               [&] { torch::nn::utils::clip_grad_norm_(parameters, 1e9); });
  variants.add("sum of one tensor of as many bytes", [&] { flat.sum(); });
  variants.add("copy (bytes counted: read)", [&] { copy.copy_(flat); });
  variants.run(rounds);
  print(variants, 0, bytes);
}

/// 2,000 tensors of 64 to 1,088 elements.
optim_bench::Model tiny_tensors() {
  optim_bench::Model model{"2,000 tiny tensors", {}};
  for (int64_t i = 0; i < 2000; ++i) model.shapes.push_back({64 + (i * 37) % 1025});
  return model;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 31;
  if (rounds < 1) {
    std::fprintf(stderr, "usage: %s [rounds] [threads]\n", argv[0]);
    return 2;
  }
  if (argc > 2) torch::set_num_threads(std::atoi(argv[2]));
  std::printf("%d threads, isa %d\n", torch::get_num_threads(),
              static_cast<int>(mezzo::detail::best_isa()));
  check(optim_bench::bert("encoder", 30522, 6, 384), rounds);
  check(optim_bench::bert("BERT-base", 30522, 12, 768), rounds);
  check(tiny_tensors(), rounds);
  return 0;
}
