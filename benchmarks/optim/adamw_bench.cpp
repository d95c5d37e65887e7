// Time from the end of backward to updated parameters: unscale, check for inf, clip at norm 1,
// AdamW, zero gradients. All variants have equal shapes and gradients, in separate memory. Rounds
// are interleaved, so that a slow machine slows all, and ratios are medians of each round's ratio.
//
//   mezzo    scaler.step(optimizer, {.max_norm = 1, .zero_grad = true})
//   8bit     AdamW8bit, whose gradients are unscaled and clipped before its step
//   bf16     mezzo with bfloat16 weights and moments, stochastic rounding: 18 bytes per parameter
//            instead of 36
//   split    bfloat16 weights with split masters: 30 bytes
//   master   bfloat16 weights with float32 masters: 34 bytes
//   bf16/8   AdamW8bit with bfloat16 weights
//   loop     today's C++ loop: foreach unscale, clip_grad_norm_, torch::optim::AdamW
//   chain    torch.amp's chain: foreach unscale, foreach norm, foreach mul, _fused_adamw_
//   folded   the fewest bytes that libtorch allows: foreach norm of scaled gradients, then
//            _fused_adamw_ with grad_scale = scale / clip and found_inf
//
// Each fused mezzo variant is compared with bare traffic of its bytes: a loop without computation
// that reads the gradients once, as the check does, then reads all arrays of the step, writes those
// that the step writes, and zeroes the gradients.
//
// Gradients are zeroed in place (memset), as flat buckets need it.
//
//   adamw_bench [rounds [name...]]    all variants, or those named

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shapes.h"

namespace {

using mezzo::optim::WeightStorage;

constexpr double kMaxNorm = 1.0;
constexpr double kScale = 65536.0;
constexpr double kLr = 1e-4;
constexpr double kDecay = 0.01;

std::vector<at::Tensor> parameters_of(const optim_bench::Model& model, at::ScalarType dtype) {
  at::manual_seed(1);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : model.shapes) {
    auto parameter = at::randn(shape).to(dtype);
    parameter.mutable_grad() = at::randn(shape).mul(kScale).to(dtype);
    parameters.push_back(parameter.requires_grad_());
  }
  return parameters;
}

/// A variant of a step.
class Peer {
 public:
  explicit Peer(const optim_bench::Model& model, at::ScalarType dtype = at::kFloat)
      : parameters_(parameters_of(model, dtype)) {
    for (const at::Tensor& parameter : parameters_) originals_.push_back(parameter.grad().clone());
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  virtual ~Peer() = default;

  /// Sets gradients as backward does; not timed.
  virtual void fill_gradients() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].mutable_grad().copy_(originals_[i]);
    }
  }
  virtual void step() = 0;

 protected:
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : parameters_) all.push_back(parameter.grad());
    return all;
  }

  std::vector<at::Tensor> parameters_;

 private:
  std::vector<at::Tensor> originals_;
};

class Mezzo : public Peer {
 public:
  Mezzo(const optim_bench::Model& model, at::ScalarType dtype, WeightStorage weights)
      : Peer(model, dtype),
        optimizer_(parameters_, mezzo::optim::AdamWOptions(kLr).weight_decay(kDecay),
                   {.weight_storage = weights}),
        scaler_({.init_scale = kScale}) {}
  void fill_gradients() override {
    Peer::fill_gradients();
    (void)scaler_.scale(at::zeros({}));
  }
  void step() override {
    scaler_.step(optimizer_, {.max_norm = kMaxNorm, .zero_grad = true});
    scaler_.update();
  }

 private:
  mezzo::optim::AdamW optimizer_;
  mezzo::GradScaler scaler_;
};

/// A torch optimizer: the scaler unscales, checks and clips before its step.
class In8Bits : public Peer {
 public:
  In8Bits(const optim_bench::Model& model, at::ScalarType dtype)
      : Peer(model, dtype),
        optimizer_(parameters_, torch::optim::AdamWOptions(kLr).weight_decay(kDecay)),
        scaler_({.init_scale = kScale}) {}
  void fill_gradients() override {
    Peer::fill_gradients();
    (void)scaler_.scale(at::zeros({}));
  }
  void step() override {
    scaler_.step(optimizer_, {.max_norm = kMaxNorm, .zero_grad = true});
    scaler_.update();
  }

 private:
  mezzo::optim::AdamW8bit optimizer_;
  mezzo::GradScaler scaler_;
};

/// Scale tensors for ATen's kernels.
class AtenPeer : public Peer {
 public:
  using Peer::Peer;

 protected:
  void unscale() {
    found_inf_.zero_();
    at::_amp_foreach_non_finite_check_and_unscale_(gradients(), found_inf_, scale_.reciprocal());
  }
  void update() { at::_amp_update_scale_(scale_, growth_tracker_, found_inf_, 2.0, 0.5, 2000); }
  bool overflowed() const { return found_inf_.item<float>() != 0; }

  at::Tensor scale_ = at::full({}, kScale);
  at::Tensor found_inf_ = at::zeros({});
  at::Tensor growth_tracker_ = at::zeros({}, at::kInt);
};

class Loop : public AtenPeer {
 public:
  explicit Loop(const optim_bench::Model& model)
      : AtenPeer(model),
        optimizer_(parameters_, torch::optim::AdamWOptions(kLr).weight_decay(kDecay)) {}
  void step() override {
    unscale();
    torch::nn::utils::clip_grad_norm_(parameters_, kMaxNorm);
    if (!overflowed()) optimizer_.step();
    update();
    optimizer_.zero_grad(/*set_to_none=*/false);
  }

 private:
  torch::optim::AdamW optimizer_;
};

class FusedKernel : public AtenPeer {
 public:
  explicit FusedKernel(const optim_bench::Model& model) : AtenPeer(model) {
    for (const at::Tensor& parameter : parameters_) {
      details_.push_back(parameter.detach());
      means_.push_back(at::zeros_like(details_.back()));
      squares_.push_back(at::zeros_like(details_.back()));
      steps_.push_back(at::zeros({}));
    }
  }

 protected:
  at::Tensor norm() const {
    const auto norms = at::_foreach_norm(gradients(), 2);
    return at::linalg_vector_norm(at::stack(norms), 2);
  }
  static at::Tensor clip(const at::Tensor& norm) {
    return (kMaxNorm / (norm + 1e-6)).clamp_max(1.0);
  }
  void adamw(const std::optional<at::Tensor>& grad_scale) {
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(details_, gradients(), means_, squares_, {}, steps_, kLr, 0.9, 0.999, kDecay,
                      1e-8, /*amsgrad=*/false, /*maximize=*/false, grad_scale, found_inf_);
  }

 private:
  std::vector<at::Tensor> details_, means_, squares_, steps_;
};

class Chain : public FusedKernel {
 public:
  using FusedKernel::FusedKernel;
  void step() override {
    unscale();
    at::_foreach_mul_(gradients(), clip(norm()));
    if (!overflowed()) adamw(std::nullopt);
    update();
    at::_foreach_zero_(gradients());
  }
};

class Folded : public FusedKernel {
 public:
  using FusedKernel::FusedKernel;
  void step() override {
    const at::Tensor inverse = scale_.reciprocal();
    const at::Tensor true_norm = norm() * inverse;
    found_inf_ = true_norm.isfinite().logical_not().to(at::kFloat);
    adamw(scale_ / clip(true_norm));
    update();
    at::_foreach_zero_(gradients());
  }
};

/// Arrays of one length and their bytes per element. The first is the gradient.
struct Arrays {
  std::vector<char*> data;
  std::vector<int64_t> bytes;
  int64_t count;
};

/// Adds the bits of the gradient to all other arrays, and zeroes it.
template <class Element, class Vec>
struct StreamKernel {
  C10_ALWAYS_INLINE static void run(const Arrays& arrays) {
    using Bits = typename Vec::Bits;
    constexpr int64_t kTileElements = Vec::kUnroll * Vec::kWidth;
    const auto vectors_of = [&](std::size_t k) C10_ALWAYS_INLINE_ATTRIBUTE {
      return arrays.bytes[k] * kTileElements / int64_t{sizeof(Bits)};
    };
    const auto at = [&](std::size_t k, int64_t i, int64_t v) C10_ALWAYS_INLINE_ATTRIBUTE {
      return reinterpret_cast<typename Vec::Stored*>(arrays.data[k] + i * arrays.bytes[k] +
                                                     v * int64_t{sizeof(Bits)});
    };
    const Bits zero{};
    for (int64_t i = 0; i + kTileElements <= arrays.count; i += kTileElements) {
      Bits sum{};
      for (int64_t v = 0; v < vectors_of(0); ++v) {
        Vec::load(at(0, i, v), sum);
        Vec::store(zero, at(0, i, v));
      }
      for (std::size_t k = 1; k < arrays.data.size(); ++k) {
        for (int64_t v = 0; v < vectors_of(k); ++v) {
          Bits bits;
          Vec::load(at(k, i, v), bits);
          sum = sum + bits;
          Vec::store(sum, at(k, i, v));
        }
      }
    }
  }
};

template <class Element, class Vec>
struct ReadKernel {
  C10_ALWAYS_INLINE static bool run(const char* data, int64_t bytes) {
    typename Vec::Bits all{};
    for (int64_t i = 0; i + int64_t{sizeof(all)} <= bytes; i += int64_t{sizeof(all)}) {
      typename Vec::Bits bits;
      Vec::load(reinterpret_cast<const typename Vec::Stored*>(data + i), bits);
      all = all | bits;
    }
    typename Vec::Mask mask;
    mezzo::detail::reinterpret_bits(all, mask);
    return Vec::any(mask);
  }
};

/// The memory traffic of a step on arrays of these bytes per element, the first of them the
/// gradient.
class BareTraffic {
#if defined(__GNUC__) && defined(__x86_64__)
  // Not mezzo::detail::kernel_for_isa, which tunes for loops with constants.
  template <int kBytes>
  using FloatVec = mezzo::detail::SimdVec<float, kBytes>;
  __attribute__((target("avx512f,avx512bw"))) static bool read_avx512(const char* data, int64_t n) {
    return ReadKernel<float, FloatVec<64>>::run(data, n);
  }
  __attribute__((target("avx2"))) static bool read_avx2(const char* data, int64_t n) {
    return ReadKernel<float, FloatVec<32>>::run(data, n);
  }
  __attribute__((target("avx512f,avx512bw"))) static void stream_avx512(const Arrays& arrays) {
    StreamKernel<float, FloatVec<64>>::run(arrays);
  }
  __attribute__((target("avx2"))) static void stream_avx2(const Arrays& arrays) {
    StreamKernel<float, FloatVec<32>>::run(arrays);
  }
#endif
  static auto kernels() {
    using mezzo::detail::CpuIsa;
    const CpuIsa isa = mezzo::detail::best_isa();
    auto read = mezzo::detail::kernel_for_isa<ReadKernel, float>(isa);
    auto stream = mezzo::detail::kernel_for_isa<StreamKernel, float>(isa);
#if defined(__GNUC__) && defined(__x86_64__)
    if (isa == CpuIsa::avx512) read = &read_avx512, stream = &stream_avx512;
    if (isa == CpuIsa::avx2) read = &read_avx2, stream = &stream_avx2;
#endif
    return std::pair(read, stream);
  }

 public:
  BareTraffic(const optim_bench::Model& model, const std::vector<int64_t>& bytes) {
    for (const auto& shape : model.shapes) {
      const int64_t count = c10::multiply_integers(shape);
      Arrays all{{}, bytes, count};
      for (const int64_t each : bytes) {
        memory_.push_back(at::zeros({count * each}, at::kByte));
        all.data.push_back(static_cast<char*>(memory_.back().data_ptr()));
      }
      for (int64_t begin = 0; begin < count; begin += kChunkElements) {
        Arrays chunk = all;
        chunk.count = std::min(kChunkElements, count - begin);
        for (std::size_t k = 0; k < bytes.size(); ++k) chunk.data[k] += begin * bytes[k];
        chunks_.push_back(std::move(chunk));
      }
    }
  }

  static double bytes_of_element(const std::vector<int64_t>& bytes) {
    int64_t sum = bytes[0];
    for (const int64_t each : bytes) sum += 2 * each;
    return static_cast<double>(sum);
  }

  void step() const {
    const auto [read, stream] = kernels();
    const auto for_each = [this](const auto& work) {
      mezzo::detail::parallel_dynamic(static_cast<int64_t>(chunks_.size()), [&](int64_t i) {
        work(chunks_[static_cast<std::size_t>(i)]);
      });
    };
    for_each([&](const Arrays& chunk) { read(chunk.data[0], chunk.count * chunk.bytes[0]); });
    for_each(stream);
  }

 private:
  static constexpr int64_t kChunkElements = 131072;
  std::vector<at::Tensor> memory_;
  std::vector<Arrays> chunks_;
};

/// Returns the CPU name of /proc/cpuinfo.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(": ") + 2);
  }
  return "unknown CPU";
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <class Work>
double milliseconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double median_ratio(const std::vector<double>& times, const std::vector<double>& base) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < times.size(); ++i) ratios.push_back(times[i] / base[i]);
  return median(ratios);
}

void compare(const optim_bench::Model& model, int rounds, const std::vector<std::string>& names) {
  struct Row {
    const char* name;
    std::unique_ptr<Peer> peer;
    std::vector<int64_t>
        bytes;  // per element of its arrays; empty: no comparison with bare traffic
    std::unique_ptr<BareTraffic> bare;
    std::vector<double> times;
    std::vector<double> bare_times;
  };
  std::vector<Row> rows;
  const auto add = [&](const char* name, const auto& make, std::vector<int64_t> bytes = {}) {
    const bool is_named = std::find(names.begin(), names.end(), name) != names.end();
    if (!names.empty() && !is_named) return;
    rows.push_back({name, make(), std::move(bytes), nullptr, {}, {}});
    Row& row = rows.back();
    if (!row.bytes.empty()) row.bare = std::make_unique<BareTraffic>(model, row.bytes);
  };
  const auto mezzo = [&](at::ScalarType dtype, WeightStorage weights) {
    return [&model, dtype, weights] { return std::make_unique<Mezzo>(model, dtype, weights); };
  };
  const auto in_8_bits = [&](at::ScalarType dtype) {
    return [&model, dtype] { return std::make_unique<In8Bits>(model, dtype); };
  };
  add("mezzo", mezzo(at::kFloat, WeightStorage::plain), {4, 4, 4, 4});
  add("8bit", in_8_bits(at::kFloat));
  add("bf16", mezzo(at::kBFloat16, WeightStorage::stochastic_rounding), {2, 2, 2, 2});
  add("split", mezzo(at::kBFloat16, WeightStorage::split_master), {2, 2, 2, 4, 4});
  add("master", mezzo(at::kBFloat16, WeightStorage::fp32_master), {2, 2, 4, 4, 4});
  add("bf16/8", in_8_bits(at::kBFloat16));
  add("loop", [&] { return std::make_unique<Loop>(model); });
  add("chain", [&] { return std::make_unique<Chain>(model); });
  add("folded", [&] { return std::make_unique<Folded>(model); });
  for (int round = -2; round < rounds; ++round) {
    for (Row& row : rows) {
      row.peer->fill_gradients();
      const double time = milliseconds([&] { row.peer->step(); });
      const double bare_time = row.bare ? milliseconds([&] { row.bare->step(); }) : 0.0;
      if (round < 0) continue;
      row.times.push_back(time);
      row.bare_times.push_back(bare_time);
    }
  }
  int64_t parameters = 0;
  for (const auto& shape : model.shapes) parameters += c10::multiply_integers(shape);
  std::printf("%s: %.1f M parameters in %zu tensors\n", model.name.c_str(),
              static_cast<double>(parameters) / 1e6, model.shapes.size());
  for (const Row& row : rows) {
    std::printf("  %-7s %9.3f ms   x%6.2f of %s's   (best %.3f ms)", row.name, median(row.times),
                median_ratio(row.times, rows[0].times), rows[0].name,
                *std::min_element(row.times.begin(), row.times.end()));
    if (row.bare) {
      const double bytes = BareTraffic::bytes_of_element(row.bytes);
      std::printf("   x%5.2f of bare traffic: %.0f bytes a parameter at %.1f GB/s",
                  median_ratio(row.times, row.bare_times), bytes,
                  bytes * static_cast<double>(parameters) / median(row.bare_times) / 1e6);
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  std::printf("%s, %s, %d threads, %d rounds\n", cpu_name().c_str(),
              at::get_cpu_capability().c_str(), at::get_num_threads(), rounds);
  const std::vector<std::string> names(argv + std::min(argc, 2), argv + argc);
  compare(optim_bench::bert("encoder", 30522, 6, 384), rounds, names);
  compare(optim_bench::tiny_tensors(2000, 64), rounds * 5, names);
  compare(optim_bench::tiny_tensors(2000, 1000), rounds * 5, names);
  compare(optim_bench::bert("BERT-base", 30522, 12, 768), rounds, names);
  return 0;
}
