// What it costs to know whether a gradient is inf or NaN and how large all are together.
//
//   grad_buckets_bench [all|check|backward] [rounds] [threads]
//
// `check`: one read of gradients that lie there, against the ways that libtorch has, and against
// the machine: a read and a copy of the same bytes. `backward`: a backward pass of a 22.6 M
// parameter encoder and the check after or during it, for gradients in place and flat. Medians of
// interleaved rounds; ratios are medians of the rounds' own. On one thread time is that thread's
// own, so that what else the machine does counts less.

#include <mezzo/kernels/gradient_statistics.h>
#include <mezzo/optim/grad_buckets.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "interleaved.h"
#include "shapes.h"

namespace {

using torch::Tensor;

void print(const Interleaved& peers, std::size_t base, double bytes) {
  for (std::size_t i = 0; i < peers.peers().size(); ++i) {
    std::printf("  %-44s %8.3f ms  best %8.3f", peers.peers()[i].name.c_str(), peers.median_ms(i),
                peers.best_ms(i));
    if (bytes > 0) std::printf("  %6.1f GB/s", bytes / peers.median_ms(i) * 1e-6);
    std::printf("  x %.2f\n", peers.median_ratio(i, base));
  }
}

Tensor foreach_norm_and_isfinite(const std::vector<Tensor>& gradients) {
  const auto norm = torch::stack(at::_foreach_norm(gradients)).norm();
  return torch::isfinite(norm);
}

void check(const char* name, const Shapes& shapes, int rounds) {
  std::vector<Tensor> gradients;
  std::vector<Tensor> parameters;
  int64_t count = 0;
  for (const auto& shape : shapes) {
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
  std::printf("%s: %.1f M floats in %zu tensors; bytes counted: 4 a parameter\n", name,
              static_cast<double>(count) * 1e-6, shapes.size());
  Interleaved peers(torch::get_num_threads() == 1);
  peers.add("mezzo: found_inf, sum of squares, maximum",
            [&] { mezzo::detail::summarize_gradients(gradients, inv_scale); });
  peers.add("mezzo: with counts and the first bad element",
            [&] { mezzo::detail::gradient_statistics(gradients, inv_scale, torch::kHalf); });
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

/// The encoder that 22.6 M parameters are.
struct EncoderImpl : torch::nn::Module {
  EncoderImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(30522, 384));
    const auto layer =
        torch::nn::TransformerEncoderLayerOptions(384, 12).dim_feedforward(1536).dropout(0);
    encoder = register_module(
        "encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderLayer(layer), 6));
  }
  Tensor forward(const Tensor& tokens) {
    return encoder->forward(embedding->forward(tokens)).square().mean();
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
};
TORCH_MODULE(Encoder);

void backward(int rounds) {
  Encoder model;
  const auto tokens = torch::randint(0, 30522, {32, 16});
  const auto inv_scale = torch::full({}, 1.0F / 1024);
  const auto parameters = model->parameters();
  std::unique_ptr<mezzo::GradBuckets> buckets;
  Tensor loss;
  Interleaved peers(torch::get_num_threads() == 1);
  using Options = mezzo::GradBucketsOptions;
  const auto flat = Options().storage(mezzo::GradStorage::flat);
  const auto add = [&](const char* name, const Options* options, bool set_to_none, bool checks) {
    peers.add(
        name,
        [&, checks] {
          loss.backward();
          if (buckets == nullptr) return;
          if (checks) {
            buckets->summarize(inv_scale);
          } else {
            buckets->reattach_gradients();
          }
        },
        [&, options, set_to_none] {
          buckets.reset();
          model->zero_grad();
          if (options != nullptr) {
            buckets = std::make_unique<mezzo::GradBuckets>(parameters, *options);
            if (options->storage() == mezzo::GradStorage::flat) {
              for (const auto& bucket : buckets->buckets()) bucket.flat.fill_(0);  // page it in
            }
            if (!set_to_none) {
              for (const auto& parameter : parameters) {
                parameter.mutable_grad() = torch::zeros_like(parameter);
              }
              buckets->zero_grad(false);
            }
          }
          loss = model->forward(tokens) * 1024;
        });
  };
  const auto in_place = Options();
  const auto in_place_during = Options().check_during_backward(true);
  const auto flat_during = Options(flat).check_during_backward(true);
  add("backward alone", nullptr, true, false);
  add("in place, checked afterwards", &in_place, true, true);
  add("in place, checked during backward", &in_place_during, true, true);
  add("flat, not checked", &flat, true, false);
  add("flat, checked afterwards", &flat, true, true);
  add("flat, checked during backward", &flat_during, true, true);
  add("flat with zeroed gradients, not checked", &flat, false, false);
  peers.run(rounds);
  std::printf("backward of the 22.6 M parameter encoder, 32 x 16 tokens\n");
  print(peers, 0, 0);
  for (std::size_t i = 1; i < peers.peers().size(); ++i) {
    std::printf("  %-44s %+8.2f ms against backward alone\n", peers.peers()[i].name.c_str(),
                peers.median_difference(i, 0));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "all";
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 31;
  if (rounds < 1 || (part != "all" && part != "check" && part != "backward")) {
    std::fprintf(stderr, "usage: %s [all|check|backward] [rounds] [threads]\n", argv[0]);
    return 2;
  }
  if (argc > 3) torch::set_num_threads(std::atoi(argv[3]));
  std::printf("%d threads, isa %d\n", torch::get_num_threads(),
              static_cast<int>(mezzo::detail::best_isa()));
  if (part != "backward") {
    check("encoder", bert_shapes(6, 384, 1536), rounds);
    check("BERT-base", bert_shapes(12, 768, 3072), rounds);
    check("2,000 tiny tensors", tiny_shapes(), rounds);
  }
  if (part != "check") backward(rounds);
  return 0;
}
