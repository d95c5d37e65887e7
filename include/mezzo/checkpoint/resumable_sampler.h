/// \file
/// ResumableSampler: resumes inside an epoch of a libtorch DataLoader.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>
#include <torch/data/samplers/base.h>
#include <torch/data/samplers/random.h>
#include <torch/data/samplers/sequential.h>
#include <torch/data/samplers/serialize.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A sampler whose position a TrainingState saves: a resumed run reads the remaining batches of the
/// epoch, in the same order. Copies, such as the DataLoader's, share the position.
///
///     mezzo::ResumableSampler sampler{torch::data::samplers::RandomSampler(size)};
///     auto loader = torch::data::make_data_loader(dataset, sampler, options);
///     state.add("sampler", sampler).add("epoch", epoch).add_rng_state();
///     for (auto& batch : sampler.batches(*loader)) ...  // counts the batches that it returns
///
/// Workers draw batches ahead of the loop. Loading draws the received ones again, so `S` must draw
/// random numbers in `reset` only, as libtorch's samplers do. Not thread-safe.
template <class S>
class ResumableSampler : public torch::data::samplers::Sampler<typename S::BatchRequestType> {
 public:
  explicit ResumableSampler(S sampler) : state_(std::make_shared<State>(std::move(sampler))) {}

  /// Accesses the sampler, for example to call set_epoch.
  S* operator->() const { return &state_->sampler; }

  /// Returns a range for one loop: the next epoch or, after loading, what is left of the saved one.
  /// A loop that ends early does not end its epoch for `save`.
  /// \throws c10::Error in `begin` unless `loader` has this sampler and enforces its order
  template <class Loader>
  auto batches(Loader& loader) const {
    return Batches<Loader>{loader, state_};
  }

  /// Called by the DataLoader: begins an epoch, or continues the loaded one.
  void reset(std::optional<std::size_t> size = std::nullopt) override {
    ++state_->num_loops, state_->is_counted = false;
    if (std::exchange(state_->is_loaded, false)) return;
    state_->sampler.reset(size);
    state_->start = state_->sampler, state_->num_received = 0;
  }
  /// Called by the DataLoader: draws a batch.
  std::optional<typename S::BatchRequestType> next(std::size_t batch_size) override {
    state_->batch_size = static_cast<std::int64_t>(batch_size);
    return state_->sampler.next(batch_size);
  }
  /// Writes the sampler and the position.
  /// \throws c10::Error if the last loop was over the DataLoader
  void save(torch::serialize::OutputArchive& archive) const override {
    TORCH_CHECK(state_->is_counted,
                "ResumableSampler: the position in the epoch is not known, because a loop was over "
                "the DataLoader; loop over sampler.batches(*loader)");
    torch::serialize::OutputArchive sampler(archive.compilation_unit());
    state_->start.value_or(state_->sampler).save(sampler);
    archive.write("sampler", sampler);
    archive.write("position", std::vector<std::int64_t>{state_->start.has_value(),
                                                        state_->num_received, state_->batch_size});
  }
  /// Reads the sampler and the position, from which the next loop continues.
  void load(torch::serialize::InputArchive& archive) override {
    torch::serialize::InputArchive sampler;
    const std::vector<std::int64_t> numbers = read_archive(archive, sampler);
    State loaded(state_->sampler);
    loaded.sampler.load(sampler);
    for (std::int64_t i = 0; i < numbers[1]; ++i) {
      if (!loaded.sampler.next(static_cast<std::size_t>(numbers[2]))) break;
    }
    loaded.is_loaded = numbers[0] != 0, loaded.batch_size = numbers[2];
    if (loaded.is_loaded) loaded.start = loaded.sampler;
    loaded.num_loops = state_->num_loops + 1;
    *state_ = std::move(loaded);
  }
  /// Throws what loading the archive would throw, and changes nothing. `S::load` is not called.
  friend void check_archive(torch::serialize::InputArchive& archive,
                            const ResumableSampler& sampler) {
    torch::serialize::InputArchive ignored;
    (void)sampler.read_archive(archive, ignored);
  }

 private:
  struct State {
    explicit State(S s) : sampler(std::move(s)) {}
    S sampler;
    std::optional<S> start{};  // in an epoch: `sampler` before `num_received` batches
    std::int64_t num_received = 0, batch_size = 0, num_loops = 0;
    bool is_loaded = false, is_counted = true;
  };

  /// Reads the position, and the archive of the sampler. libtorch's samplers do not check indices.
  std::vector<std::int64_t> read_archive(torch::serialize::InputArchive& archive,
                                         torch::serialize::InputArchive& sampler) const {
    c10::IValue position;
    archive.read("sampler", sampler);
    archive.read("position", position);
    const std::vector<std::int64_t> numbers = position.toIntVector();
    TORCH_CHECK(numbers.size() == 3 && numbers[2] >= (numbers[1] > 0 ? 1 : 0), "invalid position");
    constexpr bool kIsRandom = std::same_as<S, torch::data::samplers::RandomSampler>;
    if constexpr (kIsRandom || std::same_as<S, torch::data::samplers::SequentialSampler>) {
      S current(state_->sampler);
      (void)current.next(std::size_t{1} << 62);  // the rest
      const auto size = static_cast<std::int64_t>(current.index());
      at::Tensor index, order = at::arange(size);
      sampler.read("index", index, /*is_buffer=*/true);
      if (kIsRandom) sampler.read("indices", order, /*is_buffer=*/true);
      const auto next = index.item<std::int64_t>();
      TORCH_CHECK(next >= 0 && next <= size && order.dim() == 1 && order.numel() == size &&
                      order.ge(0).logical_and(order.lt(size)).all().item<bool>(),
                  "ResumableSampler: the checkpoint is at ", next, " of ", order.sizes(),
                  " examples, and the dataset has ", size, "; load it with the same dataset");
    }
    return numbers;
  }

  /// A loop over a loader. The epoch ends with the loop, not when the loader has no more batches,
  /// because micro_batches reads ahead.
  template <class Loader>
  struct Loop {
    ~Loop() {
      if (is_exhausted && state->num_loops == number) state->start.reset();
    }
    std::shared_ptr<State> state;
    std::int64_t number;
    decltype(std::declval<Loader&>().begin()) position, end;
    bool is_exhausted = false;
  };

  template <class Loader>
  struct Iterator {
    auto& operator*() const { return *loop->position; }
    Iterator& operator++() {
      TORCH_CHECK(loop->state->num_loops == loop->number,
                  "ResumableSampler: the position was loaded, or another loop began, inside this "
                  "loop; leave the loop first");
      ++loop->position, ++loop->state->num_received;
      return *this;
    }
    bool operator==(std::default_sentinel_t) const {
      return loop->is_exhausted = loop->position == loop->end;
    }
    std::shared_ptr<Loop<Loader>> loop;
  };

  template <class Loader>
  struct Batches {
    Iterator<Loader> begin() const {
      const std::int64_t number = state->num_loops + 1;
      const std::shared_ptr<Loop<Loader>> loop(
          new Loop<Loader>{state, number, loader.begin(), loader.end()});
      TORCH_CHECK(state->num_loops == number && loader.options().enforce_ordering,
                  "ResumableSampler::batches: the DataLoader has another sampler, or does not "
                  "enforce its order; make it with this sampler and enforce_ordering(true)");
      state->is_counted = true;
      loop->is_exhausted = loop->position == loop->end;  // throws if the first batch cannot be read
      state->num_received = 1;
      return {loop};
    }
    std::default_sentinel_t end() const { return {}; }

    Loader& loader;
    std::shared_ptr<State> state;
  };

  std::shared_ptr<State> state_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
