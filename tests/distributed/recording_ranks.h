// A communicator that tells of the collectives that it passes on.
#pragma once

#include <ATen/ATen.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/collective_call.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace distributed_test {

class RecordingRanks {
 public:
  /// Hears of each collective as it begins, an all-reduce by its reduction, and of the tensor: of
  /// an input and an output the one that is all ranks' together; of a barrier none.
  using Listener = std::function<void(const std::string& collective, const at::Tensor& tensor)>;

  RecordingRanks(mezzo::AnyCommunicator inner, Listener listener)
      : inner_(std::move(inner)), listener_(std::move(listener)) {}
  /// Writes the names down.
  RecordingRanks(mezzo::AnyCommunicator inner, std::vector<std::string>& log)
      : RecordingRanks(std::move(inner), [&log](const std::string& collective, const at::Tensor&) {
          log.push_back(collective);
        }) {}
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  bool serves(c10::DeviceType device) const { return inner_.serves(device); }
  mezzo::Work all_reduce(const at::Tensor& tensor, mezzo::Reduction reduction) {
    listener_(mezzo::detail::name_of(reduction), tensor);
    return inner_.all_reduce(tensor, reduction);
  }
  mezzo::Work broadcast(const at::Tensor& tensor, int root) {
    listener_("broadcast", tensor);
    return inner_.broadcast(tensor, root);
  }
  mezzo::Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    listener_("all_gather", output);
    return inner_.all_gather(output, input);
  }
  mezzo::Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                             mezzo::Reduction reduction) {
    listener_("reduce_scatter", input);
    return inner_.reduce_scatter(output, input, reduction);
  }
  mezzo::Work barrier() {
    listener_("barrier", at::Tensor());
    return inner_.barrier();
  }

 private:
  mezzo::AnyCommunicator inner_;
  Listener listener_;
};

}  // namespace distributed_test
