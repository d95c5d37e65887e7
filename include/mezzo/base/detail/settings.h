/// \file
/// Reads and writes libtorch's settings for matrix products exactly.
///
/// libtorch has two layers of settings. The newer one is a table over (backend, op) whose entries
/// may be NONE and then inherit: an op from its backend's ALL, and ALL from GENERIC. Its getter
/// returns only the inherited result. The older one is a value and a flag beside the table; its
/// setters write to the table as well, and its getters throw if the table disagrees. Reading an
/// entry therefore requires writing: its parents are set to NONE before the entry is read.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/Context.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <optional>
#include <thread>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct Float32Entry {
  at::Float32Backend backend;
  at::Float32Op op;
};

/// All entries of the table, parents before children.
inline constexpr std::array<Float32Entry, 9> kFloat32Entries = {
    {{at::Float32Backend::GENERIC, at::Float32Op::ALL},
     {at::Float32Backend::CUDA, at::Float32Op::ALL},
     {at::Float32Backend::MKLDNN, at::Float32Op::ALL},
     {at::Float32Backend::CUDA, at::Float32Op::MATMUL},
     {at::Float32Backend::CUDA, at::Float32Op::CONV},
     {at::Float32Backend::CUDA, at::Float32Op::RNN},
     {at::Float32Backend::MKLDNN, at::Float32Op::MATMUL},
     {at::Float32Backend::MKLDNN, at::Float32Op::CONV},
     {at::Float32Backend::MKLDNN, at::Float32Op::RNN}}};

using Float32Table = std::array<at::Float32Precision, kFloat32Entries.size()>;

inline void write_float32_table(at::Context& context, const Float32Table& table) {
  for (std::size_t i = 0; i < table.size(); ++i) {
    context.setFloat32Precision(kFloat32Entries[i].backend, kFloat32Entries[i].op, table[i]);
  }
}

/// Returns the entries, and sets all of them to NONE.
inline Float32Table take_float32_table(at::Context& context) {
  Float32Table table{};
  for (std::size_t i = 0; i < table.size(); ++i) {
    const auto [backend, op] = kFloat32Entries[i];
    table[i] = context.float32Precision(backend, op);
    context.setFloat32Precision(backend, op, at::Float32Precision::NONE);
  }
  return table;
}

inline const char* matmul_precision_name(at::Float32MatmulPrecision precision) {
  switch (precision) {
    case at::Float32MatmulPrecision::HIGHEST:
      return "highest";
    case at::Float32MatmulPrecision::HIGH:
      return "high";
    default:
      return "medium";
  }
}

inline void set_cudnn_table(at::Context& context, at::Float32Precision precision) {
  context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV, precision);
  context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::RNN, precision);
}

/// Returns the older layer's flag for cuDNN. Its getter throws unless the table agrees with it.
inline bool take_cudnn_flag(at::Context& context) {
  set_cudnn_table(context, at::Float32Precision::TF32);
  try {
    return context.allowTF32CuDNN();
  } catch (const c10::Error&) {
    return false;
  }
}

/// A snapshot of every setting that a guard may change.
class MatmulSettings {
 public:
  static MatmulSettings read(at::Context& context) {
    MatmulSettings settings;
    settings.table_ = take_float32_table(context);
    settings.float32_ = context.float32MatmulPrecision();  // does not throw: the table is empty
    settings.cudnn_ = take_cudnn_flag(context);
    settings.fp16_reduction_ = context.allowFP16ReductionCuBLAS();
    settings.bf16_reduction_ = context.allowBF16ReductionCuBLAS();
    settings.fp16_accumulation_ = context.allowFP16AccumulationCuBLAS();
    write_float32_table(context, settings.table_);
    return settings;
  }

  void write(at::Context& context) const {
    context.setFloat32MatmulPrecision(matmul_precision_name(float32_));
    context.setAllowTF32CuDNN(cudnn_);
    write_float32_table(context, table_);  // last, since both setters above write to the table
    context.setAllowFP16ReductionCuBLAS(is_reduced(fp16_reduction_), splits(fp16_reduction_));
    context.setAllowBF16ReductionCuBLAS(is_reduced(bf16_reduction_), splits(bf16_reduction_));
    context.setAllowFP16AccumulationCuBLAS(fp16_accumulation_);
  }

 private:
  static bool is_reduced(at::CuBLASReductionOption option) {
    return option == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  }
  static bool splits(at::CuBLASReductionOption option) {
    return option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK;
  }

  Float32Table table_{};
  at::Float32MatmulPrecision float32_{};
  bool cudnn_ = false;
  at::CuBLASReductionOption fp16_reduction_{};
  at::CuBLASReductionOption bf16_reduction_{};
  bool fp16_accumulation_ = false;
};

inline void set_float32_matmul(at::Context& context,
                               std::optional<at::Float32MatmulPrecision> precision) {
  if (!precision) return;
  context.setFloat32MatmulPrecision(matmul_precision_name(*precision));
  if (*precision != at::Float32MatmulPrecision::HIGHEST) return;
  // Set explicitly: some versions leave these entries at NONE, and they would then inherit.
  for (const auto backend : {at::Float32Backend::CUDA, at::Float32Backend::MKLDNN}) {
    context.setFloat32Precision(backend, at::Float32Op::MATMUL, at::Float32Precision::IEEE);
  }
}

inline void set_cudnn_tf32(at::Context& context, std::optional<bool> allowed) {
  if (!allowed) return;
  context.setAllowTF32CuDNN(*allowed);
  set_cudnn_table(context, *allowed ? at::Float32Precision::TF32 : at::Float32Precision::IEEE);
}

inline void set_cublas(at::Context& context, std::optional<bool> fp16_reduction,
                       std::optional<bool> bf16_reduction, std::optional<bool> fp16_accumulation) {
  if (fp16_reduction) context.setAllowFP16ReductionCuBLAS(*fp16_reduction);
  if (bf16_reduction) context.setAllowBF16ReductionCuBLAS(*bf16_reduction);
  if (fp16_accumulation) context.setAllowFP16AccumulationCuBLAS(*fp16_accumulation);
}

/// The thread that may change the settings; only one at a time.
struct MatmulPrecisionOwner {
  std::mutex mutex{};
  std::thread::id thread{};
  int depth = 0;
};

/// The process's owner. Exported and never destroyed, since the settings belong to the process.
C10_EXPORT inline MatmulPrecisionOwner& matmul_precision_owner() {
  static MatmulPrecisionOwner& owner = *new MatmulPrecisionOwner;
  return owner;
}

class MatmulPrecisionTurn {
 public:
  MatmulPrecisionTurn() {
    MatmulPrecisionOwner& owner = matmul_precision_owner();
    const std::lock_guard lock(owner.mutex);
    TORCH_CHECK(owner.depth == 0 || owner.thread == std::this_thread::get_id(),
                "MatmulPrecisionGuard: another thread holds one, and the settings are the "
                "process's; hold one guard around all threads' work instead");
    owner.thread = std::this_thread::get_id();
    ++owner.depth;
  }
  MatmulPrecisionTurn(const MatmulPrecisionTurn&) = delete;
  MatmulPrecisionTurn& operator=(const MatmulPrecisionTurn&) = delete;
  ~MatmulPrecisionTurn() {
    MatmulPrecisionOwner& owner = matmul_precision_owner();
    const std::lock_guard lock(owner.mutex);
    --owner.depth;
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
