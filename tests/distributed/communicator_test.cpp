#include <torch/torch.h>
//
#include <mezzo/distributed/communicator.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../support/error_of.h"
#include "../support/warnings.h"

namespace {

using mezzo::Communicator;
using mezzo::Reduction;
using mezzo::Work;
using test_support::Warnings;

/// Writes down what is asked of it.
struct Recorded : Work::Pending {
  Recorded(std::vector<std::string>& to, std::string of) : log(to), collective(std::move(of)) {}
  bool ready() override {
    log.push_back("ready");
    return false;
  }
  void wait() override { log.push_back("wait"); }
  std::string name() const override { return collective; }
  std::vector<std::string>& log;
  std::string collective;
};

class Recorder : public mezzo::CommunicatorBackend {
 public:
  explicit Recorder(std::vector<std::string>& log) : log_(log) {}
  int rank() const override { return 2; }
  int size() const override { return 5; }
  bool serves(c10::DeviceType device) const override { return device == at::kCPU; }
  Work all_reduce(const at::Tensor& /*tensor*/, Reduction reduction) override {
    return record(reduction == Reduction::sum ? "all_reduce sum" : "all_reduce max");
  }
  Work broadcast(const at::Tensor& /*tensor*/, int root) override {
    return record("broadcast " + std::to_string(root));
  }
  Work all_gather(const at::Tensor& /*output*/, const at::Tensor& /*input*/) override {
    return record("all_gather");
  }
  Work reduce_scatter(const at::Tensor& /*output*/, const at::Tensor& /*input*/,
                      Reduction /*reduction*/) override {
    return record("reduce_scatter");
  }
  Work barrier() override { return record("barrier"); }

 private:
  Work record(std::string what) {
    log_.push_back(what);
    return Work(std::make_unique<Recorded>(log_, std::move(what)));
  }
  std::vector<std::string>& log_;
};

Communicator recorder(std::vector<std::string>& log) {
  return Communicator(std::make_shared<Recorder>(log));
}

TEST(Communicator, PassesEveryCallOn) {
  std::vector<std::string> log;
  Communicator any = recorder(log);
  const at::Tensor tensor = at::zeros({1}), all = at::zeros({5});
  EXPECT_EQ(any.rank(), 2);
  EXPECT_EQ(any.size(), 5);
  EXPECT_TRUE(any.serves(at::kCPU));
  EXPECT_FALSE(any.serves(at::kCUDA));
  any.all_reduce(tensor, Reduction::max).wait();
  any.broadcast(tensor, 3).wait();
  Communicator copy = any;
  copy.all_gather(all, tensor).wait();
  copy.reduce_scatter(tensor, all, Reduction::sum).wait();
  copy.barrier().wait();
  EXPECT_THAT(log,
              testing::ElementsAre("all_reduce max", "wait", "broadcast 3", "wait", "all_gather",
                                   "wait", "reduce_scatter", "wait", "barrier", "wait"));
}

// A backend sees none of them.
/// What wraps a communicator by deriving from the handle instead of CommunicatorBackend.
struct Counting : Communicator {
  using Communicator::Communicator;
  Work all_reduce(const at::Tensor& tensor, Reduction reduction) {
    ++calls;
    return Communicator::all_reduce(tensor, reduction);
  }
  int calls = 0;
};

struct Named : Communicator {
  using Communicator::Communicator;
  std::string name;
};

TEST(Communicator, IsNotMadeFromAHandleThatRedefinesACollective) {
  static_assert(!std::is_constructible_v<Communicator, Counting>);
  static_assert(!std::is_constructible_v<Communicator, Counting&>);
  static_assert(!std::is_constructible_v<Communicator, const Counting&>);
  static_assert(std::is_constructible_v<Communicator, Named&>);
  static_assert(std::is_constructible_v<Communicator, Communicator&>);
}

TEST(Communicator, RefusesWrongArgumentsNamingTheRank) {
  std::vector<std::string> log;
  Communicator world = recorder(log);
  const at::Tensor tensor = at::zeros({1});
  const auto refuses = [](const std::function<Work()>& call, const std::string& words) {
    EXPECT_THAT(test_support::error_of([&] { call().wait(); }), testing::HasSubstr(words));
  };
  refuses([&] { return world.all_reduce(at::Tensor(), Reduction::sum); },
          "all_reduce on rank 2: `tensor` is undefined");
  refuses([&] { return world.all_reduce(tensor.to(at::kLong), Reduction::average); },
          "all_reduce on rank 2: Long has no average");
  refuses([&] { return world.broadcast(tensor, 5); },
          "broadcast on rank 2: `root` must be 0 to 4, but is 5");
  refuses([&] { return world.all_gather(tensor, tensor); },
          "all_gather on rank 2: `output` must have 5 times the 1 elements of `input`");
  refuses([&] { return world.reduce_scatter(tensor, at::zeros({5}, at::kLong), Reduction::sum); },
          "reduce_scatter on rank 2: `input` is Long and `output` Float");
  EXPECT_TRUE(log.empty());
  EXPECT_THAT(test_support::error_of([] { Communicator(nullptr); }),
              testing::HasSubstr("`backend` is null"));
}

TEST(Work, WaitsOnceWhoeverHoldsIt) {
  std::vector<std::string> log;
  const Warnings warnings;
  Work request = recorder(log).barrier();
  Work holder = std::move(request);
  EXPECT_FALSE(holder.ready());
  holder.wait();
  holder.wait();
  EXPECT_TRUE(holder.ready());
  EXPECT_THAT(log, testing::ElementsAre("barrier", "ready", "wait"));
  EXPECT_TRUE(warnings.texts.empty());
  Work().wait();
}

TEST(Work, ThatNobodyWaitedForWarnsAndNeverThrows) {
  std::vector<std::string> log;
  const Warnings warnings(/*throws=*/true);
  { const Work forgotten = recorder(log).broadcast(at::zeros({1}), 4); }
  Work abandoned = recorder(log).barrier();
  abandoned.abandon();
  Work replaced = recorder(log).barrier();
  replaced = Work();
  EXPECT_THAT(warnings.texts,
              testing::ElementsAre(testing::HasSubstr("nobody waited for broadcast 4"),
                                   testing::HasSubstr("nobody waited for barrier")));
}

}  // namespace
