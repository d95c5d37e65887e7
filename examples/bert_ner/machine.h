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

/// Sets what libraries read from the environment, unless the user did. Call it before the first op
/// and before other threads run.
/// - ONEDNN_PRIMITIVE_CACHE_CAPACITY, how many kernels oneDNN keeps. Its own bound is 1,024, which
///   batches of many lengths fill, with a quarter of a MiB each and more.
/// - GOMP_SPINCOUNT, how often libgomp's threads look before they sleep. Its own 300,000 times
///   waste the cores that they wait for, where another program has some. libgomp reads it when it is
///   loaded, so that it holds in processes that this one starts: the rows of the table.
/// - MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, in this process: malloc keeps what large
///   tensors leave for the next step, and does not give it back to the kernel.
void set_library_defaults();

/// Cores that this process may run on.
int cores_of_this_process();

/// Whether this device multiplies float16 with instructions of its own.
bool has_float16(torch::Device device);

/// What autocast does in a row of the table. `MEZZO_AUTOCAST` (off, bf16, fp16, auto) has the last
/// word on those that use it; otherwise the device's default, bfloat16 on CPU and float16 on CUDA.
mezzo::AutocastSetting setting_for(Precision precision, torch::Device device);

/// "off", "bfloat16", "float16"
std::string describe(const mezzo::AutocastSetting& setting);

/// What its ops compute in: what it says, or the device's default.
torch::Dtype dtype_of(const mezzo::AutocastSetting& setting);

/// The most memory this process has held: on the CPU its resident set, libraries and mapped files
/// included; on CUDA what libtorch's allocator gave out to tensors.
int64_t peak_memory_bytes(torch::Device device);

/// Gives back what is free, and has peak_memory_bytes begin anew with what is left: libraries,
/// mapped files, and what they keep for later.
void restart_peak_memory(torch::Device device);

}  // namespace bert_ner
