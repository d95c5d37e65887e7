// A communicator that writes down the collectives that it passes on.
#pragma once

#include <ATen/ATen.h>
#include <mezzo/distributed/communicator.h>

#include <string>
#include <utility>
#include <vector>

namespace distributed_test {

class RecordingRanks {
 public:
  RecordingRanks(mezzo::AnyCommunicator inner, std::vector<std::string>& log)
      : inner_(std::move(inner)), log_(&log) {}
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  bool serves(c10::DeviceType device) const { return inner_.serves(device); }
  mezzo::CollectiveRequest all_reduce(const at::Tensor& tensor, mezzo::Reduction reduction) {
    log_->push_back(reduction == mezzo::Reduction::sum ? "sum" : "max");
    return inner_.all_reduce(tensor, reduction);
  }
  mezzo::CollectiveRequest broadcast(const at::Tensor& tensor, int root) {
    log_->push_back("broadcast");
    return inner_.broadcast(tensor, root);
  }
  mezzo::CollectiveRequest all_gather(const at::Tensor& output, const at::Tensor& input) {
    log_->push_back("all_gather");
    return inner_.all_gather(output, input);
  }
  mezzo::CollectiveRequest reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                          mezzo::Reduction reduction) {
    log_->push_back("reduce_scatter");
    return inner_.reduce_scatter(output, input, reduction);
  }
  mezzo::CollectiveRequest barrier() {
    log_->push_back("barrier");
    return inner_.barrier();
  }

 private:
  mezzo::AnyCommunicator inner_;
  std::vector<std::string>* log_;
};

}  // namespace distributed_test
