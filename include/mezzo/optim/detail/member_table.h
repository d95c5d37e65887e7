#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <string>
#include <tuple>
#include <type_traits>

// The options and the state of an optimizer each list their members once. Saving, loading and
// comparing follow from that list. Files have the format of torch::optim: options, counts and
// tensors are IValues, and an undefined tensor has no entry.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class T>
bool is_same(const T& left, const T& right) {
  return left == right;
}
inline bool is_same(const at::Tensor& left, const at::Tensor& right) {
  return left.defined() == right.defined() && (!left.defined() || left.equal(right));
}

/// One member of options or of a state, with its key in a file.
template <class T>
struct Member {
  const char* key;
  T& value;

  friend bool operator==(const Member& left, const Member& right) {
    return is_same(left.value, right.value);
  }
};

template <class T>
Member<T> member(const char* key, T& value) {
  return {key, value};
}

/// Access to the member list of a class, which makes this a friend and has a private
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
