// What it costs to know whether a gradient is inf or NaN and how large all are together.
//
//   gradient_summary_bench [rounds] [threads]
//
// One read of gradients that lie there, against the ways that libtorch has, and against the
// machine: a read and a copy of the same bytes. Medians of interleaved rounds; ratios are medians
// of the rounds' own. On one thread time is that thread's own, so that what else the machine does
// counts less.

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

void print(const Interleaved& peers, std::size_t base, double bytes) {
  for (std::size_t i = 0; i < peers.candidates().size(); ++i) {
    std::printf("  %-44s %8.3f ms  best %8.3f", peers.candidates()[i].name.c_str(), peers.median_ms(i),
                peers.best_ms(i));
    if (bytes > 0) std::printf("  %6.1f GB/s", bytes / peers.median_ms(i) * 1e-6);
    std::printf("  x %.2f\n", peers.median_ratio(i, base));
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
  Interleaved peers(torch::get_num_threads() == 1);
  peers.add("mezzo: found_inf, sum of squares, maximum",
            [&] { mezzo::detail::compute_grad_stats(gradients, inv_scale); });
  peers.add("_foreach_norm, norm of norms, isfinite",
            [&] { foreach_norm_and_isfinite(gradients); });
  peers.add("_amp_foreach_... (unscale by 1) + _foreach_norm", [&] {
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, one);
    torch::stack(at::_foreach_norm(gradients)).norm();
  });
  peers.add("clip_grad_norm_ (nothing to clip)",
            [&] { torch::nn::utils::clip_grad_norm_(parameters, 1e9); });
  peers.add("the machine: sum of one tensor of these bytes", [&] { flat.sum(); });
  peers.add("the machine: copy (counted: what is read)", [&] { copy.copy_(flat); });
  peers.run(rounds);
  print(peers, 0, bytes);
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
