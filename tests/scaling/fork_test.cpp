// Training continues in the child of a process that trained on the CPU with one thread. (With more
// threads libgomp hangs in the child, also without mezzo.)
#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

namespace {

using torch::Tensor;

class ForkedTraining {
 public:
  void steps(int count) {
    for (int i = 0; i < count; ++i) {
      optimizer_.zero_grad();
      Tensor loss;
      {
        const mezzo::AutocastGuard<torch::kCPU> autocast;
        loss = model_->forward(batch_).to(torch::kFloat).square().sum();
      }
      scaler_.scale(loss).backward();
      scaler_.step(optimizer_, {.max_norm = 1.0});
      scaler_.update();
    }
  }

  Tensor weight() const { return model_->weight.detach(); }

 private:
  torch::nn::Linear model_{64, 64};
  Tensor batch_ = torch::randn({8, 64});
  mezzo::optim::AdamW optimizer_{model_->parameters(), mezzo::optim::AdamWOptions(1e-2)};
  mezzo::GradScaler scaler_{{.init_scale = 1024}};
};

enum class ChildStatus { success, failure, unsupported };

/// Runs `work` in a child process for at most a minute, and returns its exit status.
template <class Work>
ChildStatus run_in_child(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    auto child_status = ChildStatus::failure;
    try {
      if (work()) child_status = ChildStatus::success;
    } catch (const std::exception& error) {  // otherwise the child would run the next tests
      const bool is_libtorchs = std::strstr(error.what(), "fork-based multiprocessing") != nullptr;
      if (is_libtorchs) child_status = ChildStatus::unsupported;
    }
    _exit(static_cast<int>(child_status));
  }
  int status = 0;
  const bool has_ended = waitpid(child, &status, 0) == child && WIFEXITED(status);
  return has_ended ? static_cast<ChildStatus>(WEXITSTATUS(status)) : ChildStatus::failure;
}

TEST(Fork, ChildContinuesTraining) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "libtorch's autograd does not support fork";
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  ForkedTraining training;
  training.steps(3);
  int bytes[2];
  ASSERT_EQ(pipe(bytes), 0);
  const Tensor in_child = torch::empty_like(training.weight());
  const ChildStatus child_status = run_in_child([&] {
    training.steps(3);
    const auto size = training.weight().nbytes();
    return write(bytes[1], training.weight().const_data_ptr(), size) == static_cast<ssize_t>(size);
  });
  at::set_num_threads(threads);
  if (child_status == ChildStatus::unsupported) {
    GTEST_SKIP()
        << "an earlier test ran nested backward passes, after which libtorch throws in a child";
  }
  ASSERT_EQ(child_status, ChildStatus::success);
  at::set_num_threads(1);
  EXPECT_EQ(read(bytes[0], in_child.mutable_data_ptr(), in_child.nbytes()),
            static_cast<ssize_t>(in_child.nbytes()));
  training.steps(3);
  EXPECT_TRUE(torch::equal(training.weight(), in_child));
  close(bytes[0]);
  close(bytes[1]);
  at::set_num_threads(threads);
}

// Threads that share a scaler scale the first losses concurrently.
TEST(GradScalerConcurrentScale, IsSafeOnFirstLosses) {
  constexpr int kThreads = 3;
  for (int round = 0; round < 300; ++round) {
    mezzo::GradScaler scaler({.init_scale = 1024});
    std::vector<torch::Tensor> scaled(kThreads);
    std::barrier start(kThreads);
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
          const torch::Tensor loss = torch::full({}, i + 1.0);
          start.arrive_and_wait();
          scaled[static_cast<std::size_t>(i)] = scaler.scale(loss);
        });
      }
    }
    for (int i = 0; i < kThreads; ++i) {
      ASSERT_EQ(scaled[static_cast<std::size_t>(i)].item<double>(), 1024.0 * (i + 1.0));
    }
    ASSERT_EQ(scaler.get_scale(), 1024.0);
  }
}

}  // namespace
