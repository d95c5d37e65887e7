/// \file
/// A model that all ranks train.
#pragma once

#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/distributed/start_alike.h>
#include <torch/torch.h>

#include <utility>

namespace bert_ner {

/// Begins with rank 0's weights; `backward()` ends with gradients averaged over the ranks.
template <class M>
class DataParallel {
 public:
  DataParallel(M model, const mezzo::AnyCommunicator& ranks)
      : model_(std::move(model)),
        buckets_(model_->parameters(),
                 mezzo::GradBucketsOptions().storage(mezzo::GradStorage::flat)),
        all_reduce_(buckets_, ranks) {
    mezzo::start_alike(model_->named_parameters().pairs(), ranks);
  }

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return model_(std::forward<Args>(args)...);
  }
  mezzo::GradBuckets& buckets() { return buckets_; }

 private:
  M model_;
  mezzo::GradBuckets buckets_;
  mezzo::GradAllReduce all_reduce_;
};

}  // namespace bert_ner
