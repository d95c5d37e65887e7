#pragma once

#include <c10/cuda/CUDAFunctions.h>

namespace cuda_test {

/// Every call that would wait for the device throws while this lives.
class ForbidSync {
 public:
  ForbidSync() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  }
  ~ForbidSync() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }
  ForbidSync(const ForbidSync&) = delete;
  ForbidSync& operator=(const ForbidSync&) = delete;
};

}  // namespace cuda_test
