#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <tuple>

// What several optimizers ask of their options; a NaN fails each.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_at_least_0(const char* optimizer, const char* option, double value) {
  TORCH_CHECK(value >= 0, optimizer, ": ", option, " is ", value, "; it should be at least 0");
}

inline void check_betas(const char* optimizer, const std::tuple<double, double>& betas) {
  const auto [beta1, beta2] = betas;
  TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, optimizer, ": betas are ", beta1,
              " and ", beta2, "; they should be at least 0 and less than 1");
}

/// Of an optimizer that keeps running means.
template <class Options>
void check_lr_betas_and_decay(const char* optimizer, const Options& options) {
  check_at_least_0(optimizer, "lr", options.lr());
  check_betas(optimizer, options.betas());
  check_at_least_0(optimizer, "weight_decay", options.weight_decay());
}

/// Of Adam and what is built on it.
template <class Options>
void check_adam_options(const char* optimizer, const Options& options) {
  check_lr_betas_and_decay(optimizer, options);
  check_at_least_0(optimizer, "eps", options.eps());
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
