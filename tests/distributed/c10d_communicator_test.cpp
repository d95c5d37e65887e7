// Ranks are threads here, and their backend a blackboard: libtorch's wheel has none that runs on
// the CPU and can be compiled against. What is tested is the way to c10d and back.
#include <torch/torch.h>
//
#include <mezzo/distributed/c10d_communicator.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../support/error_of.h"
#include "free_port.h"

namespace {

using distributed_test::free_port;
using mezzo::C10dCommunicator;
using mezzo::Reduction;
using test_support::error_of;
using testing::AllOf;
using testing::HasSubstr;

struct Blackboard {
  explicit Blackboard(int ranks) : tensors(static_cast<std::size_t>(ranks)), all(ranks) {}
  std::vector<at::Tensor> tensors;
  std::barrier<> all;
};

struct DoneWork : c10d::Work {
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

struct FailedWork : DoneWork {
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    throw std::runtime_error("the cable was pulled");
  }
};

class ThreadsBackend : public c10d::Backend {
 public:
  ThreadsBackend(int rank, int size, std::shared_ptr<Blackboard> board)
      : Backend(rank, size), board_(std::move(board)) {}

  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return exchange(tensors[0], [&](const std::vector<at::Tensor>& all) {
      tensors[0].copy_(reduced(all, options.reduceOp));
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return exchange(tensors[0], [&](const std::vector<at::Tensor>& all) {
      tensors[0].copy_(all[static_cast<std::size_t>(options.rootRank)]);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& /*o*/) override {
    return exchange(input, [&](const std::vector<at::Tensor>& all) { output.copy_(at::cat(all)); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return exchange(input, [&](const std::vector<at::Tensor>& all) {
      output.copy_(reduced(all, options.reduceOp).view({size_, -1})[rank_]);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes,
                                               const c10d::AllToAllOptions& /*o*/) override {
    EXPECT_TRUE(output_sizes.empty() && input_sizes.empty()) << "which means: equal parts";
    return exchange(input, [&](const std::vector<at::Tensor>& all) {
      for (int64_t rank = 0; rank < size_; ++rank) {
        output.view({size_, -1})[rank].copy_(
            all[static_cast<std::size_t>(rank)].view({size_, -1})[rank_]);
      }
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& /*options*/) override {
    board_->all.arrive_and_wait();
    return c10::make_intrusive<FailedWork>();
  }

 private:
  template <class Take>
  c10::intrusive_ptr<c10d::Work> exchange(const at::Tensor& given, Take take) {
    board_->tensors[static_cast<std::size_t>(rank_)] = given.clone();
    board_->all.arrive_and_wait();
    take(board_->tensors);
    board_->all.arrive_and_wait();
    return c10::make_intrusive<DoneWork>();
  }

  at::Tensor reduced(const std::vector<at::Tensor>& all, const c10d::ReduceOp& op) const {
    at::Tensor result = all[0].clone();
    for (std::size_t i = 1; i < all.size(); ++i) {
      EXPECT_NE(op.op_, c10d::ReduceOp::AVG) << "which NCCL alone knows";
      result = op.op_ == c10d::ReduceOp::SUM ? result + all[i] : at::maximum(result, all[i]);
    }
    return result;
  }

  std::shared_ptr<Blackboard> board_;
};

constexpr int kRanks = 3;

void in_threads(const std::function<void(int rank)>& f) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(f, rank);
  for (auto& thread : threads) thread.join();
}

enum class Door { backend, process_group };

/// The same ranks as c10d's Backend, and behind a ProcessGroup, which goes through the dispatcher.
class C10dCommunicatorTest : public testing::TestWithParam<Door> {
 protected:
  void on_each_rank(const std::function<void(C10dCommunicator)>& f) {
    const auto board = std::make_shared<Blackboard>(kRanks);
    in_threads([&](int rank) {
      auto backend = c10::make_intrusive<ThreadsBackend>(rank, kRanks, board);
      if (GetParam() == Door::backend) {
        f(C10dCommunicator(backend, {at::kCPU}));
        return;
      }
      auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, kRanks);
      group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                        c10::intrusive_ptr<c10d::Backend>(backend));
      group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
      f(C10dCommunicator(group, {at::kCPU}));
    });
  }
};

INSTANTIATE_TEST_SUITE_P(, C10dCommunicatorTest,
                         testing::Values(Door::backend, Door::process_group), [](const auto& test) {
                           return test.param == Door::backend ? "Backend" : "ProcessGroup";
                         });

TEST_P(C10dCommunicatorTest, EachCollectiveReachesTheBackendAndItsResultTheTensor) {
  on_each_rank([](C10dCommunicator world) {
    EXPECT_EQ(world.size(), kRanks);
    const float rank = static_cast<float>(world.rank());
    const at::Tensor sum = at::full({2, 3}, rank);
    const at::Tensor max = at::full({2, 3}, rank);
    const at::Tensor given = at::full({4}, rank);
    const auto version = sum._version();
    world.all_reduce(sum, Reduction::sum).wait();
    world.all_reduce(max, Reduction::max).wait();
    world.broadcast(given, 1).wait();
    EXPECT_TRUE(at::equal(sum, at::full({2, 3}, 3.F)));
    EXPECT_GT(sum._version(), version);
    EXPECT_TRUE(at::equal(max, at::full({2, 3}, 2.F)));
    EXPECT_TRUE(at::equal(given, at::full({4}, 1.F)));

    const at::Tensor all = at::empty({kRanks, 2});
    world.all_gather(all, at::full({2}, rank)).wait();
    EXPECT_TRUE(at::equal(all, at::arange(3).to(at::kFloat).view({3, 1}).expand({3, 2})));

    const at::Tensor parts = at::arange(6).to(at::kFloat) + rank;
    at::Tensor part = at::empty({2});
    world.reduce_scatter(part, parts, Reduction::sum).wait();
    EXPECT_TRUE(at::equal(part, (at::arange(6).to(at::kFloat) * 3 + 3).view({3, 2})[world.rank()]));
  });
}

TEST_P(C10dCommunicatorTest, TensorsWithGapsAndPartsOfTheirOwnOutputAreTaken) {
  on_each_rank([](C10dCommunicator world) {
    const float rank = static_cast<float>(world.rank());
    const at::Tensor memory = at::full({4, 6}, -1.F);
    const at::Tensor tensor = memory.slice(1, 0, 6, 2).t();
    tensor.fill_(rank);
    world.all_reduce(tensor, Reduction::sum).wait();
    EXPECT_TRUE(at::equal(tensor, at::full({3, 4}, 3.F)));
    EXPECT_TRUE((memory.slice(1, 1, 6, 2) == -1).all().item<bool>());

    const at::Tensor all = at::zeros({kRanks, 2});
    all[world.rank()].fill_(rank);
    world.all_gather(all, all[world.rank()]).wait();
    EXPECT_TRUE(at::equal(all, at::arange(3).to(at::kFloat).view({3, 1}).expand({3, 2})));

    world.reduce_scatter(all[world.rank()], all, Reduction::sum).wait();
    EXPECT_TRUE(at::equal(all[world.rank()], at::full({2}, 3 * rank)));
  });
}

TEST_P(C10dCommunicatorTest, SumsOfLowPrecisionAreNotRoundedWhereFloatIsWanted) {
  on_each_rank([](C10dCommunicator world) {
    const at::Tensor parts = (at::arange(6) + (world.rank() == 0 ? 256 : 1)).to(at::kBFloat16);
    const at::Tensor part = at::zeros({2});
    const auto version = part._version();
    world.reduce_scatter(part, parts, Reduction::sum).wait();
    at::Tensor wanted = at::zeros({6});
    for (int rank = 0; rank < kRanks; ++rank) {
      wanted += (at::arange(6) + (rank == 0 ? 256 : 1)).to(at::kBFloat16).to(at::kFloat);
    }
    EXPECT_TRUE(at::equal(part, wanted.view({3, 2})[world.rank()])) << part;
    EXPECT_GT(part._version(), version);
  });
}

TEST_P(C10dCommunicatorTest, AveragesAreDividedBeforeTheyAreSent) {
  on_each_rank([](C10dCommunicator world) {
    const at::Tensor all = at::full({2, 3}, 60'000. - 3. * world.rank(), at::kFloat);
    world.all_reduce(all, Reduction::average).wait();
    EXPECT_TRUE(at::allclose(all, at::full({2, 3}, 59'997.)));
    const at::Tensor half = at::full({6}, 60'000., at::kHalf), part = at::zeros({2}, at::kHalf);
    world.reduce_scatter(part, half, Reduction::average).wait();
    EXPECT_TRUE(at::allclose(part, at::full({2}, 60'000., at::kHalf), 1e-2)) << part;
    EXPECT_TRUE(at::equal(half, at::full({6}, 60'000., at::kHalf))) << "an input is only read";
    const at::Tensor wide = at::zeros({2});
    world.reduce_scatter(wide, half, Reduction::average).wait();
    EXPECT_TRUE(at::allclose(wide, at::full({2}, 60'000.)));
  });
}

TEST_P(C10dCommunicatorTest, WhatTheBackendThrowsCarriesTheRankAndTheCollective) {
  on_each_rank([](C10dCommunicator world) {
    auto request = world.barrier();
    EXPECT_TRUE(request.ready());
    EXPECT_THAT(error_of([&] { request.wait(); }),
                HasSubstr("barrier on rank " + std::to_string(world.rank()) +
                          " of 3: the cable was pulled"));
  });
}

TEST_P(C10dCommunicatorTest, WrongArgumentsAreNamedAsEverywhere) {
  on_each_rank([](C10dCommunicator world) {
    EXPECT_THAT(error_of([&] { world.broadcast(at::zeros({3}), -1).wait(); }),
                HasSubstr("`root` must be 0 to 2, but is -1"));
    EXPECT_THAT(
        error_of([&] { world.all_reduce(at::zeros({3}).to(at::kMeta), Reduction::sum).wait(); }),
        HasSubstr("does not serve"));
  });
}

TEST(C10dCommunicator, ANullGroupAndNoDevicesAreRefused) {
  EXPECT_THAT(
      error_of([] { C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup>(), {at::kCPU}); }),
      HasSubstr("`group` is null"));
  const auto board = std::make_shared<Blackboard>(1);
  EXPECT_THAT(
      error_of([&] { C10dCommunicator(c10::make_intrusive<ThreadsBackend>(0, 1, board), {}); }),
      HasSubstr("`devices` is empty"));
}

TEST(Rendezvous, RanksMeetAtTheStoreOfRankZero) {
  const std::uint16_t port = free_port();
  in_threads([&](int rank) {
    const auto store = mezzo::rendezvous({rank, kRanks, rank, "127.0.0.1", port});
    store->set("rank" + std::to_string(rank), std::vector<uint8_t>{static_cast<uint8_t>(rank)});
    for (int other = 0; other < kRanks; ++other) {
      EXPECT_EQ(store->get("rank" + std::to_string(other))[0], other);
    }
    store->add("done", 1);
    while (rank == 0 && store->add("done", 0) < kRanks) std::this_thread::yield();
  });
}

// Takes a second: c10d looks whether all have come no more often than that.
TEST(Rendezvous, WhoeverDoesNotComeIsMissedInTime) {
  const std::uint16_t port = free_port();
  EXPECT_THAT(error_of([&] {
                mezzo::rendezvous({0, 2, 0, "127.0.0.1", port}, std::chrono::milliseconds(100));
              }),
              HasSubstr("mezzo::rendezvous: rank 0 of 2 at 127.0.0.1:" + std::to_string(port)));
}

}  // namespace
