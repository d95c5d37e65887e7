// Models that are well, each trained, traced and examined in float32, bfloat16 and half: no tool
// has anything to say of them. They hold what looks like a fault: masks of -inf, running extremes
// that begin at inf, zeros that are guarded, large scalars.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/overflow_report.h>
#include <mezzo/diagnostics/precision_check.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "diagnostics_cases.h"

namespace diagnostics_test {
namespace {

namespace F = nn::functional;

/// A module whose loss is a function of its children, parameters and buffers.
struct Model : nn::Module {
  std::function<Tensor(Model& model, const Tensor& x)> loss;
  Tensor sample;

  Tensor forward(const Tensor& x) { return loss(*this, x); }

  template <class Layer, class... Inputs>
  auto run(const std::string& name, const Inputs&... inputs) {
    return named_children()[name]->as<Layer>()->forward(inputs...);
  }
  Tensor linear(const std::string& name, const Tensor& x) { return run<nn::Linear>(name, x); }
};

using Made = std::shared_ptr<Model>;

Made make(const Tensor& sample, const std::function<void(Model& model)>& add,
          std::function<Tensor(Model& model, const Tensor& x)> loss) {
  torch::manual_seed(0);
  auto model = std::make_shared<Model>();
  add(*model);
  model->loss = std::move(loss);
  model->sample = sample;
  return model;
}

Tensor random(at::IntArrayRef sizes) {
  torch::manual_seed(3);
  return torch::randn(sizes);
}

/// Adds linear layers of 8 x 8 with these names.
std::function<void(Model& model)> linears(const std::vector<std::string>& names) {
  return [names](Model& model) {
    for (const auto& name : names) model.register_module(name, nn::Linear(8, 8));
  };
}

Tensor single(const Tensor& x) { return x.to(torch::kFloat); }
Tensor causal(std::int64_t length) { return torch::full({length, length}, -kInf).triu(1); }

Made recurrent() {
  return make(
      random({6, 4, 8}),
      [](Model& model) {
        model.register_module("gru", nn::GRU(8, 8));
        model.register_module("out", nn::Linear(8, 1));
      },
      [](Model& model, const Tensor& x) {
        return model.linear("out", std::get<0>(model.run<nn::GRU>("gru", x))).square().mean();
      });
}

Made convolutional() {
  return make(
      random({2, 8, 8, 8}),
      [](Model& model) {
        model.register_module("conv", nn::Conv2d(8, 8, 3));
        model.register_module("group", nn::GroupNorm(2, 8));
        model.register_module("batch", nn::BatchNorm2d(8));
      },
      [](Model& model, const Tensor& x) {
        const Tensor y = model.run<nn::GroupNorm>("group", model.run<nn::Conv2d>("conv", x));
        const Tensor z = model.run<nn::BatchNorm2d>("batch", y).relu();
        return F::max_pool2d(z, F::MaxPool2dFuncOptions(3).padding(1)).mean({2, 3}).square().mean();
      });
}

/// Attention by hand under a causal mask of -inf.
Made masked_attention() {
  return make(random({6, 8}), linears({"q", "k", "v"}), [](Model& model, const Tensor& x) {
    const Tensor scores = model.linear("q", x).mm(model.linear("k", x).t()) / std::sqrt(8.0);
    const Tensor weights = (scores + causal(6).to(scores.dtype())).softmax(-1);
    return (weights.mm(model.linear("v", x).to(weights.dtype())) - 1).square().mean();
  });
}

Made fused_attention() {
  return make(random({1, 2, 6, 8}), linears({"q", "k", "v"}), [](Model& model, const Tensor& x) {
    const Tensor y =
        torch::scaled_dot_product_attention(model.linear("q", x), model.linear("k", x),
                                            model.linear("v", x), {}, 0.0, /*is_causal=*/true);
    return y.square().mean();
  });
}

/// With padding, where libtorch takes it: its masked_fill of the padding throws in 16 bits.
Made padded_encoder() {
  return make(
      random({5, 3, 16}),
      [](Model& model) {
        model.register_module("encoder",
                              nn::TransformerEncoder(nn::TransformerEncoderOptions(
                                  nn::TransformerEncoderLayerOptions(16, 2).dropout(0), 2)));
      },
      [](Model& model, const Tensor& x) {
        const bool is_low = at::autocast::is_autocast_enabled(at::kCPU);
        const Tensor padding =
            is_low ? Tensor() : torch::arange(5).ge(torch::tensor({5, 3, 2}).unsqueeze(1));
        return model.run<nn::TransformerEncoder>("encoder", x, causal(5), padding).square().mean();
      });
}

Made embedding_bag() {
  return make(
      torch::tensor({1, 2, 4, 0, 3}),
      [](Model& model) {
        model.register_module("bag",
                              nn::EmbeddingBag(nn::EmbeddingBagOptions(6, 8).mode(torch::kMax)));
        model.register_module("out", nn::Linear(8, 4));
      },
      [](Model& model, const Tensor& x) {  // the second bag is empty
        const Tensor bags = model.run<nn::EmbeddingBag>("bag", x, torch::tensor({0, 2, 2}));
        return model.linear("out", bags).square().mean();
      });
}

/// The two best of four experts; the others' gates are -inf.
Made mixture_of_experts() {
  return make(
      random({8, 8}), linears({"gate", "0", "1", "2", "3"}), [](Model& model, const Tensor& x) {
        const Tensor gates = single(model.linear("gate", x)).slice(1, 0, 4);
        const auto [best, which] = gates.topk(2, -1);
        const Tensor shares = torch::full_like(gates, -kInf).scatter(1, which, best).softmax(-1);
        Tensor sum = torch::zeros({8, 8});
        for (int expert = 0; expert < 4; ++expert) {
          sum =
              sum + shares.select(1, expert).unsqueeze(1) * model.linear(std::to_string(expert), x);
        }
        const Tensor load = shares.mean(0);
        return (sum - 1).square().mean() + 0.01 * (load * (load + 1e-9).log()).sum();
      });
}

Made variational() {
  return make(random({8, 8}), linears({"encoder", "decoder"}), [](Model& model, const Tensor& x) {
    const Tensor hidden = model.linear("encoder", x);
    const Tensor mean = hidden.slice(1, 0, 4), logvar = hidden.slice(1, 4, 8);
    const Tensor z = mean + (0.5 * logvar).exp() * torch::randn_like(mean);
    const Tensor y = model.linear("decoder", torch::cat({z, z}, 1));
    return F::mse_loss(single(y), x) -
           0.5 * single(1 + logvar - mean.square() - logvar.exp()).mean();
  });
}

/// InfoNCE with a learned temperature; the diagonal is -inf.
Made contrastive() {
  return make(
      random({8, 8}),
      [](Model& model) {
        model.register_module("project", nn::Linear(8, 8));
        model.register_parameter("temperature", torch::tensor(2.7));
      },
      [](Model& model, const Tensor& x) {
        const Tensor z = F::normalize(single(model.linear("project", x)));
        const Tensor scores = single(z.mm(z.t())) * model.named_parameters()["temperature"].exp();
        return F::cross_entropy(scores.masked_fill(torch::eye(8).to(torch::kBool), -kInf),
                                torch::arange(8).roll(1));
      });
}

Made ctc() {
  return make(random({10, 2, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    return F::ctc_loss(single(model.linear("out", x).log_softmax(-1)),
                       torch::tensor({{1, 2, 2}, {3, 4, 0}}), torch::tensor({10, 8}),
                       torch::tensor({3, 2}));
  });
}

Made cosine() {
  return make(random({8, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    const Tensor signs = single(torch::arange(8).remainder(2) * 2 - 1);
    const Tensor y = single(model.linear("out", x));
    return F::cosine_embedding_loss(y, x, signs) + 1 - F::cosine_similarity(y, x * 0).mean();
  });
}

Made weight_norm() {
  return make(
      random({8, 8}),
      [](Model& model) {
        model.register_parameter("v", torch::randn({8, 8}));
        model.register_parameter("g", torch::ones({8, 1}));
      },
      [](Model& model, const Tensor& x) {
        const auto parameters = model.named_parameters();
        const Tensor weight = torch::_weight_norm(parameters["v"], parameters["g"], 0);
        return (x.mm(weight.t()) - 1).square().mean();
      });
}

/// The power iteration of spectral normalisation, in a buffer.
Made spectral_norm() {
  return make(
      random({8, 8}),
      [](Model& model) {
        model.register_parameter("weight", torch::randn({8, 8}));
        model.register_buffer("u", torch::full({8}, std::sqrt(1 / 8.0)));
      },
      [](Model& model, const Tensor& x) {
        const Tensor weight = model.named_parameters()["weight"], u = model.named_buffers()["u"];
        const auto unit = [](const Tensor& y) {
          return F::normalize(single(y), F::NormalizeFuncOptions().dim(0));
        };
        {
          const torch::NoGradGuard no_grad;
          u.copy_(unit(weight.mv(unit(weight.t().mv(u)))));
        }
        return (x.mm((weight / weight.t().mv(u).norm()).t()) - 1).square().mean();
      });
}

Made spectrum() {
  return make(random({8, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    return (torch::fft_rfft(single(model.linear("out", x))).abs() + 1e-2).log().square().mean();
  });
}

/// Running extremes that begin at inf.
Made running_minimum() {
  return make(
      random({8, 8}),
      [](Model& model) {
        model.register_module("out", nn::Linear(8, 8));
        model.register_buffer("low", torch::full({8}, kInf));
        model.register_buffer("high", torch::full({8}, -kInf));
      },
      [](Model& model, const Tensor& x) {
        const Tensor y = single(model.linear("out", x));
        const Tensor low = model.named_buffers()["low"], high = model.named_buffers()["high"];
        {
          const torch::NoGradGuard no_grad;
          low.copy_(torch::minimum(low, y.amin(0)));
          high.copy_(torch::maximum(high, y.amax(0)));
        }
        return ((y - low) / (high - low).clamp_min(1e-5)).square().mean();
      });
}

Made rms_norm() {
  return make(
      random({8, 8}),
      [](Model& model) {
        model.register_module("out", nn::Linear(8, 8));
        model.register_parameter("scale", torch::ones({8}));
      },
      [](Model& model, const Tensor& x) {
        const Tensor y = single(model.linear("out", x));
        const Tensor normed = y * (y.square().mean(-1, true) + 1e-8).rsqrt();
        return (normed * model.named_parameters()["scale"] - 1).square().mean();
      });
}

Tensor rotated(const Tensor& x) {
  const std::int64_t length = x.size(0), width = x.size(1);
  const Tensor rates = torch::pow(10000.0, -single(torch::arange(0, width, 2)) / width);
  const Tensor angles = single(torch::arange(length)).unsqueeze(1) * rates;
  const Tensor cos = angles.cos().to(x.dtype()), sin = angles.sin().to(x.dtype());
  const Tensor even = x.slice(1, 0, width, 2), odd = x.slice(1, 1, width, 2);
  return torch::stack({even * cos - odd * sin, even * sin + odd * cos}, -1).flatten(1);
}

Made rotary() {
  return make(random({6, 8}), linears({"q", "k"}), [](Model& model, const Tensor& x) {
    const Tensor scores = rotated(model.linear("q", x)).mm(rotated(model.linear("k", x)).t());
    return scores.div(std::sqrt(8.0)).log_softmax(-1).diagonal().neg().mean();
  });
}

/// Smoothed labels, of which one is ignored, and soft targets that are 0.
Made smoothed_labels() {
  return make(random({8, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    const Tensor y = model.linear("out", x);
    const Tensor targets = single(F::one_hot(torch::arange(8), 8));
    return F::cross_entropy(y, torch::tensor({0, 1, 2, 3, 4, -100, 1, 2}),
                            F::CrossEntropyFuncOptions().label_smoothing(0.1)) +
           F::kl_div(y.log_softmax(-1), targets,
                     F::KLDivFuncOptions().reduction(torch::kBatchMean));
  });
}

/// Logits of about 100, whose sigmoid is 0 or 1.
Made saturated() {
  return make(random({8, 8}) * 100, linears({"out"}), [](Model& model, const Tensor& x) {
    const Tensor logits = model.linear("out", x);
    const auto weighted =
        F::BinaryCrossEntropyWithLogitsFuncOptions().pos_weight(torch::full({8}, 100.0F));
    return F::binary_cross_entropy_with_logits(logits, torch::ones({8, 8}), weighted);
  });
}

/// A logarithm behind a where that keeps zeros from it.
Made guarded_logarithm() {
  return make(random({8, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    const Tensor y = single(model.linear("out", x)).relu() + 0.01;
    const Tensor is_large = y > 0.02;
    const Tensor safe = torch::where(is_large, y, torch::ones_like(y));
    return torch::where(is_large, safe.log(), torch::zeros_like(safe)).square().mean();
  });
}

/// A word that is banned by -inf, the best loss so far, which begins at inf, and a large count.
Made banned_word() {
  return make(
      random({8, 8}),
      [](Model& model) {
        model.register_module("out", nn::Linear(8, 8));
        model.register_buffer("best", torch::tensor(kInf));
        model.register_buffer("words", torch::full({}, 3e6));
      },
      [](Model& model, const Tensor& x) {
        Tensor ban = torch::zeros({8});
        ban[3] = -kInf;
        const Tensor scores = single(model.linear("out", x)) + ban;
        const Tensor loss =
            F::nll_loss(scores.log_softmax(-1), torch::tensor({0, 1, 2, 4, 5, 6, 7, 0}));
        const torch::NoGradGuard no_grad;
        model.named_buffers()["best"].copy_(torch::minimum(model.named_buffers()["best"], loss));
        model.named_buffers()["words"].add_(8);
        return loss;
      });
}

Tensor loss_in(at::ScalarType dtype, Model& model) {
  const bool is_single = dtype == torch::kFloat;
  const mezzo::AutocastGuard autocast({.device_type = torch::kCPU,
                                       .dtype = is_single ? torch::kHalf : dtype,
                                       .enabled = !is_single});
  return single(model.forward(model.sample)).mean();
}

/// What a DivergenceMonitor says in 30 steps; `scale` becomes the loss scale that they came to.
std::string watched(Model& model, at::ScalarType dtype, double& scale) {
  std::string said = kNothing;
  mezzo::MetricsLogger logger;
  logger.add_callback(mezzo::DivergenceMonitor(
      model, {.callback = [&said](const mezzo::Finding& finding) { said = finding.message(); }}));
  mezzo::GradScaler scaler({.init_scale = dtype == torch::kHalf ? 1024.0 : 1.0});
  scaler.on_skip(nullptr);
  mezzo::optim::AdamW optimizer(model.parameters(), 1e-3);
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const Tensor loss = loss_in(dtype, model);
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer, mezzo::StepOptions{});
    scaler.update();
    logger.record(result, loss);
  }
  logger.flush();
  scale = scaler.get_scale();
  return said;
}

std::string traced(Model& model, at::ScalarType dtype, double scale) {
  const mezzo::AnomalyTrace trace(model, {.loss_scale = [scale] { return scale; }});
  (loss_in(dtype, model) * scale).backward();
  const auto anomalies = trace.anomalies();
  return anomalies.empty() ? kNothing : anomalies.front().message();
}

std::string examined(const Made& model, at::ScalarType dtype) {
  const auto report = mezzo::check_precision(model, model->sample, torch::kCPU, {.dtype = dtype});
  for (const auto& finding : report.findings) {
    const bool is_of_values = finding.check == "forward" || finding.check == "range";
    if (finding.severity == mezzo::FindingSeverity::note || !is_of_values) continue;
    return c10::str(to_string(finding.severity), " ", finding.where, ": ", finding.reason);
  }
  return kNothing;
}

}  // namespace

std::vector<HealthyRun> healthy_models() {
  const std::vector<std::pair<const char*, Made (*)()>> models = {
      {"GRU", recurrent},
      {"convolution, GroupNorm, BatchNorm and pooling", convolutional},
      {"attention under a mask of -inf", masked_attention},
      {"scaled_dot_product_attention", fused_attention},
      {"TransformerEncoder with padding", padded_encoder},
      {"EmbeddingBag with an empty bag", embedding_bag},
      {"mixture of experts", mixture_of_experts},
      {"variational autoencoder", variational},
      {"contrastive loss", contrastive},
      {"CTC", ctc},
      {"cosine losses, also of a vector of 0", cosine},
      {"weight norm", weight_norm},
      {"spectral norm", spectral_norm},
      {"spectrum", spectrum},
      {"running minimum", running_minimum},
      {"RMSNorm by hand", rms_norm},
      {"rotary embedding", rotary},
      {"label smoothing and soft targets", smoothed_labels},
      {"saturated logits", saturated},
      {"guarded logarithm", guarded_logarithm},
      {"banned word and large counts", banned_word},
  };
  std::vector<HealthyRun> runs;
  for (const auto& [name, made] : models) {
    for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      const std::string in = c10::str(name, " in ", dtype, ", ");
      const auto scale = std::make_shared<double>(1);
      runs.push_back({in + "watched", [=] { return watched(*made(), dtype, *scale); }});
      runs.push_back({in + "traced", [=] { return traced(*made(), dtype, *scale); }});
      if (dtype == torch::kFloat) continue;  // there is nothing to examine
      runs.push_back({in + "examined", [=] { return examined(made(), dtype); }});
    }
  }
  return runs;
}

}  // namespace diagnostics_test
