#include <torch/torch.h>
//
#include <mezzo/distributed/mpi_communicator.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "../support/error_of.h"

namespace {

using mezzo::MpiCommunicator;
using mezzo::MpiCommunicatorOptions;
using mezzo::Reduction;
using mezzo::Work;
using test_support::error_of;
using testing::AllOf;
using testing::HasSubstr;

const std::vector<at::ScalarType> kReducible = {at::kFloat,    at::kDouble, at::kHalf,
                                                at::kBFloat16, at::kByte,   at::kChar,
                                                at::kShort,    at::kInt,    at::kLong};
const std::vector<int64_t> kLengths = {0, 1, 3, 64, 1021};

/// What rank `rank` brings along: no two ranks the same, small enough for sums of bytes.
at::Tensor contribution(int rank, at::IntArrayRef shape, at::ScalarType dtype) {
  const at::Tensor numbers = torch::arange(c10::multiply_integers(shape), at::kLong);
  const at::Tensor values = ((numbers * 7 + rank * 5) % 23).view(shape);
  return at::isFloatingType(dtype) ? (values.to(at::kDouble) / 3).to(dtype) : values.to(dtype);
}

/// The reduction of all ranks' tensors as it should be: in rank order, low precision in float and
/// rounded once.
at::Tensor expected(int ranks, Reduction reduction,
                    const std::function<at::Tensor(int rank)>& tensor_of) {
  const at::ScalarType dtype = tensor_of(0).scalar_type();
  const at::ScalarType wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  at::Tensor reduced = tensor_of(0).to(wide).clone();
  for (int rank = 1; rank < ranks; ++rank) {
    const at::Tensor next = tensor_of(rank).to(wide);
    reduced = reduction == Reduction::max ? at::maximum(reduced, next) : reduced + next;
  }
  if (reduction == Reduction::average) reduced = reduced / ranks;
  return reduced.to(dtype);
}

/// Bits as integers, so that NaNs and signed zeros count.
at::Tensor bits(const at::Tensor& tensor) { return tensor.contiguous().view(at::kByte); }

void expect_same(const at::Tensor& actual, const at::Tensor& wanted) {
  ASSERT_EQ(actual.scalar_type(), wanted.scalar_type());
  ASSERT_EQ(actual.sizes(), wanted.sizes());
  if (actual.scalar_type() == at::kFloat || actual.scalar_type() == at::kDouble) {
    const double tolerance = actual.scalar_type() == at::kFloat ? 1e-6 : 1e-14;
    EXPECT_TRUE(at::allclose(actual, wanted, tolerance)) << actual << wanted;
  } else {
    EXPECT_TRUE(at::equal(actual, wanted)) << actual << wanted;
  }
}

/// As a user has it; in runs of 40 bytes, as beyond 2^31 elements; and without comparing calls.
class MpiCommunicatorTest : public testing::TestWithParam<MpiCommunicatorOptions> {
 protected:
  MpiCommunicator world{MPI_COMM_WORLD, GetParam()};
  const int rank = world.rank();
  const int size = world.size();
};

INSTANTIATE_TEST_SUITE_P(, MpiCommunicatorTest,
                         testing::Values(MpiCommunicatorOptions{},
                                         MpiCommunicatorOptions{.max_bytes = 40},
                                         MpiCommunicatorOptions{.check_calls = false}),
                         [](const auto& test) {
                           return test.param.max_bytes == 40 ? "InRuns"
                                  : test.param.check_calls   ? "AsGiven"
                                                             : "Unchecked";
                         });

TEST_P(MpiCommunicatorTest, SumsAndMaximaOfEveryDtypeAreThoseOfAllRanks) {
  for (const auto dtype : kReducible) {
    for (const auto length : kLengths) {
      for (const auto reduction : {Reduction::sum, Reduction::max}) {
        const at::Tensor tensor = contribution(rank, {length}, dtype);
        world.all_reduce(tensor, reduction).wait();
        expect_same(tensor, expected(size, reduction,
                                     [&](int of) { return contribution(of, {length}, dtype); }));
      }
    }
  }
}

TEST_P(MpiCommunicatorTest, AveragesOfEveryFloatingDtypeAreThoseOfAllRanks) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const auto length : kLengths) {
      const at::Tensor tensor = contribution(rank, {length}, dtype);
      world.all_reduce(tensor, Reduction::average).wait();
      expect_same(tensor, expected(size, Reduction::average,
                                   [&](int of) { return contribution(of, {length}, dtype); }));

      const auto parts = [&](int of) { return contribution(of, {size, length}, dtype); };
      const at::Tensor input = parts(rank), part = at::empty({length}, dtype);
      world.reduce_scatter(part, input, Reduction::average).wait();
      expect_same(part, expected(size, Reduction::average, parts)[rank]);
      EXPECT_TRUE(at::equal(input, parts(rank)));
    }
  }
  EXPECT_THAT(
      error_of([&] { world.all_reduce(torch::ones({3}, at::kLong), Reduction::average).wait(); }),
      HasSubstr("Long has no average"));
}

/// Multiplied by 1 / 3 about a third of them would be off in the last bit.
TEST_P(MpiCommunicatorTest, AnAverageIsASumThatIsDividedAndRoundedOnce) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor sum = torch::arange(1, 1001).to(dtype);  // whose sums are exact
    const at::Tensor wanted = sum / size;
    const at::Tensor own = rank == 0 ? sum.clone() : torch::zeros_like(sum);
    world.all_reduce(own, Reduction::average).wait();
    EXPECT_TRUE(at::equal(own, wanted)) << dtype;
    const at::Tensor all = rank == 0 ? sum.repeat({size}) : torch::zeros({1000 * size}, dtype);
    const at::Tensor part = torch::empty({1000}, dtype);
    world.reduce_scatter(part, all, Reduction::average).wait();
    EXPECT_TRUE(at::equal(part, wanted)) << dtype;
  }
}

TEST_P(MpiCommunicatorTest, AnAverageOfHalfOverflowsOnlyWhereItDoesNotFit) {
  const at::Tensor tensor = torch::full({5}, 60'000., at::kHalf);
  world.all_reduce(tensor, Reduction::average).wait();
  EXPECT_TRUE(at::equal(tensor, torch::full({5}, 60'000., at::kHalf))) << tensor;
}

TEST_P(MpiCommunicatorTest, BoolsAreReducedToWhetherOneIsTrue) {
  const at::Tensor flags = torch::arange(9) % (size + 1) == rank;
  world.all_reduce(flags, Reduction::max).wait();
  EXPECT_TRUE(at::equal(flags, torch::arange(9) % (size + 1) < size));
}

TEST_P(MpiCommunicatorTest, LowPrecisionIsSummedInFloatAndRoundedOnce) {
  // In bfloat16, 256 + 1 is 256, however often one is added.
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const double large = dtype == at::kBFloat16 ? 256. : 2048.;
    const at::Tensor tensor = torch::full({33}, rank == 0 ? large : 1., dtype);
    world.all_reduce(tensor, Reduction::sum).wait();
    EXPECT_TRUE(at::equal(tensor, torch::full({33}, large + (size - 1), dtype))) << tensor;
  }
}

TEST_P(MpiCommunicatorTest, SumsOfLowPrecisionAreNotRoundedWhereFloatIsWanted) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const double large = dtype == at::kBFloat16 ? 256. : 2048.;
    const at::Tensor input = torch::full({33 * size}, rank == 0 ? large : 1., dtype);
    const at::Tensor output = torch::empty({33});
    world.reduce_scatter(output, input, Reduction::sum).wait();
    EXPECT_TRUE(at::equal(output, torch::full({33}, large + (size - 1)))) << output;
    const at::Tensor wide = torch::empty({33}, at::kDouble);
    EXPECT_THAT(error_of([&] { world.reduce_scatter(wide, input, Reduction::sum).wait(); }),
                HasSubstr("they must be of one dtype"));
  }
}

TEST_P(MpiCommunicatorTest, EveryRankEndsWithTheSameBits) {
  torch::manual_seed(17 + rank);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const auto reduction : {Reduction::sum, Reduction::max}) {
      at::Tensor tensor = torch::randn({1021}, at::kDouble).to(dtype);
      if (rank == 0) tensor[5] = std::numeric_limits<double>::quiet_NaN();
      if (rank == size - 1) tensor[7] = -std::numeric_limits<double>::infinity();
      world.all_reduce(tensor, reduction).wait();
      const at::Tensor all = at::empty({size, 1021}, dtype);
      world.all_gather(all, tensor).wait();
      for (int other = 0; other < size; ++other) {
        EXPECT_TRUE(at::equal(bits(all[other]), bits(tensor))) << dtype << ", rank " << other;
      }
      EXPECT_TRUE(tensor[5].isnan().item<bool>()) << dtype << ": a NaN was lost";
    }
  }
}

TEST_P(MpiCommunicatorTest, BroadcastGivesEachRootsValuesInEveryDtype) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kLong, at::kBool, at::kComplexDouble}) {
    for (int root = 0; root < size; ++root) {
      const at::Tensor tensor = contribution(rank, {5, 7}, at::kLong).to(dtype);
      world.broadcast(tensor, root).wait();
      EXPECT_TRUE(at::equal(tensor, contribution(root, {5, 7}, at::kLong).to(dtype)));
    }
  }
}

TEST_P(MpiCommunicatorTest, AllGatherPutsTheInputsInTheOrderOfTheRanks) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kBool, at::kComplexFloat, at::kLong}) {
    for (const auto length : kLengths) {
      const auto of = [&](int other) { return contribution(other, {length}, at::kLong).to(dtype); };
      const at::Tensor output = at::empty({size, length}, dtype);
      world.all_gather(output, of(rank)).wait();
      for (int other = 0; other < size; ++other) EXPECT_TRUE(at::equal(output[other], of(other)));
    }
  }
}

TEST_P(MpiCommunicatorTest, AllGatherWorksInPlaceAndFromAnotherPartOfItsOutput) {
  const at::Tensor output = at::zeros({size, 31});
  output[rank].copy_(contribution(rank, {31}, at::kFloat));
  world.all_gather(output, output[rank]).wait();
  for (int other = 0; other < size; ++other) {
    EXPECT_TRUE(at::equal(output[other], contribution(other, {31}, at::kFloat)));
  }

  const int next = (rank + 1) % size;
  world.all_gather(output, output[next]).wait();
  for (int other = 0; other < size; ++other) {
    EXPECT_TRUE(at::equal(output[other], contribution((other + 1) % size, {31}, at::kFloat)));
  }
}

TEST_P(MpiCommunicatorTest, ReduceScatterGivesEachRankItsPart) {
  for (const auto dtype : kReducible) {
    for (const auto length : kLengths) {
      for (const auto reduction : {Reduction::sum, Reduction::max}) {
        const at::Tensor output = at::empty({length}, dtype);
        const at::Tensor input = contribution(rank, {size, length}, dtype);
        world.reduce_scatter(output, input, reduction).wait();
        expect_same(output, expected(size, reduction, [&](int of) {
                      return contribution(of, {size, length}, dtype);
                    })[rank]);
        EXPECT_TRUE(at::equal(input, contribution(rank, {size, length}, dtype)));
      }
    }
  }
}

TEST_P(MpiCommunicatorTest, ReduceScatterIntoItsOwnPartLeavesTheOthers) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto of = [&](int other) { return contribution(other, {size, 19}, dtype); };
    const at::Tensor input = of(rank);
    world.reduce_scatter(input[rank], input, Reduction::sum).wait();
    at::Tensor wanted = of(rank);
    wanted[rank].copy_(expected(size, Reduction::sum, of)[rank]);
    expect_same(input, wanted);
  }
}

TEST_P(MpiCommunicatorTest, TensorsWithGapsOrTransposedGoByTheirIndices) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto of = [&](int other) { return contribution(other, {6, 11}, dtype); };
    const at::Tensor memory = at::full({11, 12}, -1, dtype);
    // Rank 0's lies otherwise than the rest.
    const at::Tensor tensor =
        rank == 0 ? of(0) : memory.narrow(1, 0, 12).slice(1, 0, 12, 2).transpose(0, 1);
    tensor.copy_(of(rank));
    world.all_reduce(tensor, Reduction::sum).wait();
    expect_same(tensor, expected(size, Reduction::sum, of));
    if (rank != 0) {
      EXPECT_TRUE((memory.slice(1, 1, 12, 2) == -1).all().item<bool>());
    }

    tensor.copy_(of(rank));
    world.broadcast(tensor, size - 1).wait();
    EXPECT_TRUE(at::equal(tensor, of(size - 1)));

    const at::Tensor gathered = at::empty({66, size}, dtype).t();
    world.all_gather(gathered, of(rank).t()).wait();
    for (int other = 0; other < size; ++other) {
      EXPECT_TRUE(at::equal(gathered[other].view({11, 6}), of(other).t()));
    }
  }
}

TEST_P(MpiCommunicatorTest, ManyMayBeUnderWayAndBeAskedForInAnyOrder) {
  // Ranks ask in different orders, so that they reach second stages at different times.
  const auto of = [&](int other, int64_t number) {
    return contribution(other, {200 + number}, number % 3 == 0 ? at::kFloat : at::kBFloat16);
  };
  constexpr int64_t kRequests = 24;
  std::vector<at::Tensor> tensors;
  std::vector<Work> requests;
  for (int64_t i = 0; i < kRequests; ++i) {
    tensors.push_back(of(rank, i));
    requests.push_back(world.all_reduce(tensors.back(), Reduction::sum));
    if (rank % 2 == 1) requests[static_cast<std::size_t>(i / 2)].ready();
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[rank % 2 == 0 ? requests.size() - 1 - i : i].wait();
  }
  for (int64_t i = 0; i < kRequests; ++i) {
    expect_same(tensors[static_cast<std::size_t>(i)],
                expected(size, Reduction::sum, [&](int other) { return of(other, i); }));
  }
}

TEST_P(MpiCommunicatorTest, ReadyComesTrueByAskingAlone) {
  const at::Tensor tensor = contribution(rank, {1000}, at::kBFloat16);
  Work request = world.all_reduce(tensor, Reduction::sum);
  while (!request.ready()) std::this_thread::yield();
  expect_same(tensor, expected(size, Reduction::sum, [](int other) {
                return contribution(other, {1000}, at::kBFloat16);
              }));
  request.wait();
  request.wait();
}

TEST_P(MpiCommunicatorTest, TensorsThatTheCallerDropsStayUntilTheyAreDone) {
  at::Tensor kept = contribution(rank, {4000}, at::kDouble);
  std::vector<Work> requests;
  for (int i = 0; i < 8; ++i) {
    requests.push_back(world.all_reduce(contribution(rank, {4000}, at::kDouble), Reduction::sum));
    const at::Tensor takes_its_place = at::full({4000}, 1e300, at::kDouble);
  }
  requests.push_back(world.all_reduce(kept, Reduction::sum));
  for (auto& request : requests) request.wait();
  expect_same(kept, expected(size, Reduction::sum,
                             [](int other) { return contribution(other, {4000}, at::kDouble); }));
}

TEST_P(MpiCommunicatorTest, BarrierHoldsUntilAllHaveCome) {
  Work request;
  if (rank != size - 1 || size == 1) request = world.barrier();
  int arrived = 0;
  if (rank == size - 1 && size > 1) {
    // The others cannot be ready: this rank has not called.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    arrived = 1;
    request = world.barrier();
  } else if (size > 1) {
    EXPECT_FALSE(request.ready());
  }
  request.wait();
  const at::Tensor flag = torch::tensor({arrived});
  world.all_reduce(flag, Reduction::max).wait();
  EXPECT_EQ(flag.item<int>(), size > 1 ? 1 : 0);
}

TEST_P(MpiCommunicatorTest, WhatIsWrittenCountsAsAnInPlaceOperation) {
  const at::Tensor weight = torch::ones({3}).requires_grad_();
  const at::Tensor factor = torch::ones({3});
  const at::Tensor product = weight * factor;  // keeps `factor` for backward
  const auto version = factor._version();
  world.all_reduce(factor, Reduction::sum).wait();
  EXPECT_GT(factor._version(), version);
  EXPECT_THAT(error_of([&] { product.sum().backward(); }),
              HasSubstr("modified by an inplace operation"));

  world.broadcast(weight, 0).wait();  // a leaf, outside of NoGradGuard
  EXPECT_TRUE(weight.is_leaf());
}

TEST_P(MpiCommunicatorTest, WrongArgumentsAreNamedBeforeAnythingIsSent) {
  const at::Tensor three = torch::zeros({3});
  EXPECT_THAT(error_of([&] { world.broadcast(three, size).wait(); }),
              AllOf(HasSubstr("broadcast on rank " + std::to_string(rank)), HasSubstr("`root`")));
  EXPECT_THAT(error_of([&] { world.all_reduce({}, Reduction::sum).wait(); }),
              HasSubstr("`tensor` is undefined"));
  EXPECT_THAT(error_of([&] { world.all_reduce(three.to(at::kBool), Reduction::sum).wait(); }),
              HasSubstr("bools have no sum"));
  EXPECT_THAT(
      error_of([&] { world.all_reduce(three.to(at::kComplexFloat), Reduction::sum).wait(); }),
      HasSubstr("ComplexFloat cannot be reduced"));
  EXPECT_THAT(error_of([&] { world.all_reduce(three[0].expand({4}), Reduction::sum).wait(); }),
              HasSubstr("share memory"));
  EXPECT_THAT(error_of([&] { world.all_reduce(three.to_sparse(), Reduction::sum).wait(); }),
              HasSubstr("dense"));
  EXPECT_THAT(error_of([&] { world.all_reduce(three.to(at::kMeta), Reduction::sum).wait(); }),
              HasSubstr("does not serve"));
  EXPECT_THAT(error_of([&] { world.all_gather(at::zeros({3 * size + 1}), three).wait(); }),
              AllOf(HasSubstr("`output` must have " + std::to_string(size) + " times"),
                    HasSubstr("but has " + std::to_string(3 * size + 1))));
  EXPECT_THAT(error_of([&] { world.all_gather(at::zeros({3 * size}, at::kHalf), three).wait(); }),
              HasSubstr("of one dtype"));
  EXPECT_THAT(error_of([&] { world.reduce_scatter(three, three[0], Reduction::sum).wait(); }),
              HasSubstr("`input` must have"));
  world.barrier().wait();  // and the ranks are still in step
}

TEST(MpiCommunicatorOptions, OutOfRangeAreNamed) {
  EXPECT_THAT(error_of([] { MpiCommunicator(MPI_COMM_WORLD, {.max_bytes = 0}); }),
              HasSubstr("`max_bytes` must be 1 to 2^30, but is 0"));
}

TEST(MpiCommunicator, RanksThatCallDifferentThingsAllLearnWhichAndGoOn) {
  MpiCommunicator world(MPI_COMM_WORLD);
  if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const int last = world.size() - 1;
  const std::string self = "on rank " + std::to_string(world.rank());
  const std::string other = "rank " + std::to_string(last) + " called ";
  const at::Tensor tensor = torch::ones({10});

  const auto expect_error = [&](auto of_the_last, auto of_the_others, const std::string& words) {
    EXPECT_THAT(error_of([&] {
                  Work request = world.rank() == last ? of_the_last() : of_the_others();
                  request.wait();
                }),
                AllOf(HasSubstr(self), HasSubstr(other + words)));
  };
  const auto sum = [&] { return world.all_reduce(tensor, Reduction::sum); };
  expect_error([&] { return world.broadcast(tensor, 0); }, sum,
               "broadcast from rank 0 of 10 Float where rank 0 called all_reduce(sum) of 10 Float "
               "(collective number 1 of this communicator)");
  expect_error([&] { return world.all_reduce(tensor, Reduction::max); }, sum,
               "all_reduce(max) of 10 Float where rank 0 called all_reduce(sum) of 10 Float");
  expect_error([&] { return world.all_reduce(tensor.narrow(0, 0, 9), Reduction::sum); }, sum,
               "all_reduce(sum) of 9 Float where rank 0 called all_reduce(sum) of 10 Float");
  expect_error([&] { return world.all_reduce(tensor.to(at::kHalf), Reduction::sum); }, sum,
               "all_reduce(sum) of 10 Half where");
  expect_error([&] { return world.barrier(); }, sum, "barrier where");
  expect_error([&] { return world.broadcast(tensor, 1); },
               [&] { return world.broadcast(tensor, 0); }, "broadcast from rank 1 of 10 Float");

  EXPECT_TRUE(at::equal(tensor, torch::ones({10}))) << "nothing was sent";
  sum().wait();
  EXPECT_TRUE(at::equal(tensor, torch::full({10}, static_cast<float>(world.size()))));
}

TEST(MpiCommunicator, WhatMpiReportsIsThrownWithItsWordsAndEndsTheCommunicator) {
  MpiCommunicator world(MPI_COMM_WORLD, {.check_calls = false});
  if (world.size() != 2) GTEST_SKIP() << "for two ranks";
  const at::Tensor tensor = torch::ones({world.rank() == 0 ? 100 : 10});
  Work request = world.broadcast(tensor, 0);
  if (world.rank() == 0) {
    request.wait();
  } else {
    EXPECT_THAT(error_of([&] { request.wait(); }),
                AllOf(HasSubstr("broadcast from rank 0 of 10 Float on rank 1 of 2: MPI_"),
                      HasSubstr("MPI_ERR_TRUNCATE")));
    EXPECT_THAT(error_of([&] { world.barrier().wait(); }),
                AllOf(HasSubstr("barrier on rank 1 of 2: this communicator failed earlier"),
                      HasSubstr("MPI_ERR_TRUNCATE")));
  }
}

TEST(MpiCommunicator, AForgottenRequestWarnsAndDoesNoHarm) {
  struct Warnings : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  };
  MpiCommunicator world(MPI_COMM_WORLD);
  Warnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    const Work forgotten = world.all_reduce(torch::ones({5000}, at::kBFloat16), Reduction::sum);
  }
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_THAT(warnings.texts[0],
              HasSubstr("nobody waited for all_reduce(sum) of 5000 BFloat16 on rank"));

  const at::Tensor next = torch::ones({2}, at::kBFloat16);
  world.all_reduce(next, Reduction::sum).wait();
  EXPECT_EQ(next[0].item<float>(), static_cast<float>(world.size()));
}

TEST(MpiCommunicator, OneThatGoesWithACollectiveUnderWayTakesNoMemoryAlong) {
  Work request;
  const at::Tensor tensor = torch::ones({3000});
  {
    MpiCommunicator soon_gone(MPI_COMM_WORLD);
    request = soon_gone.all_reduce(tensor, Reduction::sum);
  }
  request.wait();
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  EXPECT_TRUE(at::equal(tensor, torch::full({3000}, static_cast<float>(size))));
}

TEST(MpiCommunicator, CommunicatorsDoNotMeetEachOther) {
  MpiCommunicator world(MPI_COMM_WORLD);
  MPI_Comm half_comm = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world.rank() % 2, world.rank(), &half_comm);
  {
    MpiCommunicator half(half_comm);
    const at::Tensor in_half = torch::ones({100});
    const at::Tensor in_world = torch::ones({100});
    Work first, second;
    if (world.rank() % 2 == 0) {
      first = half.all_reduce(in_half, Reduction::sum);
      second = world.all_reduce(in_world, Reduction::sum);
    } else {
      second = world.all_reduce(in_world, Reduction::sum);
      first = half.all_reduce(in_half, Reduction::sum);
    }
    first.wait();
    second.wait();
    EXPECT_EQ(in_half[0].item<int>(), half.size());
    EXPECT_EQ(in_world[0].item<int>(), world.size());
  }
  MPI_Comm_free(&half_comm);
}

int thread_level() {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  return level;
}

TEST(MpiThreads, CollectivesAreCalledFromAnyThreadWhereMpiAllowsIt) {
  if (thread_level() < MPI_THREAD_SERIALIZED) GTEST_SKIP() << "MPI was initialised for one thread";
  MpiCommunicator world(MPI_COMM_WORLD);
  MpiCommunicator other(MPI_COMM_WORLD);
  const auto sum_twenty_times = [](MpiCommunicator communicator, at::Tensor sum) {
    for (int i = 0; i < 20; ++i) communicator.all_reduce(sum, Reduction::max).wait();
    communicator.all_reduce(sum, Reduction::sum).wait();
  };
  const at::Tensor a = torch::ones({300}), b = torch::ones({300}, at::kBFloat16);
  std::thread thread(sum_twenty_times, other, a);
  sum_twenty_times(world, b);
  thread.join();
  EXPECT_EQ(a[0].item<int>(), world.size());
  EXPECT_EQ(b[0].item<int>(), world.size());
}

TEST(MpiThreads, AnotherThreadIsRefusedWhereMpiDoesNotAllowIt) {
  if (thread_level() >= MPI_THREAD_SERIALIZED) GTEST_SKIP() << "MPI allows any thread";
  MpiCommunicator world(MPI_COMM_WORLD);
  std::string error;
  std::thread([&] { error = error_of([&] { world.barrier().wait(); }); }).join();
  EXPECT_THAT(error, HasSubstr("initialise it with MPI_THREAD_SERIALIZED or more"));
  world.barrier().wait();
}

// Run alone, by a test that wants it to fail (CMakeLists.txt): the others wait for the last rank.
TEST(MpiTests, DISABLED_TheLastRankFails) {
  MpiCommunicator world(MPI_COMM_WORLD);
  if (world.rank() == world.size() - 1) {
    FAIL() << "on purpose";
  }
  world.barrier().wait();
}

TEST(MpiEnvironment, LeavesMpiToWhomeverInitialisedIt) {
  {
    const mezzo::MpiEnvironment inner;
    EXPECT_FALSE(inner.initialised_it());
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  EXPECT_FALSE(finalized);
  MpiCommunicator(MPI_COMM_WORLD).barrier().wait();
}

}  // namespace
