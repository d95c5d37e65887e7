#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/fused_options.h>

#include <tuple>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// Declares an option that libtorch's class stores. libtorch's setter returns libtorch's class, on
// which setters of mezzo's class cannot be chained.
#define MEZZO_LIBTORCH_OPTION(T, name)                    \
  const T& name() const noexcept { return Base::name(); } \
  T& name() noexcept { return Base::name(); }             \
  Own& name(T value) {                                    \
    Base::name(std::move(value));                         \
    return static_cast<Own&>(*this);                      \
  }

// Derived classes inherit the constructors. Non-template constructors of their own would
// instantiate the virtual functions, serialisation included, in every unit that includes them.

/// The options of Adam and AdamW. `Base` is libtorch's class.
template <class Own, class Base>
class AdamOptionsOn : public optim::FusedOptions<Own, Base> {
 public:
  using betas_t = std::tuple<double, double>;

  AdamOptionsOn(double lr = 1e-3) : AdamOptionsOn(Base(lr)) {}
  AdamOptionsOn(const Base& options) : optim::FusedOptions<Own, Base>(options) {}

  MEZZO_LIBTORCH_OPTION(double, lr)
  MEZZO_LIBTORCH_OPTION(betas_t, betas)
  MEZZO_LIBTORCH_OPTION(double, eps)
  MEZZO_LIBTORCH_OPTION(double, weight_decay)
  MEZZO_LIBTORCH_OPTION(bool, amsgrad)

 private:
  friend struct MemberTable;
  static auto members(auto& own) {
    return std::tuple{member("lr", own.lr()), member("betas", own.betas()),
                      member("eps", own.eps()), member("weight_decay", own.weight_decay()),
                      member("amsgrad", own.amsgrad())};
  }
};

/// The options of SGD. `Base` is libtorch's class.
template <class Own, class Base>
class SgdOptionsOn : public optim::FusedOptions<Own, Base> {
 public:
  SgdOptionsOn(double lr) : SgdOptionsOn(Base(lr)) {}
  SgdOptionsOn(const Base& options) : optim::FusedOptions<Own, Base>(options) {}

  MEZZO_LIBTORCH_OPTION(double, lr)
  MEZZO_LIBTORCH_OPTION(double, momentum)
  MEZZO_LIBTORCH_OPTION(double, dampening)
  MEZZO_LIBTORCH_OPTION(double, weight_decay)
  MEZZO_LIBTORCH_OPTION(bool, nesterov)

 private:
  friend struct MemberTable;
  static auto members(auto& own) {
    return std::tuple{member("lr", own.lr()), member("momentum", own.momentum()),
                      member("dampening", own.dampening()),
                      member("weight_decay", own.weight_decay()),
                      member("nesterov", own.nesterov())};
  }
};

#undef MEZZO_LIBTORCH_OPTION

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
