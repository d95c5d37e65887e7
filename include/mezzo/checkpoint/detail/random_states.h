#pragma once

#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/object_parts.h>
#include <mezzo/checkpoint/detail/sha256.h>
#include <mezzo/checkpoint/detail/value_parts.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

class RandomStatesPart final : public ArchivePart {
 public:
  const char* kind() const override { return "random states"; }

  /// Another number of ranks cannot go on where these stopped: each begins anew, from what all can
  /// compute alike.
  std::function<void()> decode_for_other_ranks(const ByteSource& source,
                                               const std::string& salt) const override {
    const std::string bytes = all_of(source) + salt;
    Sha256 sum;
    sum.add(bytes.data(), bytes.size());
    const Sha256Digest digest = sum.finish();
    const auto seed = number_at<std::uint64_t>(reinterpret_cast<const char*>(digest.data()));
    return [seed] {
      for (at::Generator& generator : default_generators(CudaDevices::all)) {
        const std::scoped_lock lock(generator.mutex());
        generator.set_current_seed(seed);
      }
    };
  }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    const std::vector<at::Generator> generators = default_generators(CudaDevices::all);
    archive.write("number", c10::IValue(static_cast<int64_t>(generators.size())));
    for (std::size_t i = 0; i < generators.size(); ++i) {
      archive.write(std::to_string(i), state_of(generators[i]), /*is_buffer=*/true);
    }
  }

  void take(torch::serialize::InputArchive& archive) const override {
    c10::IValue number;
    archive.read("number", number);
    std::vector<at::Tensor> states(static_cast<std::size_t>(number.toInt()));
    for (std::size_t i = 0; i < states.size(); ++i) {
      archive.read(std::to_string(i), states[i], /*is_buffer=*/true);
    }
    std::vector<at::Generator> generators = default_generators(CudaDevices::all);
    if (states.size() != generators.size()) {
      TORCH_WARN("The checkpoint has random states of ", states.size() - 1,
                 " CUDA devices, and here are ", generators.size() - 1,
                 ": devices without one go on with their own, and the run will not repeat bit for "
                 "bit what it would have been.");
    }
    for (std::size_t i = 0; i < std::min(states.size(), generators.size()); ++i) {
      set_state(generators[i], states[i].cpu());
    }
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
