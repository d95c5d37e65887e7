// What a step with moments of 8 bits computes, without the memory that it waits for.
//
//   block8_bench
//
// One thread, 16,384 elements in its cache, AdamW: nanoseconds an element for the conversions and
// for a step with moments of either format, on each instruction set. Each is the least of many
// runs, so that what else the machine does hardly counts.

#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/optimizer_step_cpu.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>

namespace {

using mezzo::detail::AdamRule;
using mezzo::detail::CpuIsa;
using mezzo::optim::WeightStorage;

constexpr int64_t kElements = mezzo::detail::kStepPiece;

template <class Work>
double nanoseconds(const Work& work) {
  double least = 1e9;
  for (int run = 0; run < 3000; ++run) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    least = std::min(least, time.count());
  }
  return least / static_cast<double>(kElements);
}

/// A moment in both formats.
struct Moment {
  Moment(const at::Tensor& from, bool is_signed)
      : values(from),
        codes(at::empty({kElements}, at::kByte)),
        scales(at::empty({mezzo::detail::blocks8_of(kElements)})) {
    mezzo::detail::narrow_block8(is_signed, values.const_data_ptr<float>(), data(),
                                 scales.mutable_data_ptr<float>(), kElements);
  }
  uint8_t* data() { return codes.mutable_data_ptr<uint8_t>(); }

  at::Tensor values, codes, scales;
};

double conversions(Moment& moment, bool is_signed, bool is_back, CpuIsa isa) {
  float* const values = moment.values.mutable_data_ptr<float>();
  float* const scales = moment.scales.mutable_data_ptr<float>();
  return nanoseconds([&] {
    if (is_back) {
      mezzo::detail::narrow_block8(is_signed, values, moment.data(), scales, kElements, isa);
    } else {
      mezzo::detail::widen_block8(is_signed, moment.data(), scales, values, kElements, isa);
    }
  });
}

/// A step of a parameter of floats, or of bfloat16 that is rounded stochastically.
double step(at::ScalarType dtype, bool is_in_blocks) {
  const bool is_float = dtype == at::kFloat;
  const auto storage = is_float ? WeightStorage::plain : WeightStorage::stochastic;
  const at::Tensor parameter = at::randn({kElements}).to(dtype);
  const at::Tensor gradient = at::randn({kElements}).to(dtype);
  Moment moments[] = {{at::randn({kElements}), true}, {at::randn({kElements}).square(), false}};
  const at::Tensor own[] = {moments[0].values.to(dtype), moments[1].values.to(dtype)};
  const bool is_bare = is_in_blocks && !is_float;
  mezzo::detail::StepTask task{};
  task.loop = mezzo::detail::step_loop<AdamRule<false>>(is_bare ? WeightStorage::plain : storage,
                                                        is_bare ? at::kFloat : dtype,
                                                        mezzo::detail::best_isa());
  task.span = {parameter.data_ptr(), gradient.data_ptr(), {}, kElements};
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
  return nanoseconds([&] {
    mezzo::detail::for_widened<mezzo::detail::kWidenedAtOnce>(
        task, 0, kElements, [&](const mezzo::detail::StepSpan& part) {
          task.loop.step(part, task.coefficients, task.use);
        });
  });
}

}  // namespace

int main() {
  Moment first(at::randn({kElements}), true);
  Moment second(at::randn({kElements}).square(), false);
  std::printf("nanoseconds an element, one thread\n%-12s%14s%14s%14s%14s\n", "", "widen first",
              "widen second", "narrow first", "narrow second");
  for (const CpuIsa isa : {CpuIsa::vector128, CpuIsa::avx2, CpuIsa::avx512}) {
    if (!mezzo::detail::has_isa(isa)) continue;
    std::printf("isa %-8d%14.3f%14.3f%14.3f%14.3f\n", static_cast<int>(isa),
                conversions(first, true, false, isa), conversions(second, false, false, isa),
                conversions(first, true, true, isa), conversions(second, false, true, isa));
  }
  std::printf("\n%-24s%14s%14s\n", "AdamW's step", "own moments", "8 bits");
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    std::printf("%-24s%14.3f%14.3f\n", dtype == at::kFloat ? "float" : "bfloat16, stochastic",
                step(dtype, false), step(dtype, true));
  }
  return 0;
}
