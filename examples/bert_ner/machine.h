/// \file
/// The device a run is on: chosen, described and measured.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "options.h"

namespace bert_ner {

/// "cpu" or "cuda", of whose devices number `index`. \throws InputError where there is no CUDA
/// device, with what to do
torch::Device find_device(const std::string& name, int index = 0);

/// Sets libtorch's number of threads. 0 leaves its own choice; of several processes on this machine
/// each then takes its part of the cores, unless OMP_NUM_THREADS says otherwise.
void set_threads(int threads, int processes = 1);

/// What autocast does in a row of the table. `MEZZO_AUTOCAST` (off, bf16, fp16, auto) has the last
/// word on those that use it; otherwise the device's default, bfloat16 on CPU and float16 on CUDA.
mezzo::AutocastSetting setting_for(Precision precision, torch::Device device);

/// "off", "bfloat16", "float16"
std::string describe(const mezzo::AutocastSetting& setting);

/// The most memory this process has held: on the CPU its resident set, libraries and mapped files
/// included; on CUDA what libtorch's allocator gave out to tensors.
int64_t peak_memory_bytes(torch::Device device);

/// Gives back what is free, and has peak_memory_bytes begin anew with what is left: libraries,
/// mapped files, and what they keep for later.
void restart_peak_memory(torch::Device device);

}  // namespace bert_ner
