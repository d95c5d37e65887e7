// Ranks are threads here, and their backend a blackboard, as simple as a backend of c10d's can be:
// what is tested is what mezzo adds to it.
#include <torch/torch.h>
//
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/reduce_scatter_float.h>
#include <mezzo/distributed/rendezvous.h>

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
#include "alike_ranks.h"
#include "free_port.h"

namespace {

using c10d::ReduceOp;
using distributed_test::free_port;
using Ranks = c10::intrusive_ptr<c10d::Backend>;
using distributed_test::alike_ranks;
using distributed_test::DoneWork;
namespace detail = mezzo::detail;
using test_support::error_of;
using testing::HasSubstr;

struct Blackboard {
  explicit Blackboard(int ranks) : tensors(static_cast<std::size_t>(ranks)), all(ranks) {}
  std::vector<at::Tensor> tensors;
  std::barrier<> all;
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

void on_each_rank(const std::function<void(const Ranks&)>& f) {
  const auto board = std::make_shared<Blackboard>(kRanks);
  in_threads([&](int rank) { f(c10::make_intrusive<ThreadsBackend>(rank, kRanks, board)); });
}

TEST(Collectives, EachReachesTheBackendAndItsResultTheTensor) {
  on_each_rank([](const Ranks& world) {
    const float rank = static_cast<float>(world->getRank());
    const at::Tensor sum = at::full({2, 3}, rank);
    const at::Tensor max = at::full({2, 3}, rank);
    const at::Tensor given = at::full({4}, rank);
    const auto version = sum._version();
    detail::all_reduce(world, sum, ReduceOp::SUM).wait();
    detail::all_reduce(world, max, ReduceOp::MAX).wait();
    detail::broadcast(world, given, 1).wait();
    EXPECT_TRUE(at::equal(sum, at::full({2, 3}, 3.F)));
    EXPECT_GT(sum._version(), version);
    EXPECT_TRUE(at::equal(max, at::full({2, 3}, 2.F)));
    EXPECT_TRUE(at::equal(given, at::full({4}, 1.F)));

    const at::Tensor all = at::empty({kRanks, 2});
    detail::all_gather(world, all, at::full({2}, rank)).wait();
    EXPECT_TRUE(at::equal(all, at::arange(3).to(at::kFloat).view({3, 1}).expand({3, 2})));

    const at::Tensor parts = at::arange(6).to(at::kFloat) + rank;
    at::Tensor part = at::empty({2});
    detail::reduce_scatter(world, part, parts).wait();
    EXPECT_TRUE(
        at::equal(part, (at::arange(6).to(at::kFloat) * 3 + 3).view({3, 2})[world->getRank()]));
  });
}

TEST(Collectives, ABroadcastTakesTensorsInAnyMemoryFormat) {
  on_each_rank([](const Ranks& world) {
    const float rank = static_cast<float>(world->getRank());
    const at::Tensor memory = at::full({4, 6}, -1.F);
    const at::Tensor tensor = memory.slice(1, 0, 6, 2).t();
    tensor.copy_(at::arange(12).view({3, 4}) + 100 * rank);
    const at::Tensor image =  // one rank's lies otherwise than the others'
        (at::arange(24).view({1, 2, 3, 4}).to(at::kFloat) + 100 * rank)
            .contiguous(rank == 0 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
    const auto version = image._version();
    detail::broadcast(world, tensor, 2).wait();
    detail::broadcast(world, image, 2).wait();
    EXPECT_TRUE(at::equal(tensor, at::arange(12).view({3, 4}).to(at::kFloat) + 200));
    EXPECT_TRUE((memory.slice(1, 1, 6, 2) == -1).all().item<bool>());
    EXPECT_TRUE(at::equal(image, at::arange(24).view({1, 2, 3, 4}).to(at::kFloat) + 200));
    EXPECT_GT(image._version(), version);
  });
}

TEST(Collectives, SumsOfLowPrecisionAreNotRoundedWhereFloatIsWanted) {
  on_each_rank([](const Ranks& world) {
    const at::Tensor parts = (at::arange(6) + (world->getRank() == 0 ? 256 : 1)).to(at::kBFloat16);
    const at::Tensor part = at::zeros({2});
    const auto version = part._version();
    const auto work = mezzo::reduce_scatter_float(world, part, parts);
    work->wait();
    work->wait();
    EXPECT_TRUE(work->isCompleted());
    at::Tensor wanted = at::zeros({6});
    for (int rank = 0; rank < kRanks; ++rank) {
      wanted += (at::arange(6) + (rank == 0 ? 256 : 1)).to(at::kBFloat16).to(at::kFloat);
    }
    EXPECT_TRUE(at::equal(part, wanted.view({3, 2})[world->getRank()])) << part;
    EXPECT_GT(part._version(), version);
  });
}

TEST(Collectives, AveragesAreDividedBeforeTheyAreSentWhereTheBackendKnowsNone) {
  on_each_rank([](const Ranks& world) {
    const at::Tensor all = at::full({2, 3}, 60'000. - 3. * world->getRank(), at::kFloat);
    detail::all_reduce(world, all, ReduceOp::AVG).wait();
    EXPECT_TRUE(at::allclose(all, at::full({2, 3}, 59'997.)));
    const at::Tensor half = at::full({6}, 60'000., at::kHalf);
    detail::all_reduce(world, half, ReduceOp::AVG).wait();
    EXPECT_TRUE(at::allclose(half, at::full({6}, 60'000., at::kHalf), 1e-2)) << half;
  });
}

TEST(Collectives, WhatTheBackendThrowsCarriesTheRankAndTheCollective) {
  on_each_rank([](const Ranks& world) {
    auto request = detail::request(c10d::OpType::BARRIER, *world, [&] { return world->barrier(); });
    EXPECT_THAT(error_of([&] { request.wait(); }),
                HasSubstr("barrier on rank " + std::to_string(world->getRank()) +
                          " of 3: the cable was pulled"));
  });
}

TEST(Collectives, ANullGroupAndADeviceThatMpiDoesNotTakeAreRefused) {
  const mezzo::NamedTensors tensors = {{"weight", at::zeros({2})}};
  EXPECT_THAT(error_of([&] { mezzo::broadcast_parameters(tensors, nullptr); }),
              HasSubstr("broadcast_parameters: `group` is null"));
  EXPECT_THAT(error_of([&] { mezzo::broadcast_parameters(tensors, alike_ranks(2), -1); }),
              HasSubstr("`root` must be 0 to 1, but is -1"));
  EXPECT_THAT(
      error_of([] { detail::check_device("X", *alike_ranks(2), at::kMeta); }),
      HasSubstr("X on rank 0: a tensor is on meta, which the group's backend mpi does not"));
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
