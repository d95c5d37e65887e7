/// \file
/// The device a run is on: chosen, described and measured.
#pragma once

#include <mezzo/autocast/autocast_setting.h>

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "options.h"

namespace bert_ner {

/// The device "cpu" or "cuda". \throws InputError where there is no CUDA device, with what to do
torch::Device find_device(const std::string& name);

/// Sets libtorch's number of threads. 0 leaves its own choice.
void set_threads(int threads);

/// Sets ONEDNN_PRIMITIVE_CACHE_CAPACITY, GOMP_SPINCOUNT and malloc's thresholds, unless the user
/// has set them (benchmarks/results/bert_ner.md). Call it before the first op and before other
/// threads run. libgomp reads its variable when it is loaded, so it holds in the rows of the table.
void set_library_defaults();

/// Whether this device has instructions for float16 products.
bool has_float16(torch::Device device);

/// Autocast for a row of the table. In rows that use it, `MEZZO_AUTOCAST` (off, bf16, fp16, auto)
/// decides; if it is unset, the device's default: bfloat16 on CPU, float16 on CUDA.
mezzo::AutocastSetting setting_for(Precision precision, torch::Device device);

/// "off", "bfloat16", "float16"
std::string describe(const mezzo::AutocastSetting& setting);

/// The dtype that ops compute in: the setting's, or the device's default.
torch::Dtype dtype_of(const mezzo::AutocastSetting& setting);

/// Peak memory of this process, in bytes: on the CPU its resident set, with libraries and mapped
/// files; on CUDA what libtorch's allocator gave to tensors.
int64_t peak_memory_bytes(torch::Device device);

}  // namespace bert_ner
