// ResumableSampler: the batches of a resumed epoch.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/resumable_sampler.h>
#include <mezzo/scaling/micro_batches.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/temp_dir.h"

namespace {

using mezzo::ResumableSampler;
using mezzo::TrainingState;
using test_support::message_of;
using test_support::TempDir;
using testing::HasSubstr;
using torch::data::samplers::DistributedRandomSampler;
using torch::data::samplers::RandomSampler;
using torch::data::samplers::SequentialSampler;

/// Examples that are their own indices.
struct Indices : torch::data::datasets::BatchDataset<Indices, std::vector<std::size_t>> {
  explicit Indices(std::size_t size) : num_examples(size) {}
  std::vector<std::size_t> get_batch(torch::ArrayRef<std::size_t> indices) override {
    return indices.vec();
  }
  std::optional<std::size_t> size() const override { return num_examples; }
  std::size_t num_examples;
};

/// Reads epochs of 23 examples in batches of 4, and saves after each batch and after each epoch.
template <class S>
struct Reader {
  explicit Reader(const std::filesystem::path& directory, S s, std::size_t num_workers,
                  std::size_t batch_size = 4)
      : sampler(std::move(s)),
        loader(torch::data::make_data_loader(
            Indices(23), sampler, torch::data::DataLoaderOptions(batch_size).workers(num_workers))),
        checkpoints(directory, {.max_to_keep = 100}) {
    state.add("sampler", sampler).add("epoch", epoch).add_rng_state();
  }
  /// Returns the batches until the end of epoch 3. An epoch ends with an empty one.
  std::vector<std::vector<std::size_t>> read(bool saves) {
    std::vector<std::vector<std::size_t>> batches;
    const auto save = [&] {
      if (saves) checkpoints.save(state, static_cast<int64_t>(batches.size()));
    };
    for (; epoch < 3;) {
      for (auto& batch : sampler.batches(*loader)) {
        batches.push_back(batch);
        torch::rand({1});  // dropout
        save();
      }
      batches.emplace_back();
      ++epoch;
      save();
    }
    return batches;
  }

  ResumableSampler<S> sampler;
  using Loader = decltype(torch::data::make_data_loader(
      Indices(1), std::declval<ResumableSampler<S>>(), torch::data::DataLoaderOptions()));
  Loader loader;
  int64_t epoch = 0;
  TrainingState state;
  mezzo::CheckpointManager checkpoints;
};

/// Resumes from each checkpoint of a run.
template <class S>
void expect_rest_of_batches(const S& sampler, std::size_t num_workers) {
  const TempDir temp_dir;
  torch::manual_seed(1);
  const auto expected = Reader<S>(temp_dir.path(), sampler, num_workers).read(/*saves=*/true);
  ASSERT_EQ(expected.size(), 3 * 7U);
  for (std::size_t step = 1; step <= expected.size(); ++step) {
    torch::manual_seed(100 + step);
    Reader<S> resumed(temp_dir.path(), sampler, step % 2 == 0 ? num_workers : 3 - num_workers);
    resumed.checkpoints.load(resumed.state, static_cast<int64_t>(step));
    const std::vector<std::vector<std::size_t>> rest(
        expected.begin() + static_cast<std::ptrdiff_t>(step), expected.end());
    ASSERT_EQ(resumed.read(/*saves=*/false), rest) << "resumed at " << step;
  }
}

TEST(ResumableSampler, ResumedRunReadsRestOfBatches) {
  for (const std::size_t num_workers : {0U, 1U, 3U}) {
    SCOPED_TRACE(num_workers);
    expect_rest_of_batches(RandomSampler(23), num_workers);
    expect_rest_of_batches(SequentialSampler(23), num_workers);
    expect_rest_of_batches(DistributedRandomSampler(23), num_workers);
  }
}

/// Trains on batches of two workers, saves asynchronously every 3 steps, and logs each batch to a
/// file. Kills its process after step `killed_at`. Returns the weights.
torch::Tensor train_and_log(const std::filesystem::path& directory, const std::string& log,
                            int64_t killed_at = -1) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(23, 5), torch::nn::Dropout(0.5));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  Reader<RandomSampler> reader(directory, RandomSampler(23), 2);
  int64_t step = 0;
  reader.state.add("model", model).add("optimizer", optimizer).add("step", step);
  reader.checkpoints.load_latest(reader.state);
  std::ofstream lines(log, std::ios::app);
  for (; reader.epoch < 3; ++reader.epoch) {
    for (auto& batch : reader.sampler.batches(*reader.loader)) {
      optimizer.zero_grad();
      const auto input = torch::zeros({23});
      for (const std::size_t i : batch) input[static_cast<int64_t>(i)] = 1;
      model->forward(input).square().sum().backward();
      optimizer.step();
      lines << ++step << ": "
            << torch::IntArrayRef(std::vector<int64_t>(batch.begin(), batch.end())) << std::endl;
      if (step % 3 == 0) reader.checkpoints.save_async(reader.state, step);
      if (step == killed_at) ::raise(SIGKILL);
    }
  }
  return torch::cat({model->parameters()[0].flatten(), model->parameters()[1]}).detach();
}

// In new processes: a forked child cannot train if other tests have started autograd's threads.
TEST(ResumableSampler, KilledRunEndsBitwiseIdentical) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const test_support::SharedTempDir temp_dir;
  const auto directory = temp_dir.path();
  for (const int64_t killed_at : {4, 9, 11, 16}) {  // of 18 steps, 6 an epoch
    EXPECT_EXIT(train_and_log(directory / "b", directory / "b.log", killed_at),
                testing::KilledBySignal(SIGKILL), "");
  }
  const torch::Tensor expected = train_and_log(directory / "a", directory / "a.log");
  EXPECT_TRUE(torch::equal(train_and_log(directory / "b", directory / "b.log"), expected));
  std::istringstream lines(test_support::read_file(directory / "b.log"));
  std::set<std::string> batches;  // without those that were read again after a kill
  for (std::string line; std::getline(lines, line);) batches.insert(line);
  std::istringstream expected_lines(test_support::read_file(directory / "a.log"));
  std::set<std::string> expected_batches;
  for (std::string line; std::getline(expected_lines, line);) expected_batches.insert(line);
  EXPECT_EQ(batches, expected_batches);
  EXPECT_EQ(batches.size(), 18U);
}

TEST(ResumableSampler, ResumesTwiceWithOtherBatchSizes) {
  const TempDir temp_dir;
  torch::manual_seed(1);
  std::vector<std::size_t> read;
  for (const std::size_t batch_size : {4U, 5U, 3U}) {
    Reader<RandomSampler> reader(temp_dir.path(), RandomSampler(23), 2, batch_size);
    reader.checkpoints.load_latest(reader.state);
    std::size_t num_read = 0;
    for (auto& batch : reader.sampler.batches(*reader.loader)) {
      read.insert(read.end(), batch.begin(), batch.end());
      if (++num_read == 2 && batch_size > 3) break;
    }
    reader.checkpoints.save(reader.state, 1);
  }
  std::sort(read.begin(), read.end());
  std::vector<std::size_t> all(23);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(read, all);
}

/// The last window of an epoch is smaller, and read ahead until the end.
TEST(ResumableSampler, ResumesBetweenMicroBatchWindows) {
  struct Examples : torch::data::datasets::BatchDataset<Examples, torch::data::TensorExample> {
    torch::data::TensorExample get_batch(torch::ArrayRef<std::size_t> indices) override {
      return torch::tensor(std::vector<int64_t>(indices.begin(), indices.end()));
    }
    std::optional<std::size_t> size() const override { return 23; }
  };
  const TempDir temp_dir;
  const auto read = [&](int64_t loaded_step, bool saves) {
    torch::manual_seed(static_cast<uint64_t>(loaded_step) + 1);
    ResumableSampler sampler(RandomSampler(23));
    const auto loader = torch::data::make_data_loader(Examples(), sampler,
                                                      torch::data::DataLoaderOptions(4).workers(2));
    int64_t epoch = 0, step = 0;
    TrainingState state;
    state.add("sampler", sampler).add("epoch", epoch).add("step", step).add_rng_state();
    mezzo::CheckpointManager checkpoints(temp_dir.path(), {.max_to_keep = 100});
    if (loaded_step > 0) checkpoints.load(state, loaded_step);
    std::vector<std::vector<int64_t>> steps;
    for (; epoch < 2; ++epoch) {
      auto batches = sampler.batches(*loader);
      std::vector<int64_t> window;
      for (const auto& batch : mezzo::micro_batches(batches, 4)) {
        const auto* const data = batch.data.template const_data_ptr<int64_t>();
        window.insert(window.end(), data, data + batch.data.numel());
        if (!batch.is_last()) continue;
        steps.push_back(std::exchange(window, {}));
        ++step;
        if (saves) checkpoints.save(state, step);
      }
    }
    return steps;
  };
  const auto expected = read(0, /*saves=*/true);
  ASSERT_EQ(expected.size(), 4U);
  for (int64_t step = 1; step <= 4; ++step) {
    EXPECT_EQ(read(step, /*saves=*/false),
              std::vector<std::vector<int64_t>>(expected.begin() + step, expected.end()))
        << "resumed at " << step;
  }
}

TEST(ResumableSampler, SaveThrowsAfterUncountedLoop) {
  const TempDir temp_dir;
  Reader<RandomSampler> reader(temp_dir.path(), RandomSampler(23), 0);
  reader.checkpoints.save(reader.state, 0);
  for (auto& batch : *reader.loader) reader.epoch += static_cast<int64_t>(batch.size());
  EXPECT_THAT(message_of([&] { reader.checkpoints.save(reader.state, 1); }),
              HasSubstr("loop over sampler.batches(*loader)"));
  reader.checkpoints.load(reader.state, 0);
  reader.checkpoints.save(reader.state, 1);
}

TEST(ResumableSampler, ThrowsForLoadInsideLoop) {
  const TempDir temp_dir;
  Reader<RandomSampler> reader(temp_dir.path(), RandomSampler(23), 0);
  reader.checkpoints.save(reader.state, 0);
  EXPECT_THAT(message_of([&] {
                for (auto& batch : reader.sampler.batches(*reader.loader)) {
                  if (!batch.empty()) reader.checkpoints.load(reader.state, 0);
                }
              }),
              HasSubstr("leave the loop first"));
}

/// Fails once to read example 0.
struct FlakyIndices : Indices {
  using Indices::Indices;
  std::vector<std::size_t> get_batch(torch::ArrayRef<std::size_t> indices) override {
    TORCH_CHECK(indices[0] != 0 || std::exchange(*failed, true), "flaky");
    return indices.vec();
  }
  std::shared_ptr<bool> failed = std::make_shared<bool>(false);
};

TEST(ResumableSampler, ResumesAtFirstBatchThatCouldNotBeRead) {
  const TempDir temp_dir;
  for (const std::size_t num_workers : {0, 2}) {
    ResumableSampler sampler(SequentialSampler(23));
    const auto loader = torch::data::make_data_loader(
        FlakyIndices(23), sampler, torch::data::DataLoaderOptions(4).workers(num_workers));
    TrainingState state;
    state.add("sampler", sampler);
    EXPECT_ANY_THROW(sampler.batches(*loader).begin());
    mezzo::save_checkpoint(temp_dir / "x", state);

    Reader<SequentialSampler> resumed(temp_dir.path(), SequentialSampler(23), 0);
    mezzo::load_checkpoint(temp_dir / "x", TrainingState().add("sampler", resumed.sampler));
    EXPECT_EQ((*resumed.sampler.batches(*resumed.loader).begin())[0], 0U);
  }
}

/// Saves an index and an order that its `next` would read out of bounds.
struct InvalidSampler : RandomSampler {
  InvalidSampler(int64_t i, torch::Tensor o) : RandomSampler(23), index(i), order(std::move(o)) {}
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("index", torch::tensor(index), /*is_buffer=*/true);
    archive.write("indices", order, /*is_buffer=*/true);
  }
  int64_t index;
  torch::Tensor order;
};

TEST(ResumableSampler, ThrowsForOtherOrderBeforeAnythingIsLoaded) {
  const TempDir temp_dir;
  const auto throws_for = [&](auto saved, auto loaded) {
    int64_t epoch = 1;
    ResumableSampler from(std::move(saved)), to(std::move(loaded));
    mezzo::save_checkpoint(temp_dir / "x", TrainingState().add("epoch", epoch).add("s", from));
    epoch = 0;
    auto state = TrainingState().add("epoch", epoch).add("s", to);
    const bool throws =
        message_of([&] { mezzo::load_checkpoint(temp_dir / "x", state); }) != message_of([] {});
    return throws && epoch == 0;
  };
  const auto order = torch::arange(23);
  EXPECT_FALSE(throws_for(InvalidSampler(23, order), RandomSampler(23)));
  EXPECT_TRUE(throws_for(InvalidSampler(24, order), RandomSampler(23)));
  EXPECT_TRUE(throws_for(InvalidSampler(-1, order), SequentialSampler(23)));
  EXPECT_TRUE(throws_for(InvalidSampler(0, order.view({1, 23})), RandomSampler(23)));
  EXPECT_TRUE(throws_for(InvalidSampler(0, order + 1), RandomSampler(23)));
  EXPECT_TRUE(throws_for(RandomSampler(22), RandomSampler(23)));
  EXPECT_TRUE(throws_for(SequentialSampler(23), RandomSampler(23)));
}

TEST(ResumableSampler, ThrowsForLoaderWithOtherSamplerOrOrder) {
  ResumableSampler sampler(RandomSampler(23)), other(RandomSampler(23));
  const auto loader = torch::data::make_data_loader(Indices(23), other, 4);
  const auto unordered = torch::data::make_data_loader(
      Indices(23), sampler, torch::data::DataLoaderOptions(4).workers(2).enforce_ordering(false));
  EXPECT_THAT(message_of([&] { sampler.batches(*loader).begin(); }), HasSubstr("another sampler"));
  EXPECT_THAT(message_of([&] { sampler.batches(*unordered).begin(); }),
              HasSubstr("enforce_ordering(true)"));
}

}  // namespace
