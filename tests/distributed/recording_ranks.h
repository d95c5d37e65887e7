// A communicator that tells of the collectives that it passes on.
#pragma once

#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/collective_log.h>

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace distributed_test {

class RecordingRanks : public mezzo::Communicator {
 public:
  /// Hears of each collective as it begins, an all-reduce by its reduction, and of the tensor: of
  /// an input and an output the one that is all ranks' together; of a barrier none.
  using Listener = std::function<void(const std::string& collective, const at::Tensor& tensor)>;

  RecordingRanks(mezzo::Communicator inner, Listener listener)
      : Communicator(std::make_shared<Backend>(std::move(inner), std::move(listener))) {}
  /// Writes the names down.
  RecordingRanks(mezzo::Communicator inner, std::vector<std::string>& log)
      : RecordingRanks(std::move(inner), [&log](const std::string& collective, const at::Tensor&) {
          log.push_back(collective);
        }) {}

 private:
  class Backend : public mezzo::CommunicatorBackend {
   public:
    Backend(mezzo::Communicator inner, Listener listener)
        : inner_(std::move(inner)), listener_(std::move(listener)) {}
    int rank() const override { return inner_.rank(); }
    int size() const override { return inner_.size(); }
    bool serves(c10::DeviceType device) const override { return inner_.serves(device); }
    mezzo::Work all_reduce(const at::Tensor& tensor, mezzo::Reduction reduction) override {
      listener_(mezzo::detail::name_of(reduction), tensor);
      return inner_.all_reduce(tensor, reduction);
    }
    mezzo::Work broadcast(const at::Tensor& tensor, int root) override {
      listener_("broadcast", tensor);
      return inner_.broadcast(tensor, root);
    }
    mezzo::Work all_gather(const at::Tensor& output, const at::Tensor& input) override {
      listener_("all_gather", output);
      return inner_.all_gather(output, input);
    }
    mezzo::Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                               mezzo::Reduction reduction) override {
      listener_("reduce_scatter", input);
      return inner_.reduce_scatter(output, input, reduction);
    }
    mezzo::Work barrier() override {
      listener_("barrier", at::Tensor());
      return inner_.barrier();
    }

   private:
    mezzo::Communicator inner_;
    Listener listener_;
  };
};

}  // namespace distributed_test
