// Models without faults, each trained, traced and checked in float32, bfloat16 and float16, for
// which no tool may report a finding. They contain what resembles faults: masks of -inf, running
// extremes that start at inf, guarded zeros, large scalars.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/divergence_monitor.h>
#include <mezzo/diagnostics/finding.h>
#include <mezzo/diagnostics/metrics_logger.h>
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

using ModelPtr = std::shared_ptr<Model>;

ModelPtr make_model(const Tensor& sample, const std::function<void(Model& model)>& add,
                    std::function<Tensor(Model& model, const Tensor& x)> loss) {
  torch::manual_seed(0);
  auto model = std::make_shared<Model>();
  add(*model);
  model->loss = std::move(loss);
  model->sample = sample;
  return model;
}

Tensor random_tensor(at::IntArrayRef sizes) {
  torch::manual_seed(3);
  return torch::randn(sizes);
}

/// Adds linear layers of 8 x 8 with these names.
std::function<void(Model& model)> linears(const std::vector<std::string>& names) {
  return [names](Model& model) {
    for (const auto& name : names) model.register_module(name, nn::Linear(8, 8));
  };
}

Tensor to_float32(const Tensor& x) { return x.to(torch::kFloat); }
Tensor causal_mask(std::int64_t length) { return torch::full({length, length}, -kInf).triu(1); }

ModelPtr recurrent() {
  return make_model(
      random_tensor({6, 4, 8}),
      [](Model& model) {
        model.register_module("gru", nn::GRU(8, 8));
        model.register_module("out", nn::Linear(8, 1));
      },
      [](Model& model, const Tensor& x) {
        return model.linear("out", std::get<0>(model.run<nn::GRU>("gru", x))).square().mean();
      });
}

ModelPtr convolutional() {
  return make_model(
      random_tensor({2, 8, 8, 8}),
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

/// Manual attention with a causal mask of -inf.
ModelPtr masked_attention() {
  return make_model(
      random_tensor({6, 8}), linears({"q", "k", "v"}), [](Model& model, const Tensor& x) {
        const Tensor scores = model.linear("q", x).mm(model.linear("k", x).t()) / std::sqrt(8.0);
        const Tensor weights = (scores + causal_mask(6).to(scores.dtype())).softmax(-1);
        return (weights.mm(model.linear("v", x).to(weights.dtype())) - 1).square().mean();
      });
}

ModelPtr fused_attention() {
  return make_model(
      random_tensor({1, 2, 6, 8}), linears({"q", "k", "v"}), [](Model& model, const Tensor& x) {
        const Tensor y =
            torch::scaled_dot_product_attention(model.linear("q", x), model.linear("k", x),
                                                model.linear("v", x), {}, 0.0, /*is_causal=*/true);
        return y.square().mean();
      });
}

/// With padding in float32 only: libtorch's masked_fill of the padding throws in 16-bit dtypes.
ModelPtr padded_encoder() {
  return make_model(
      random_tensor({5, 3, 16}),
      [](Model& model) {
        model.register_module("encoder",
                              nn::TransformerEncoder(nn::TransformerEncoderOptions(
                                  nn::TransformerEncoderLayerOptions(16, 2).dropout(0), 2)));
      },
      [](Model& model, const Tensor& x) {
        const bool is_low = at::autocast::is_autocast_enabled(at::kCPU);
        const Tensor padding =
            is_low ? Tensor() : torch::arange(5).ge(torch::tensor({5, 3, 2}).unsqueeze(1));
        return model.run<nn::TransformerEncoder>("encoder", x, causal_mask(5), padding)
            .square()
            .mean();
      });
}

ModelPtr embedding_bag() {
  return make_model(
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

/// Top 2 of four experts, with gates of -inf for the others.
ModelPtr mixture_of_experts() {
  return make_model(random_tensor({8, 8}), linears({"gate", "0", "1", "2", "3"}),
                    [](Model& model, const Tensor& x) {
                      const Tensor gates = to_float32(model.linear("gate", x)).slice(1, 0, 4);
                      const auto [best, indices] = gates.topk(2, -1);
                      const Tensor gate_weights =
                          torch::full_like(gates, -kInf).scatter(1, indices, best).softmax(-1);
                      Tensor sum = torch::zeros({8, 8});
                      for (int expert = 0; expert < 4; ++expert) {
                        sum = sum + gate_weights.select(1, expert).unsqueeze(1) *
                                        model.linear(std::to_string(expert), x);
                      }
                      const Tensor load = gate_weights.mean(0);
                      return (sum - 1).square().mean() + 0.01 * (load * (load + 1e-9).log()).sum();
                    });
}

ModelPtr variational() {
  return make_model(random_tensor({8, 8}), linears({"encoder", "decoder"}),
                    [](Model& model, const Tensor& x) {
                      const Tensor hidden = model.linear("encoder", x);
                      const Tensor mean = hidden.slice(1, 0, 4), logvar = hidden.slice(1, 4, 8);
                      const Tensor z = mean + (0.5 * logvar).exp() * torch::randn_like(mean);
                      const Tensor y = model.linear("decoder", torch::cat({z, z}, 1));
                      return F::mse_loss(to_float32(y), x) -
                             0.5 * to_float32(1 + logvar - mean.square() - logvar.exp()).mean();
                    });
}

/// InfoNCE with a learned temperature and a diagonal of -inf.
ModelPtr contrastive() {
  return make_model(
      random_tensor({8, 8}),
      [](Model& model) {
        model.register_module("project", nn::Linear(8, 8));
        model.register_parameter("temperature", torch::tensor(2.7));
      },
      [](Model& model, const Tensor& x) {
        const Tensor z = F::normalize(to_float32(model.linear("project", x)));
        const Tensor scores =
            to_float32(z.mm(z.t())) * model.named_parameters()["temperature"].exp();
        return F::cross_entropy(scores.masked_fill(torch::eye(8).to(torch::kBool), -kInf),
                                torch::arange(8).roll(1));
      });
}

ModelPtr ctc() {
  return make_model(random_tensor({10, 2, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    return F::ctc_loss(to_float32(model.linear("out", x).log_softmax(-1)),
                       torch::tensor({{1, 2, 2}, {3, 4, 0}}), torch::tensor({10, 8}),
                       torch::tensor({3, 2}));
  });
}

ModelPtr cosine() {
  return make_model(random_tensor({8, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    const Tensor signs = to_float32(torch::arange(8).remainder(2) * 2 - 1);
    const Tensor y = to_float32(model.linear("out", x));
    return F::cosine_embedding_loss(y, x, signs) + 1 - F::cosine_similarity(y, x * 0).mean();
  });
}

ModelPtr weight_norm() {
  return make_model(
      random_tensor({8, 8}),
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

/// Spectral normalization with a power iteration in a buffer.
ModelPtr spectral_norm() {
  return make_model(
      random_tensor({8, 8}),
      [](Model& model) {
        model.register_parameter("weight", torch::randn({8, 8}));
        model.register_buffer("u", torch::full({8}, std::sqrt(1 / 8.0)));
      },
      [](Model& model, const Tensor& x) {
        const Tensor weight = model.named_parameters()["weight"], u = model.named_buffers()["u"];
        const auto unit = [](const Tensor& y) {
          return F::normalize(to_float32(y), F::NormalizeFuncOptions().dim(0));
        };
        {
          const torch::NoGradGuard no_grad;
          u.copy_(unit(weight.mv(unit(weight.t().mv(u)))));
        }
        return (x.mm((weight / weight.t().mv(u).norm()).t()) - 1).square().mean();
      });
}

ModelPtr spectrum() {
  return make_model(random_tensor({8, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    return (torch::fft_rfft(to_float32(model.linear("out", x))).abs() + 1e-2).log().square().mean();
  });
}

/// Running extremes that start at inf and -inf.
ModelPtr running_minimum() {
  return make_model(
      random_tensor({8, 8}),
      [](Model& model) {
        model.register_module("out", nn::Linear(8, 8));
        model.register_buffer("low", torch::full({8}, kInf));
        model.register_buffer("high", torch::full({8}, -kInf));
      },
      [](Model& model, const Tensor& x) {
        const Tensor y = to_float32(model.linear("out", x));
        const Tensor low = model.named_buffers()["low"], high = model.named_buffers()["high"];
        {
          const torch::NoGradGuard no_grad;
          low.copy_(torch::minimum(low, y.amin(0)));
          high.copy_(torch::maximum(high, y.amax(0)));
        }
        return ((y - low) / (high - low).clamp_min(1e-5)).square().mean();
      });
}

ModelPtr rms_norm() {
  return make_model(
      random_tensor({8, 8}),
      [](Model& model) {
        model.register_module("out", nn::Linear(8, 8));
        model.register_parameter("scale", torch::ones({8}));
      },
      [](Model& model, const Tensor& x) {
        const Tensor y = to_float32(model.linear("out", x));
        const Tensor normed = y * (y.square().mean(-1, true) + 1e-8).rsqrt();
        return (normed * model.named_parameters()["scale"] - 1).square().mean();
      });
}

Tensor rotated(const Tensor& x) {
  const std::int64_t length = x.size(0), width = x.size(1);
  const Tensor rates = torch::pow(10000.0, -to_float32(torch::arange(0, width, 2)) / width);
  const Tensor angles = to_float32(torch::arange(length)).unsqueeze(1) * rates;
  const Tensor cos = angles.cos().to(x.dtype()), sin = angles.sin().to(x.dtype());
  const Tensor even = x.slice(1, 0, width, 2), odd = x.slice(1, 1, width, 2);
  return torch::stack({even * cos - odd * sin, even * sin + odd * cos}, -1).flatten(1);
}

ModelPtr rotary() {
  return make_model(random_tensor({6, 8}), linears({"q", "k"}), [](Model& model, const Tensor& x) {
    const Tensor scores = rotated(model.linear("q", x)).mm(rotated(model.linear("k", x)).t());
    return scores.div(std::sqrt(8.0)).log_softmax(-1).diagonal().neg().mean();
  });
}

/// Label smoothing with an ignored label, and soft targets of 0.
ModelPtr smoothed_labels() {
  return make_model(random_tensor({8, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    const Tensor y = model.linear("out", x);
    const Tensor targets = to_float32(F::one_hot(torch::arange(8), 8));
    return F::cross_entropy(y, torch::tensor({0, 1, 2, 3, 4, -100, 1, 2}),
                            F::CrossEntropyFuncOptions().label_smoothing(0.1)) +
           F::kl_div(y.log_softmax(-1), targets,
                     F::KLDivFuncOptions().reduction(torch::kBatchMean));
  });
}

/// Logits of about 100, with sigmoids of 0 and 1.
ModelPtr saturated() {
  return make_model(
      random_tensor({8, 8}) * 100, linears({"out"}), [](Model& model, const Tensor& x) {
        const Tensor logits = model.linear("out", x);
        const auto weighted =
            F::BinaryCrossEntropyWithLogitsFuncOptions().pos_weight(torch::full({8}, 100.0F));
        return F::binary_cross_entropy_with_logits(logits, torch::ones({8, 8}), weighted);
      });
}

/// A logarithm guarded by torch::where.
ModelPtr guarded_logarithm() {
  return make_model(random_tensor({8, 8}), linears({"out"}), [](Model& model, const Tensor& x) {
    const Tensor y = to_float32(model.linear("out", x)).relu() + 0.01;
    const Tensor is_large = y > 0.02;
    const Tensor safe = torch::where(is_large, y, torch::ones_like(y));
    return torch::where(is_large, safe.log(), torch::zeros_like(safe)).square().mean();
  });
}

/// A class banned by -inf, a minimum loss that starts at inf, and a large counter.
ModelPtr banned_class() {
  return make_model(
      random_tensor({8, 8}),
      [](Model& model) {
        model.register_module("out", nn::Linear(8, 8));
        model.register_buffer("best", torch::tensor(kInf));
        model.register_buffer("words", torch::full({}, 3e6));
      },
      [](Model& model, const Tensor& x) {
        Tensor bias = torch::zeros({8});
        bias[3] = -kInf;
        const Tensor scores = to_float32(model.linear("out", x)) + bias;
        const Tensor loss =
            F::nll_loss(scores.log_softmax(-1), torch::tensor({0, 1, 2, 4, 5, 6, 7, 0}));
        const torch::NoGradGuard no_grad;
        model.named_buffers()["best"].copy_(torch::minimum(model.named_buffers()["best"], loss));
        model.named_buffers()["words"].add_(8);
        return loss;
      });
}

Tensor compute_loss(at::ScalarType dtype, Model& model) {
  const bool is_single = dtype == torch::kFloat;
  const mezzo::AutocastGuard autocast({.device_type = torch::kCPU,
                                       .dtype = is_single ? torch::kHalf : dtype,
                                       .enabled = !is_single});
  return to_float32(model.forward(model.sample)).mean();
}

/// Trains 30 steps with a DivergenceMonitor, and sets `scale` to the final loss scale.
std::string monitor_model(Model& model, at::ScalarType dtype, double& scale) {
  std::string output = kNothing;
  mezzo::MetricsLogger logger;
  logger.add_callback(mezzo::DivergenceMonitor(
      model,
      {.callback = [&output](const mezzo::Finding& finding) { output = finding.message(); }}));
  mezzo::GradScaler scaler({.init_scale = dtype == torch::kHalf ? 1024.0 : 1.0});
  scaler.on_skip(nullptr);
  mezzo::optim::AdamW optimizer(model.parameters(), 1e-3);
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const Tensor loss = compute_loss(dtype, model);
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer, mezzo::StepOptions{});
    scaler.update();
    logger.record(result, loss);
  }
  logger.flush();
  scale = scaler.get_scale();
  return output;
}

std::string trace_model(Model& model, at::ScalarType dtype, double scale) {
  const mezzo::AnomalyTrace trace(model, {.loss_scale = [scale] { return scale; }});
  (compute_loss(dtype, model) * scale).backward();
  const auto anomalies = trace.anomalies();
  return anomalies.empty() ? kNothing : anomalies.front().message();
}

std::string check_healthy_model(const ModelPtr& model, at::ScalarType dtype) {
  const auto report = mezzo::check_precision(model, model->sample, torch::kCPU, {.dtype = dtype});
  for (const auto& finding : report.findings) {
    const bool is_value_check = finding.check == "forward" || finding.check == "range";
    if (finding.severity == mezzo::FindingSeverity::note || !is_value_check) continue;
    return c10::str(to_string(finding.severity), " ", finding.location, ": ", finding.description);
  }
  return kNothing;
}

}  // namespace

std::vector<HealthyCase> healthy_model_cases() {
  const std::vector<std::pair<const char*, ModelPtr (*)()>> models = {
      {"GRU", recurrent},
      {"convolution, GroupNorm, BatchNorm and pooling", convolutional},
      {"attention with a mask of -inf", masked_attention},
      {"scaled_dot_product_attention", fused_attention},
      {"TransformerEncoder with padding", padded_encoder},
      {"EmbeddingBag with an empty bag", embedding_bag},
      {"mixture of experts", mixture_of_experts},
      {"variational autoencoder", variational},
      {"contrastive loss", contrastive},
      {"CTC", ctc},
      {"cosine losses, also of a zero vector", cosine},
      {"weight norm", weight_norm},
      {"spectral norm", spectral_norm},
      {"spectrum", spectrum},
      {"running minimum", running_minimum},
      {"manual RMSNorm", rms_norm},
      {"rotary embedding", rotary},
      {"label smoothing and soft targets", smoothed_labels},
      {"saturated logits", saturated},
      {"guarded logarithm", guarded_logarithm},
      {"banned class and large counter", banned_class},
  };
  std::vector<HealthyCase> cases;
  for (const auto& [name, make] : models) {
    for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      const std::string prefix = c10::str(name, " in ", dtype, ", ");
      const auto scale = std::make_shared<double>(1);
      cases.push_back(
          {prefix + "monitored", [=] { return monitor_model(*make(), dtype, *scale); }});
      cases.push_back({prefix + "traced", [=] { return trace_model(*make(), dtype, *scale); }});
      if (dtype == torch::kFloat) continue;  // check_precision needs a low-precision dtype
      cases.push_back({prefix + "checked", [=] { return check_healthy_model(make(), dtype); }});
    }
  }
  return cases;
}

}  // namespace diagnostics_test
