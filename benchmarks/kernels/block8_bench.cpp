// What a step with moments of 8 bits computes, and how much of the memory it waits for.
//
//   block8_bench
//
// One thread, AdamW, pieces of 16,384 elements: nanoseconds an element for the conversions on each
// instruction set, and for a step with moments of either format, of a piece in the cache and of
// pieces that come from memory. A tenth of the runs are faster than what is printed, so that what
// else the machine does hardly counts.

#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/optimizer_step_cpu.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

using mezzo::detail::AdamRule;
using mezzo::detail::CpuIsa;
using mezzo::optim::WeightStorage;

constexpr int64_t kPiece = mezzo::detail::kStepPiece;
constexpr int64_t kInMemory = int64_t{1} << 25;

/// Calls `work(begin)` for pieces of `elements`, several times for few.
template <class Work>
double nanoseconds(int64_t elements, const Work& work) {
  std::vector<double> times;
  for (int64_t run = 0; run < std::max<int64_t>(3000, elements / kPiece); ++run) {
    const auto start = std::chrono::steady_clock::now();
    work(run * kPiece % elements);
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    times.push_back(time.count() / static_cast<double>(kPiece));
  }
  const auto tenth = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 10);
  std::nth_element(times.begin(), tenth, times.end());
  return *tenth;
}

/// A moment in both formats.
struct Moment {
  Moment(const at::Tensor& from, bool is_signed)
      : values(from),
        codes(at::empty(from.sizes(), at::kByte)),
        scales(at::empty({mezzo::detail::blocks8_of(from.numel())})) {
    mezzo::detail::narrow_block8(is_signed, values.const_data_ptr<float>(), data(),
                                 scales.mutable_data_ptr<float>(), values.numel());
  }
  uint8_t* data() { return codes.mutable_data_ptr<uint8_t>(); }

  at::Tensor values, codes, scales;
};

double conversions(Moment& moment, bool is_signed, bool is_back, CpuIsa isa) {
  float* const values = moment.values.mutable_data_ptr<float>();
  float* const scales = moment.scales.mutable_data_ptr<float>();
  return nanoseconds(kPiece, [&](int64_t) {
    if (is_back) {
      mezzo::detail::narrow_block8(is_signed, values, moment.data(), scales, kPiece, isa);
    } else {
      mezzo::detail::widen_block8(is_signed, moment.data(), scales, values, kPiece, isa);
    }
  });
}

/// A step of a parameter of floats, or of bfloat16 that is rounded stochastically.
double step(at::ScalarType dtype, bool is_in_blocks, int64_t elements) {
  const bool is_float = dtype == at::kFloat;
  const auto storage = is_float ? WeightStorage::plain : WeightStorage::stochastic;
  const at::Tensor parameter = at::randn({elements}).to(dtype);
  const at::Tensor gradient = at::randn({elements}).to(dtype);
  Moment moments[] = {{at::randn({elements}), true}, {at::randn({elements}).square(), false}};
  const at::Tensor own[] = {moments[0].values.to(dtype), moments[1].values.to(dtype)};
  const bool is_bare = is_in_blocks && !is_float;
  mezzo::detail::StepTask task{};
  task.loop = mezzo::detail::step_loop<AdamRule<false>>(is_bare ? WeightStorage::plain : storage,
                                                        is_bare ? at::kFloat : dtype,
                                                        mezzo::detail::best_isa());
  task.span = {parameter.data_ptr(), gradient.data_ptr(), {}, elements};
  const auto size = static_cast<int64_t>(parameter.element_size());
  task.sizes = {.parameter = size, .gradient = size, .moment = is_in_blocks ? 1 : size};
  for (int k = 0; k < 2; ++k) {
    task.span.moments[k] = is_in_blocks ? moments[k].data() : own[k].data_ptr();
    if (is_in_blocks) task.scales[k] = moments[k].scales.mutable_data_ptr<float>();
  }
  task.gradient_dtype = dtype;
  task.widens = !is_float;
  task.is_staged = is_in_blocks;
  task.is_stochastic = !is_float;
  if (is_bare) task.parameter_dtype = dtype;
  task.coefficients = mezzo::detail::AdamConstants{0.9, 0.999, 1e-8, 0.01, true}.at(1e-4, 10);
  return nanoseconds(elements, [&](int64_t begin) {
    mezzo::detail::for_widened<mezzo::detail::kWidenedAtOnce>(
        task, begin, kPiece, [&](const mezzo::detail::StepSpan& part) {
          task.loop.step(part, task.coefficients, task.use);
        });
  });
}

}  // namespace

int main() {
  Moment first(at::randn({kPiece}), true);
  Moment second(at::randn({kPiece}).square(), false);
  std::printf("nanoseconds an element, one thread\n%-12s%14s%14s%14s%14s\n", "", "widen first",
              "widen second", "narrow first", "narrow second");
  for (const CpuIsa isa : {CpuIsa::vector128, CpuIsa::avx2, CpuIsa::avx512}) {
    if (!mezzo::detail::has_isa(isa)) continue;
    std::printf("isa %-8d%14.3f%14.3f%14.3f%14.3f\n", static_cast<int>(isa),
                conversions(first, true, false, isa), conversions(second, false, false, isa),
                conversions(first, true, true, isa), conversions(second, false, true, isa));
  }
  std::printf("\n%-34s%14s%14s\n", "AdamW's step", "own moments", "8 bits");
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t elements : {kPiece, kInMemory}) {
      std::printf("%-22s%-12s%14.3f%14.3f\n",
                  dtype == at::kFloat ? "float" : "bfloat16, stochastic",
                  elements == kPiece ? "in cache" : "in memory", step(dtype, false, elements),
                  step(dtype, true, elements));
    }
  }
  return 0;
}
