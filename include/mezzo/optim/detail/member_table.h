#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <string>
#include <tuple>
#include <type_traits>

// The options and the state of an optimizer each list their members once. From that list they are
// saved, loaded and compared, and options are checked. Files are as torch::optim writes them:
// options and counts as IValues, tensors too, and an undefined tensor as no entry.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class T>
bool is_same(const T& left, const T& right) {
  return left == right;
}
inline bool is_same(const at::Tensor& left, const at::Tensor& right) {
  return left.defined() == right.defined() && (!left.defined() || left.equal(right));
}

/// One member of options or of a state, by its key in a file.
template <class T>
struct Member {
  const char* key;
  T& value;
  bool is_at_least_0 = false;  ///< what an option must be

  friend bool operator==(const Member& left, const Member& right) {
    return is_same(left.value, right.value);
  }
};

template <class T>
Member<T> member(const char* key, T& value) {
  return {key, value};
}

template <class T>
Member<T> at_least_0(const char* key, T& value) {
  return {key, value, /*is_at_least_0=*/true};
}

/// The list of `owner`, which makes this a friend and has a private
///     static auto members(auto& own) { return std::tuple{member("lr", own.lr()), ...}; }
struct MemberTable {
  template <class Owner>
  static auto of(Owner& owner) {
    return std::remove_const_t<Owner>::members(owner);
  }
};

template <class Owner, class Visit>
void each_member(Owner& owner, const Visit& visit) {
  std::apply([&](const auto&... member) { (visit(member), ...); }, MemberTable::of(owner));
}

/// A NaN fails too.
template <class Options>
void check_members(const char* optimizer, const Options& options) {
  each_member(options, [&](const auto& member) {
    using Value = std::remove_cvref_t<decltype(member.value)>;
    if constexpr (std::is_same_v<Value, double>) {
      TORCH_CHECK(!member.is_at_least_0 || is_at_least(member.value, 0), optimizer, ": ",
                  member.key, " is ", member.value, "; it should be at least 0");
    } else if constexpr (std::is_same_v<Value, std::tuple<double, double>>) {
      const auto [beta1, beta2] = member.value;
      TORCH_CHECK(is_at_least(beta1, 0) && beta1 < 1 && is_at_least(beta2, 0) && beta2 < 1,
                  optimizer, ": ", member.key, " are ", beta1, " and ", beta2,
                  "; they should be at least 0 and less than 1");
    }
  });
}

template <class T>
T read_key(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value), "The archive of an optimizer lacks \"", key,
              "\"; it is that of another class of optimizer, or damaged: load the file of an "
              "optimizer of the same class");
  return value.to<T>();
}

inline void read_tensor_if_there(torch::serialize::InputArchive& archive, const std::string& key,
                                 at::Tensor& tensor) {
  c10::IValue value;
  tensor = archive.try_read(key, value) ? value.toTensor() : at::Tensor();
}

inline void write_tensor_if_defined(torch::serialize::OutputArchive& archive,
                                    const std::string& key, const at::Tensor& tensor) {
  if (tensor.defined()) archive.write(key, c10::IValue(tensor));
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
