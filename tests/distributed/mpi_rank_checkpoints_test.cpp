#include <torch/torch.h>
//
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/mpi_communicator.h>
#include <mezzo/distributed/rank_checkpoints.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/scaling/grad_scaler.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/error_of.h"
#include "../support/scratch.h"

namespace rank_checkpoints_test {

/// An object that some ranks cannot save, or load.
struct Fussy {
  bool refuses_saving = false;
  bool refuses_loading = false;
  int64_t value = 0;
};

inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const Fussy& fussy) {
  if (fussy.refuses_saving) throw std::runtime_error("I will not be saved");
  archive.write("value", c10::IValue(fussy.value));
  return archive;
}

inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  Fussy& fussy) {
  c10::IValue value;
  archive.read("value", value);
  fussy.value = value.toInt();
  if (fussy.refuses_loading) throw std::runtime_error("I will not be loaded");
  return archive;
}

namespace {

using mezzo::CheckpointManager;
using mezzo::Communicator;
using mezzo::RankCheckpoints;
using mezzo::TrainingState;
using mezzo::detail::FileCalls;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using test_support::error_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;

/// To be made by all ranks together.
Communicator everyone() { return mezzo::MpiCommunicator(MPI_COMM_WORLD); }

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// `text` of the world's rank 0, on all ranks.
std::string text_of_rank_0(const std::string& text) {
  Communicator world = everyone();
  const at::Tensor bytes = at::zeros({4096}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), std::min<std::size_t>(text.size(), 4095));
  world.broadcast(bytes, 0).wait();
  return static_cast<const char*>(bytes.const_data_ptr());
}

std::vector<std::string> texts_of(Communicator ranks, const std::string& own) {
  return mezzo::detail::RankAgreement(std::move(ranks)).gather(own);
}

/// What all ranks throw, if those are the same words; what two of them throw otherwise.
template <class Call>
std::string common_error_of(Communicator ranks, const Call& call) {
  const std::vector<std::string> errors = texts_of(std::move(ranks), error_of(call));
  for (const std::string& error : errors) {
    if (error != errors[0]) return "different words:\n" + errors[0] + "\nand\n" + error;
  }
  return errors[0];
}

/// A folder of rank 0's that all ranks use; it goes when all are done with it.
class SharedFolder {
 public:
  SharedFolder() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0) own_.emplace();
    path_ = text_of_rank_0(rank == 0 ? own_->path().string() : "");
  }
  ~SharedFolder() { MPI_Barrier(MPI_COMM_WORLD); }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::vector<std::string> temporaries() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      if (entry.path().extension() == ".tmp") found.push_back(entry.path().string());
    }
    return found;
  }

 private:
  std::optional<test_support::Scratch> own_;
  std::filesystem::path path_;
};

/// The first ranks of the world; the others have no part in it.
class SomeRanks {
 public:
  explicit SomeRanks(int size) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank < size ? 0 : MPI_UNDEFINED, rank, &communicator_);
  }
  ~SomeRanks() {
    if (communicator_ != MPI_COMM_NULL) MPI_Comm_free(&communicator_);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  SomeRanks(const SomeRanks&) = delete;
  SomeRanks& operator=(const SomeRanks&) = delete;

  bool has_this() const { return communicator_ != MPI_COMM_NULL; }
  Communicator ranks() const { return mezzo::MpiCommunicator(communicator_); }

 private:
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

std::vector<int> numbers_of_ranks() {
  std::vector<int> all;
  for (const int size : {1, 2, 4}) {
    if (size <= world_size()) all.push_back(size);
  }
  return all;
}

mezzo::CheckpointManagerOptions warning_into(std::vector<std::string>& warnings) {
  return {.on_warning = [&warnings](const std::string& text) { warnings.push_back(text); }};
}

using ShardedAdamW = mezzo::ShardedOptimizer<AdamW>;
constexpr mezzo::ShardedOptimizerOptions kSmallShards{.bucket_bytes = 512};

torch::nn::Sequential make_net(bool has_buffers) {
  torch::nn::Sequential net(torch::nn::Linear(6, 17));
  if (has_buffers) net->push_back(torch::nn::BatchNorm1d(17));
  net->push_back(torch::nn::Dropout(0.4));
  net->push_back(torch::nn::Linear(17, 3));
  return net;
}

/// Gradients in bfloat16 with error feedback, averaged; running statistics.
struct Averaging {
  Averaging(Communicator world, const std::function<at::Tensor()>& loss_scale)
      : net(make_net(true)),
        ddp(net, std::move(world),
            {.bucket_bytes = 512,
             .all_reduce = {.compress_dtype = at::kBFloat16,
                            .error_feedback = true,
                            .loss_scale = loss_scale}}),
        optimizer(ddp.buckets(), AdamWOptions(1e-2)),
        residuals(ddp.residuals()) {}
  at::Tensor forward(const at::Tensor& x) { return ddp(x); }

  torch::nn::Sequential net;
  mezzo::DataParallel<torch::nn::Sequential> ddp;
  AdamW optimizer;
  std::vector<at::Tensor> residuals;
};

struct Sharding {
  Sharding(Communicator world, const std::function<at::Tensor()>& /*loss_scale*/)
      : net(make_net(false)),
        optimizer(net->parameters(), std::move(world), AdamWOptions(1e-2), kSmallShards) {}
  at::Tensor forward(const at::Tensor& x) { return net->forward(x); }

  torch::nn::Sequential net;
  ShardedAdamW optimizer;
  std::vector<at::Tensor> residuals;
};

/// All that a run has, with an inf now and then.
template <class Way>
class EachRanksTraining {
 public:
  EachRanksTraining(Communicator world, uint64_t seed)
      : rank_(world.rank()),
        way((torch::manual_seed(seed), world), [this] { return scaler.scale(torch::ones({})); }) {
    torch::manual_seed(seed + 100 * static_cast<uint64_t>(rank_ + 1));
    own_random.set_current_seed(seed + static_cast<uint64_t>(rank_));
    state.add("model", way.net).add("optimizer", way.optimizer).add("scaler", scaler);
    state.add("schedule", schedule).add("position", position).with_random_state();
    state.add_per_rank("order", own_random).add_per_rank("seen", seen);
    if (!way.residuals.empty()) state.add_per_rank("residuals", way.residuals);
  }

  void step() {
    way.optimizer.zero_grad();
    at::Tensor loss = way.forward(torch::randn({4, 6}, own_random)).square().mean();
    if (position % 5 == 3 && rank_ == 0) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    const auto result = scaler.step(way.optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);
    ++position;
    seen += 4 + rank_;
  }

  std::vector<at::Tensor> outcome() {
    std::vector<at::Tensor> all;
    for (const auto& tensor : way.net->parameters()) all.push_back(tensor.detach().clone());
    for (const auto& tensor : way.net->buffers()) all.push_back(tensor.clone());
    for (const auto& tensor : way.residuals) all.push_back(tensor.clone());
    for (const auto& [key, value] : scaler.state_dict()) all.push_back(torch::tensor(value));
    for (const double lr : schedule.lrs()) all.push_back(torch::tensor(lr, torch::kDouble));
    all.push_back(torch::tensor({position, seen}));
    all.push_back(torch::rand({3}));
    all.push_back(torch::rand({3}, own_random));
    return all;
  }

 private:
  int rank_;

 public:
  mezzo::GradScaler scaler{mezzo::GradScalerOptions().init_scale(8).growth_interval(3)};
  Way way;
  mezzo::LinearSchedule schedule{way.optimizer, {.warmup_steps = 3, .total_steps = 40}};
  int64_t position = 0;
  int64_t seen = 0;
  at::Generator own_random = at::detail::createCPUGenerator(0);
  TrainingState state;
};

template <class Way>
void expect_the_same_bits_after_resuming() {
  const SharedFolder folder;
  Communicator world = everyone();
  EachRanksTraining<Way> whole(world, 1);
  whole.scaler.on_skip(nullptr);
  for (int i = 0; i < 7; ++i) whole.step();
  RankCheckpoints(folder.path(), world).save(whole.state, whole.position);
  for (int i = 0; i < 7; ++i) whole.step();
  const auto expected = whole.outcome();

  std::vector<std::string> warnings;
  EachRanksTraining<Way> resumed(world, 2);
  resumed.scaler.on_skip(nullptr);
  resumed.step();  // has state of its own, which must leave no trace
  const auto loaded =
      RankCheckpoints(folder.path(), world, warning_into(warnings)).load_newest(resumed.state);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->step, 7);
  EXPECT_THAT(warnings, IsEmpty());
  for (int i = 0; i < 7; ++i) resumed.step();
  const auto actual = resumed.outcome();
  ASSERT_EQ(expected.size(), actual.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(expected[i], actual[i])) << i << '\n' << expected[i] << actual[i];
  }
}

TEST(RankCheckpoints, TheSameNumberOfRanksResumesToTheBit) {
  expect_the_same_bits_after_resuming<Averaging>();
}

TEST(RankCheckpoints, TheSameNumberOfRanksResumesToTheBitWithAShardedOptimizer) {
  expect_the_same_bits_after_resuming<Sharding>();
}

/// Every rank computes the same, so that any number of ranks takes the steps of one alone.
template <class Optimizer>
void take_steps(torch::nn::Sequential net, Optimizer& optimizer, int first, int last) {
  torch::manual_seed(5);
  for (int i = 0; i < last; ++i) {
    const at::Tensor x = torch::randn({4, 6});
    if (i < first) continue;
    optimizer.zero_grad();
    net->forward(x).square().mean().backward();
    optimizer.step();
  }
}

torch::nn::Sequential net_without_dropout(uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(6, 17), torch::nn::Linear(17, 3));
}

/// One of some number of ranks, or (with an AdamW) a process that knows of none.
template <class Optimizer>
struct Alike {
  template <class... Args>
  explicit Alike(uint64_t seed, const Args&... args)
      : net(net_without_dropout(seed)), optimizer(net->parameters(), args...) {
    state.add("model", net).add("optimizer", optimizer).add("position", position);
    state.with_random_state();
  }
  void run(int first, int last) {
    take_steps(net, optimizer, first, last);
    position = last;
  }
  void expect_weights_of(const torch::nn::Sequential& other, const std::string& who) const {
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(net->parameters()[i], other->parameters()[i])) << who << ' ' << i;
    }
  }

  torch::nn::Sequential net;
  Optimizer optimizer;
  int64_t position = 0;
  TrainingState state;
};

using AlikeAlone = Alike<AdamW>;
struct AlikeShard : Alike<ShardedAdamW> {
  AlikeShard(uint64_t seed, Communicator ranks)
      : Alike(seed, std::move(ranks), AdamWOptions(1e-2), kSmallShards) {}
};

TEST(RankCheckpoints, AnyNumberOfRanksAndAProcessAloneGoOnFromEachOthersFiles) {
  AlikeAlone whole(1, AdamWOptions(1e-2));
  whole.run(0, 5);
  for (int savers : numbers_of_ranks()) {
    for (const bool is_plain : {false, true}) {
      if (is_plain && savers > 1) continue;
      const SharedFolder folder;
      {
        const SomeRanks group(savers);
        if (group.has_this() && is_plain) {
          AlikeAlone run(1, AdamWOptions(1e-2));
          run.run(0, 3);
          CheckpointManager(folder.path()).save(run.state, 3);
        } else if (group.has_this()) {
          AlikeShard run(1, group.ranks());
          run.run(0, 3);
          RankCheckpoints(folder.path(), group.ranks()).save(run.state, 3);
        }
      }
      const std::string from = "from " + std::to_string(savers) + (is_plain ? " alone" : "");
      for (int loaders : numbers_of_ranks()) {
        const SomeRanks group(loaders);
        if (!group.has_this()) continue;
        std::vector<std::string> warnings;
        AlikeShard run(7, group.ranks());
        run.run(0, 1);
        const auto loaded = RankCheckpoints(folder.path(), group.ranks(), warning_into(warnings))
                                .load_newest(run.state);
        ASSERT_TRUE(loaded && loaded->step == 3);
        EXPECT_EQ(run.position, 3);
        run.run(3, 5);
        run.expect_weights_of(whole.net, from + " to " + std::to_string(loaders));
        const bool is_told = group.ranks().rank() == 0 && loaders != savers;
        EXPECT_THAT(warnings, SizeIs(is_told ? 1 : 0));
      }
      std::vector<std::string> warnings;
      AlikeAlone alone(7, AdamWOptions(1e-2));
      ASSERT_TRUE(
          CheckpointManager(folder.path(), warning_into(warnings)).load_newest(alone.state));
      alone.run(3, 5);
      alone.expect_weights_of(whole.net, from + " to CheckpointManager");
      if (savers > 1) {
        EXPECT_THAT(warnings, ElementsAre(HasSubstr("\"random_state\" is what rank 0 had")));
      } else {
        EXPECT_THAT(warnings, IsEmpty());
      }
    }
  }
}

/// What each rank has of its own, and nothing else.
struct Own {
  explicit Own(Communicator ranks) : position(10 + ranks.rank()) {
    torch::manual_seed(40 + static_cast<uint64_t>(ranks.rank()));
    state.add("epoch", epoch).add_per_rank("position", position).with_random_state();
  }
  int64_t epoch = 1;
  int64_t position;
  TrainingState state;
};

/// Loads into ranks with other values. \returns what each draws first then
std::vector<std::string> draws_after_loading(const std::filesystem::path& folder,
                                             Communicator ranks) {
  std::vector<std::string> warnings;
  Own run(ranks);
  run.position = 77;
  run.epoch = 5;
  RankCheckpoints(folder, ranks, warning_into(warnings)).load_newest(run.state);
  EXPECT_EQ(run.epoch, 1);
  EXPECT_EQ(run.position, 77);
  if (ranks.rank() == 0) {
    const std::string numbers = "has what " + std::to_string(world_size()) +
                                " ranks had, and here are " + std::to_string(ranks.size());
    EXPECT_THAT(warnings,
                UnorderedElementsAre(
                    AllOf(HasSubstr("\"position\" is left as it is"), HasSubstr(numbers)),
                    AllOf(HasSubstr("\"random_state\" is begun anew"), HasSubstr(numbers))));
  } else {
    EXPECT_THAT(warnings, IsEmpty());
  }
  return texts_of(ranks, std::to_string(torch::rand({}, at::kDouble).item<double>()));
}

TEST(RankCheckpoints, ToAnotherNumberOfRanksGeneratorsBeginAnewAndTheRestIsLeftAndNamed) {
  if (world_size() < 2) return;
  const SharedFolder folder;
  Own saved(everyone());
  RankCheckpoints(folder.path(), everyone()).save(saved.state, 6);
  for (const int loaders : numbers_of_ranks()) {
    const SomeRanks group(loaders);
    if (!group.has_this() || loaders == world_size()) continue;
    const auto draws = draws_after_loading(folder.path(), group.ranks());
    EXPECT_EQ(draws, draws_after_loading(folder.path(), group.ranks())) << "alike each time";
    for (std::size_t i = 1; i < draws.size(); ++i) EXPECT_NE(draws[i], draws[0]);
  }
}

TEST(RankCheckpoints, WhatTheFileHasNotGotOfEachRankIsLeftAndNamed) {
  const SharedFolder folder;
  int64_t epoch = 3;
  TrainingState common;
  common.add("epoch", epoch);
  RankCheckpoints(folder.path(), everyone()).save(common, 1);
  Own run(everyone());
  std::vector<std::string> warnings;
  RankCheckpoints(folder.path(), everyone(), warning_into(warnings)).load_newest(run.state);
  EXPECT_EQ(run.epoch, 3);
  EXPECT_EQ(run.position, 10 + everyone().rank());
  EXPECT_THAT(warnings, SizeIs(everyone().rank() == 0 ? 2 : 0));

  // And the other way round: what the state does not name is left out, with a word.
  RankCheckpoints(folder.path(), everyone()).save(run.state, 2);
  warnings.clear();
  if (world_size() == 1) return;  // an object like others then
  RankCheckpoints(folder.path(), everyone(), warning_into(warnings)).load_newest(common);
  EXPECT_THAT(warnings, SizeIs(everyone().rank() == 0 ? 2 : 0));
  for (const std::string& warning : warnings) EXPECT_THAT(warning, HasSubstr("is left out"));
}

/// More than one piece holds.
constexpr int64_t kTwoPieces = 1'100'000;

/// A state with a collective in it, and some of each rank's own.
struct Mixed {
  explicit Mixed(Communicator ranks, int64_t elements = 100)
      : run(3, ranks), own{torch::full({elements}, ranks.rank(), at::kFloat)} {
    run.state.add_per_rank("own", own).add("fussy", fussy);
    run.run(0, 2);
  }
  bool is(int64_t value) const { return fussy.value == value && run.position == value; }
  void set(int64_t value) { fussy.value = run.position = value; }

  AlikeShard run;
  std::vector<at::Tensor> own;
  Fussy fussy;
};

TEST(RankCheckpoints, AFullDiskOfRank0IsToldToAllAndTheNextSaveGoesWell) {
  const SharedFolder folder;
  Communicator world = everyone();
  Mixed mixed(world, kTwoPieces);
  mixed.set(2);
  RankCheckpoints(folder.path(), world).save(mixed.run.state, 2);
  bool has_failed = true;
  int failures = 0;
  for (int number = 1; has_failed; number += number < 2 ? 1 : 2 * world_size()) {
    FileCalls calls;
    int left = number;
    calls.write = [&left](int file, const void* from, std::size_t count) -> ssize_t {
      if (--left > 0) return ::write(file, from, count);
      errno = ENOSPC;
      return -1;
    };
    RankCheckpoints checkpoints(folder.path(), world, {.keep = 1}, calls);
    mixed.set(3);
    const std::string error = common_error_of(world, [&] { checkpoints.save(mixed.run.state, 3); });
    has_failed = error != "no error";
    if (!has_failed) break;
    ++failures;
    EXPECT_THAT(error, AllOf(HasSubstr("RankCheckpoints::save: rank 0 of"),
                             HasSubstr("No space left on device")));
    world.barrier().wait();
    EXPECT_THAT(folder.temporaries(), IsEmpty());
    EXPECT_THAT(checkpoints.files(), SizeIs(1));
    EXPECT_THAT(checkpoints.files()[0].filename().string(), HasSubstr("step-2"));
    left = std::numeric_limits<int>::max();
    if (number != 2) continue;
    const auto saved = checkpoints.save(mixed.run.state, 2);
    world.barrier().wait();
    EXPECT_EQ(std::filesystem::file_size(saved.file), saved.bytes);
    Mixed other(world, kTwoPieces);
    other.own[0].zero_();
    EXPECT_EQ(checkpoints.load_newest(other.run.state)->file, saved.file);
    EXPECT_TRUE(other.is(3));
    EXPECT_TRUE(at::equal(other.own[0], mixed.own[0]));
  }
  EXPECT_GT(failures, 2) << "a write for each MiB";
}

TEST(RankCheckpoints, OnlyRank0Writes) {
  const SharedFolder folder;
  Communicator world = everyone();
  int calls_made = 0;
  FileCalls calls;
  calls.open = [&, real = calls.open](const char* path, int flags) {
    return ++calls_made, real(path, flags);
  };
  calls.write = [&](int file, const void* from, std::size_t count) {
    return ++calls_made, ::write(file, from, count);
  };
  Mixed mixed(world);
  RankCheckpoints checkpoints(folder.path(), world, {}, calls);
  const auto saved = checkpoints.save(mixed.run.state, 1);
  EXPECT_EQ(calls_made > 0, world.rank() == 0);
  EXPECT_TRUE(std::filesystem::exists(saved.file)) << "when save returns, on any rank";
  EXPECT_TRUE(saved.durable);
  EXPECT_EQ(std::filesystem::file_size(saved.file), saved.bytes);
}

TEST(RankCheckpoints, WhereOneRankCannotSaveNoneDoesAndTheNextSaveGoesWell) {
  const SharedFolder folder;
  Communicator world = everyone();
  const int last = world.size() - 1;
  for (int victim = 0; victim <= last; ++victim) {
    TrainingState state;
    Fussy fussy;
    AlikeShard run(3, world);
    run.run(0, 2);
    // Before the one that refuses, and behind it, is one for which all ranks must come.
    state.add("before", run.optimizer).add("fussy", fussy);
    AlikeShard other(4, world);
    state.add("behind", other.optimizer);
    RankCheckpoints checkpoints(folder.path(), world);
    const std::size_t files = checkpoints.files().size();
    world.barrier().wait();
    fussy.refuses_saving = world.rank() == victim;
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(state, 1); }),
                AllOf(HasSubstr("rank " + std::to_string(victim) + " of"), HasSubstr("\"fussy\""),
                      HasSubstr("I will not be saved")));
    EXPECT_EQ(checkpoints.files().size(), files);
    world.barrier().wait();
    fussy.refuses_saving = false;
    checkpoints.save(state, 1);
    EXPECT_GE(checkpoints.files().size(), 1U);
    world.barrier().wait();
  }
}

/// Which is found before a ShardedOptimizer waits for the rank that has them.
TEST(RankCheckpoints, AveragesInTheWeightsOfOneRankAreToldToAll) {
  const SharedFolder folder;
  Communicator world = everyone();
  Mixed mixed(world);
  mezzo::Ema ema(mixed.run.net->parameters());
  RankCheckpoints checkpoints(folder.path(), world);
  checkpoints.save(mixed.run.state, 1);
  {
    std::optional<mezzo::EmaScope> averages;
    if (world.rank() == world.size() - 1) averages.emplace(ema);
    const std::string who = "rank " + std::to_string(world.size() - 1) + " of";
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(mixed.run.state, 2); }),
                AllOf(HasSubstr(who), HasSubstr("an EmaScope is alive")));
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(mixed.run.state); }),
                AllOf(HasSubstr(who), HasSubstr("an EmaScope is alive")));
  }
  checkpoints.save(mixed.run.state, 2);
}

TEST(RankCheckpoints, WhereOneRankRefusesToLoadAllGetBackWhatTheyHad) {
  const SharedFolder folder;
  Communicator world = everyone();
  {
    Mixed mixed(world);
    mixed.set(2);
    RankCheckpoints(folder.path(), world).save(mixed.run.state, 2);
  }
  for (int victim = 0; victim < world.size(); ++victim) {
    Mixed mixed(world), untouched(world);
    mixed.run.run(2, 4);
    untouched.run.run(2, 4);
    mixed.set(9);
    mixed.own[0].fill_(50 + world.rank());
    mixed.fussy.refuses_loading = world.rank() == victim;
    RankCheckpoints checkpoints(folder.path(), world);
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(mixed.run.state); }),
                AllOf(HasSubstr("rank " + std::to_string(victim) + " of"), HasSubstr("\"fussy\""),
                      HasSubstr("I will not be loaded"),
                      HasSubstr("\"fussy\" could not be put back")));  // it refuses that too
    EXPECT_EQ(mixed.run.position, 9);
    EXPECT_EQ(mixed.fussy.value, 9);
    EXPECT_EQ(mixed.own[0][0].item<float>(), static_cast<float>(50 + world.rank()));
    mixed.run.run(4, 6);
    untouched.run.run(4, 6);
    mixed.run.expect_weights_of(untouched.run.net, "as if nothing had been");
    mixed.fussy.refuses_loading = false;
    EXPECT_TRUE(checkpoints.load_newest(mixed.run.state));
    EXPECT_TRUE(mixed.is(2));
  }
}

TEST(RankCheckpoints, OfADamagedNewestFileAllFallBackToTheSameOlderOne) {
  const SharedFolder folder;
  Communicator world = everyone();
  Mixed mixed(world);
  std::vector<std::string> warnings;
  RankCheckpoints checkpoints(folder.path(), world, warning_into(warnings));
  mixed.set(1);
  checkpoints.save(mixed.run.state, 1);
  mixed.set(2);
  const auto newest = checkpoints.save(mixed.run.state, 2);
  if (world.rank() == 0) {
    std::string bytes = test_support::bytes_of(newest.file);
    bytes[bytes.size() / 2] ^= 1;
    test_support::put_bytes(newest.file, bytes);
  }
  world.barrier().wait();
  EXPECT_EQ(checkpoints.load_newest(mixed.run.state)->step, 1);
  EXPECT_TRUE(mixed.is(1));
  EXPECT_THAT(warnings, SizeIs(world.rank() == 0 ? 1 : 0));
  // A damaged file is none of those that stay.
  checkpoints.save(mixed.run.state, 3);
  world.barrier().wait();
  EXPECT_THAT(checkpoints.files(), SizeIs(3));
}

TEST(RankCheckpoints, OfAFileThatOneRankCannotReadAllFallBack) {
  const SharedFolder folder;
  Communicator world = everyone();
  const int last = world.size() - 1;
  Mixed mixed(world);
  std::vector<std::string> warnings;
  FileCalls calls;
  bool is_broken = false;
  calls.pread = [&](int file, void* to, std::size_t count, off_t offset) -> ssize_t {
    if (!std::exchange(is_broken, false)) return ::pread(file, to, count, offset);
    errno = EIO;
    return -1;
  };
  RankCheckpoints checkpoints(folder.path(), world, warning_into(warnings), calls);
  mixed.set(1);
  checkpoints.save(mixed.run.state, 1);
  mixed.set(2);
  checkpoints.save(mixed.run.state, 2);
  is_broken = world.rank() == last;
  EXPECT_EQ(checkpoints.load_newest(mixed.run.state)->step, 1);
  EXPECT_TRUE(mixed.is(1));
  if (world.rank() == 0) {
    EXPECT_THAT(warnings, ElementsAre(AllOf(HasSubstr("Input/output error"),
                                            HasSubstr("on rank " + std::to_string(last)))));
  }
  world.barrier().wait();
  if (world.rank() == 0) {
    for (const auto& file : checkpoints.files()) test_support::put_bytes(file, "nothing");
  }
  world.barrier().wait();
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(mixed.run.state); }),
              HasSubstr("has no checkpoint that is whole"));
}

TEST(RankCheckpoints, AnEmptyFolderIsNoCheckpointOnAllRanks) {
  const SharedFolder folder;
  Own own(everyone());
  EXPECT_FALSE(RankCheckpoints(folder.path(), everyone()).load_newest(own.state));
}

TEST(RankCheckpoints, ARankWithAnotherFolderIsNamed) {
  Communicator world = everyone();
  const int last = world.size() - 1;
  if (last == 0) return;
  const SharedFolder folder;
  Own own(world);
  RankCheckpoints checkpoints(folder.path() / (world.rank() == last ? "elsewhere" : ""), world);
  checkpoints.save(own.state, 1);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(own.state); }),
              AllOf(HasSubstr("rank " + std::to_string(last) + " of"),
                    HasSubstr("all ranks must see the folder")));
}

TEST(RankCheckpoints, RanksThatDifferAreNamedWithWhatTheyHave) {
  Communicator world = everyone();
  if (world.size() == 1) return;
  const SharedFolder folder;
  RankCheckpoints checkpoints(folder.path(), world);
  const bool is_last = world.rank() == world.size() - 1;
  const std::string who = "rank " + std::to_string(world.size() - 1) + " has ";
  Own own(world);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(own.state, is_last ? 4 : 3); }),
              HasSubstr(who + "\"step 4\" where rank 0 has \"step 3\""));
  own.epoch = is_last ? 8 : 7;
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(own.state, 3); }),
              AllOf(HasSubstr(who + "\"epoch: integer 8\" where rank 0 has \"epoch: integer 7\""),
                    HasSubstr("add_per_rank")));
  TrainingState common_generator;
  at::Generator generator = at::detail::createCPUGenerator(is_last ? 1 : 2);
  common_generator.add("order", generator);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(common_generator, 3); }),
              HasSubstr(who + "\"order: generator"));
  torch::nn::Linear linear(3, is_last ? 5 : 4);
  TrainingState other_shape;
  other_shape.add("model", linear);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(other_shape, 3); }),
              HasSubstr(who + "\"model: module"));
  const TrainingState empty;
  EXPECT_THAT(
      common_error_of(world, [&] { checkpoints.save(is_last ? empty : common_generator, 3); }),
      HasSubstr("the state is empty"));
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(is_last ? empty : own.state); }),
              HasSubstr("the state is empty"));
  EXPECT_THAT(checkpoints.files(), IsEmpty());
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(other_shape, -1); }),
              HasSubstr(who + "\"model: module"));
  own.epoch = 7;
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(own.state, -1); }),
              HasSubstr("rank 0 of " + std::to_string(world.size()) +
                        ": CheckpointManager::save: step is -1"));
}

TEST(RankCheckpoints, ANameThatEntriesOfRanksTakeIsRefusedByAll) {
  Communicator world = everyone();
  if (world.size() == 1) return;
  const SharedFolder folder;
  Own own(world);
  int64_t other = 0;
  own.state.add("position, rank 1", other);
  EXPECT_THAT(
      common_error_of(world, [&] { RankCheckpoints(folder.path(), world).save(own.state, 1); }),
      HasSubstr("\"position, rank 1\" is given twice"));
}

}  // namespace
}  // namespace rank_checkpoints_test
