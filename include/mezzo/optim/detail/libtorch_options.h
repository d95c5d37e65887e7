#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/archive_keys.h>
#include <mezzo/optim/fused_options.h>

#include <torch/serialize/archive.h>

#include <tuple>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// An option that lies in libtorch's class. Libtorch's setter returns that class, on which nothing
// of mezzo's could be called next.
#define MEZZO_LIBTORCH_OPTION(T, name)                    \
  const T& name() const noexcept { return Base::name(); } \
  T& name() noexcept { return Base::name(); }             \
  Own& name(T value) {                                    \
    Base::name(std::move(value));                         \
    return static_cast<Own&>(*this);                      \
  }

/// The options of Adam and AdamW. `Base` is libtorch's class.
template <class Own, class Base>
class AdamOptionsOn : public optim::FusedOptions<Own, Base> {
 public:
  using betas_t = std::tuple<double, double>;

  MEZZO_LIBTORCH_OPTION(double, lr)
  MEZZO_LIBTORCH_OPTION(betas_t, betas)
  MEZZO_LIBTORCH_OPTION(double, eps)
  MEZZO_LIBTORCH_OPTION(double, weight_decay)
  MEZZO_LIBTORCH_OPTION(bool, amsgrad)

  void serialize(torch::serialize::InputArchive& archive) override {
    lr(read_key<double>(archive, "lr"));
    betas(read_key<betas_t>(archive, "betas"));
    eps(read_key<double>(archive, "eps"));
    weight_decay(read_key<double>(archive, "weight_decay"));
    amsgrad(read_key<bool>(archive, "amsgrad"));
    this->read_extras(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Base::serialize(archive);
    this->write_extras(archive);
  }

 protected:
  explicit AdamOptionsOn(const Base& options) : optim::FusedOptions<Own, Base>(options) {}
};

/// The options of SGD. `Base` is libtorch's class.
template <class Own, class Base>
class SgdOptionsOn : public optim::FusedOptions<Own, Base> {
 public:
  MEZZO_LIBTORCH_OPTION(double, lr)
  MEZZO_LIBTORCH_OPTION(double, momentum)
  MEZZO_LIBTORCH_OPTION(double, dampening)
  MEZZO_LIBTORCH_OPTION(double, weight_decay)
  MEZZO_LIBTORCH_OPTION(bool, nesterov)

  void serialize(torch::serialize::InputArchive& archive) override {
    lr(read_key<double>(archive, "lr"));
    momentum(read_key<double>(archive, "momentum"));
    dampening(read_key<double>(archive, "dampening"));
    weight_decay(read_key<double>(archive, "weight_decay"));
    nesterov(read_key<bool>(archive, "nesterov"));
    this->read_extras(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Base::serialize(archive);
    this->write_extras(archive);
  }

 protected:
  explicit SgdOptionsOn(const Base& options) : optim::FusedOptions<Own, Base>(options) {}
};

#undef MEZZO_LIBTORCH_OPTION

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
