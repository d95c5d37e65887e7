/// \file
/// FusedOptions: what the options of mezzo's optimizers add to libtorch's, namely the storage of
/// 16-bit weights (mezzo/base/weight_storage.h).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The values that mezzo adds to libtorch's options; see FusedOptions.
struct ExtraOptions {
  optim::WeightStorage weight_storage = optim::WeightStorage::plain;
  std::uint64_t seed = 0;
  bool operator==(const ExtraOptions&) const = default;
};

/// The common base of the options of mezzo's optimizers.
class HoldsExtraOptions {
 public:
  const ExtraOptions& extras() const noexcept { return extras_; }
  void set_extras(const ExtraOptions& extras) noexcept { extras_ = extras; }

 protected:
  HoldsExtraOptions() = default;
  HoldsExtraOptions(const HoldsExtraOptions&) = default;
  HoldsExtraOptions& operator=(const HoldsExtraOptions&) = default;
  ~HoldsExtraOptions() = default;

  ExtraOptions extras_;
};

/// Returns what mezzo adds to the options of a group, from the defaults where the group has
/// libtorch's; null if the optimizer is not mezzo's.
inline const HoldsExtraOptions* extra_options(const torch::optim::Optimizer& optimizer,
                                              const torch::optim::OptimizerParamGroup& group) {
  if (dynamic_cast<const optim::OptimizerInterface*>(&optimizer) == nullptr) return nullptr;
  const auto* const own = dynamic_cast<const HoldsExtraOptions*>(&group.options());
  return own != nullptr ? own : dynamic_cast<const HoldsExtraOptions*>(&optimizer.defaults());
}

}  // namespace detail

namespace optim {

/// Options of mezzo's optimizers: `options.lr()` reads one, and `options.lr(1e-3)` sets it and
/// returns the options. `Base` is libtorch's class of the same name, where there is one: code
/// written for `torch::optim` reads and writes them through a cast to that class.
///
/// A file holds the values that are added here under keys of their own, if they are not the
/// defaults. Loading a file without these keys, such as one of libtorch's, leaves the values as
/// they are.
///
/// A param group may hold plain options of libtorch's class: the optimizer's `defaults()` then give
/// the values that are added here. From libtorch 2.12 on, members of libtorch's that still have
/// their constructor's value are replaced by those of the defaults, as in a group of
/// `torch::optim`.
template <class Own, class Base = torch::optim::OptimizerOptions>
class FusedOptions : public Base, public detail::HoldsExtraOptions {
 public:
  /// libtorch's class of these options; the common base class where libtorch has none.
  using LibtorchOptions = Base;

  /// Returns how 16-bit weights are kept.
  WeightStorage weight_storage() const noexcept { return extras_.weight_storage; }
  /// Sets how 16-bit weights are kept.
  Own& weight_storage(WeightStorage value) { return set(extras_.weight_storage, value); }

  /// Seed of the random bits of WeightStorage::stochastic.
  std::uint64_t seed() const noexcept { return extras_.seed; }
  /// Sets the seed.
  Own& seed(std::uint64_t value) { return set(extras_.seed, value); }

  /// Returns a copy of all options; libtorch's clone would copy only its own part.
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Own>(own());
  }

  /// Takes the values that are added here from `other`, unless the file that was just read held
  /// them. For loading, and for groups with libtorch's options.
  ///
  /// If a file says `plain`, the group keeps its own storage: plain weights need no state of
  /// masters, and can go on in any storage.
  void keep_unread(const FusedOptions& other) {
    if (!was_read_) extras_ = other.extras_;
    if (extras_.weight_storage == WeightStorage::plain) {
      extras_.weight_storage = other.extras_.weight_storage;
    }
    was_read_ = false;
  }

  /// Returns whether the values that are added here are equal.
  bool adds_the_same(const FusedOptions& other) const { return extras_ == other.extras_; }

  friend bool operator==(const FusedOptions& left, const FusedOptions& right) {
    return detail::MemberTable::of(left.own()) == detail::MemberTable::of(right.own()) &&
           left.adds_the_same(right);
  }

  /// Returns the learning rate, as libtorch's schedulers read it.
  double get_lr() const override { return own().lr(); }
  /// Sets the learning rate, as libtorch's schedulers do.
  void set_lr(const double lr) override { own().lr() = lr; }

  /// Reads the options of a file. \throws c10::Error if it lacks one
  void serialize(torch::serialize::InputArchive& archive) override {
    detail::each_member(own(), [&archive](const auto& member) {
      using Value = std::remove_cvref_t<decltype(member.value)>;
      member.value = detail::read_key<Value>(archive, member.key);
    });
    read_extras(archive);
  }
  /// Writes the options, under the names that libtorch gives to those that it knows.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    detail::each_member(own(), [&archive](const auto& member) {
      archive.write(member.key, c10::IValue(member.value));
    });
    write_extras(archive);
  }

 protected:
  FusedOptions() = default;
  /// Takes libtorch's options over; the others have their defaults.
  explicit FusedOptions(const Base& options) : Base(options) {}

 private:
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
    extras_ = {as_storage(storage, "weight_storage", WeightStorage::stochastic),
               static_cast<std::uint64_t>(detail::read_key<int64_t>(archive, "seed"))};
    TORCH_CHECK(!archive.try_read("moment_storage", storage) || storage.toInt() == 0,
                "The archive of an optimizer has moments of 8 bits, or of float beside 16-bit "
                "weights, which this version of mezzo does not keep; read it with mezzo 0.2, or "
                "begin anew");
  }

  /// Reads an enumerator; `last` is the highest that there is.
  template <class Storage>
  static Storage as_storage(const c10::IValue& read, const char* key, Storage last) {
    const int64_t number = read.toInt();
    TORCH_CHECK(number >= 0 && number <= static_cast<int64_t>(last),
                "The archive of an optimizer has the ", key, " ", number,
                ", which this version of mezzo does not know; read it with the version that wrote "
                "it");
    return static_cast<Storage>(number);
  }

  void write_extras(torch::serialize::OutputArchive& archive) const {
    if (extras_ == detail::ExtraOptions{}) return;
    archive.write("weight_storage", c10::IValue(static_cast<int64_t>(extras_.weight_storage)));
    archive.write("seed", c10::IValue(static_cast<int64_t>(extras_.seed)));
  }

  bool was_read_ = false;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
