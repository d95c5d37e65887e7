/// \file
/// What mezzo's optimizers offer beyond libtorch's: how weights of 16 bits are kept from step to
/// step (mezzo/base/weight_storage.h).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/optim/detail/member_table.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Options of mezzo's optimizers. `Base` is libtorch's class of the same name, where there is one,
/// so that code written for `torch::optim` reads and writes them through a cast to that. A file
/// keeps what is added here under keys of its own, if it is not the default; where a file has none,
/// as one of libtorch's, loading it leaves them.
///
/// A param group may hold plain options of libtorch's: the optimizer's `defaults()` then say what
/// is added here. Otherwise a group has the options that it was made with, but for libtorch's own
/// members that still have their constructor's value: from libtorch 2.12 on these are the
/// defaults', as in a group of `torch::optim`.
template <class Own, class Base = torch::optim::OptimizerOptions>
class FusedOptions : public Base {
 public:
  using LibtorchOptions = Base;

  WeightStorage weight_storage() const noexcept { return extras_.weight_storage; }
  Own& weight_storage(WeightStorage value) { return set(extras_.weight_storage, value); }

  /// Of WeightStorage::stochastic.
  std::uint64_t seed() const noexcept { return extras_.seed; }
  Own& seed(std::uint64_t value) { return set(extras_.seed, value); }

  /// A copy with all that is here; libtorch's clone would keep only its own part.
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Own>(own());
  }

  /// For loading, and for a group of libtorch's options: takes what is added here from `other`,
  /// unless it was in the file.
  void keep_unread(const FusedOptions& other) {
    if (!was_read_) extras_ = other.extras_;
    was_read_ = false;
  }

  /// Whether what is added here is the same.
  bool adds_the_same(const FusedOptions& other) const { return extras_ == other.extras_; }

  friend bool operator==(const FusedOptions& left, const FusedOptions& right) {
    return detail::MemberTable::of(left.own()) == detail::MemberTable::of(right.own()) &&
           left.adds_the_same(right);
  }

  double get_lr() const override { return own().lr(); }
  void set_lr(const double lr) override { own().lr() = lr; }

  void serialize(torch::serialize::InputArchive& archive) override {
    detail::each_member(own(), [&archive](const auto& member) {
      using Value = std::remove_cvref_t<decltype(member.value)>;
      member.value = detail::read_key<Value>(archive, member.key);
    });
    read_extras(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    detail::each_member(own(), [&archive](const auto& member) {
      archive.write(member.key, c10::IValue(member.value));
    });
    write_extras(archive);
  }

 protected:
  FusedOptions() = default;
  explicit FusedOptions(const Base& options) : Base(options) {}

 private:
  struct Extras {
    WeightStorage weight_storage = WeightStorage::plain;
    std::uint64_t seed = 0;
    bool operator==(const Extras&) const = default;
  };

  Own& own() { return static_cast<Own&>(*this); }
  const Own& own() const { return static_cast<const Own&>(*this); }

  template <class T>
  Own& set(T& member, T value) {
    member = value;
    return own();
  }

  void read_extras(torch::serialize::InputArchive& archive) {
    c10::IValue storage;
    was_read_ = archive.try_read("weight_storage", storage);
    if (!was_read_) return;
    const int64_t number = storage.toInt();
    TORCH_CHECK(
        number >= 0 && number <= static_cast<int64_t>(WeightStorage::stochastic),
        "The archive of an optimizer has the weight_storage ", number,
        ", which this version of mezzo does not know; read it with the version that wrote it");
    extras_ = {static_cast<WeightStorage>(number),
               static_cast<std::uint64_t>(detail::read_key<int64_t>(archive, "seed"))};
  }

  void write_extras(torch::serialize::OutputArchive& archive) const {
    if (extras_ == Extras{}) return;
    archive.write("weight_storage", c10::IValue(static_cast<int64_t>(extras_.weight_storage)));
    archive.write("seed", c10::IValue(static_cast<int64_t>(extras_.seed)));
  }

  Extras extras_;
  bool was_read_ = false;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
