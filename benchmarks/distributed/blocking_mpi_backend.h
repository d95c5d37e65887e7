#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mpi.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace bench {

/// A minimal c10d backend, the baseline of mezzo::MpiBackend: a thread makes blocking MPI calls,
/// without checks. Supports all-reduce (sum) of float32 and int32, and broadcast.
class BlockingMpiBackend : public c10d::Backend {
 public:
  /// `on_all_reduce` is called with the bytes of each all-reduce.
  BlockingMpiBackend(int rank, int size, std::function<void(int64_t)> on_all_reduce)
      : Backend(rank, size), on_all_reduce_(std::move(on_all_reduce)), thread_([this] { run(); }) {}

  ~BlockingMpiBackend() override {
    enqueue(nullptr);
    thread_.join();
  }

  const std::string getBackendName() const override { return "mpi"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& /*options*/) override {
    for (const at::Tensor& tensor : tensors) on_all_reduce_(static_cast<int64_t>(tensor.nbytes()));
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    enqueue([tensors, future] {
      for (const at::Tensor& tensor : tensors) {
        MPI_Allreduce(MPI_IN_PLACE, tensor.mutable_data_ptr(), static_cast<int>(tensor.numel()),
                      tensor.scalar_type() == at::kFloat ? MPI_FLOAT : MPI_INT, MPI_SUM,
                      MPI_COMM_WORLD);
      }
      future->markCompleted(at::IValue(tensors));
    });
    return c10::make_intrusive<QueuedWork>(future);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    enqueue([tensors, future, root = static_cast<int>(options.rootRank)] {
      for (const at::Tensor& tensor : tensors) {
        MPI_Bcast(tensor.mutable_data_ptr(), static_cast<int>(tensor.nbytes()), MPI_BYTE, root,
                  MPI_COMM_WORLD);
      }
      future->markCompleted(at::IValue(tensors));
    });
    return c10::make_intrusive<QueuedWork>(future);
  }

 private:
  struct QueuedWork : c10d::Work {
    explicit QueuedWork(c10::intrusive_ptr<c10::ivalue::Future> work_future)
        : future(std::move(work_future)) {}
    bool isCompleted() override { return future->completed(); }
    bool wait(std::chrono::milliseconds /*timeout*/) override {
      future->wait();
      return true;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  void enqueue(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    condition_.notify_one();
  }

  void run() {
    while (true) {
      std::unique_lock lock(mutex_);
      condition_.wait(lock, [&] { return !queue_.empty(); });
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (work == nullptr) return;
      work();
    }
  }

  std::function<void(int64_t)> on_all_reduce_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

}  // namespace bench
