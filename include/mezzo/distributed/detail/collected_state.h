#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/distributed/detail/rank_agreement.h>

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

// What ranks tell one another about a state before it is saved.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A state on the point of being written.
struct CollectedState {
  std::vector<std::vector<PickledValue>> objects{};  ///< by rank and part; common ones on rank 0
  std::vector<std::string> own{};  ///< by part, on other ranks than 0: its storages' bytes
  std::uint64_t pieces_left = 0;   ///< that rank 0 has not asked for yet
};

/// What other ranks must know of objects whose storages they have not got.
inline std::string describe_pickled(const std::vector<PickledValue>& objects) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const PickledValue& object : objects) {
    c10::impl::GenericList types(c10::AnyType::get()), sizes(c10::AnyType::get());
    for (const std::string& type : object.types) types.push_back(type);
    for (const auto& storage : object.storages) {
      sizes.push_back(static_cast<std::int64_t>(storage.size));
    }
    list.push_back(
        c10::ivalue::Tuple::create(std::vector<c10::IValue>{object.instructions, types, sizes}));
  }
  return whole_pickle(pickled({c10::IValue(list)}, "").instructions);
}

inline std::vector<PickledValue> parse_pickled(const std::string& text, int rank) {
  std::vector<PickledValue> objects;
  const c10::IValue list = torch::jit::unpickle(text.data(), text.size());
  for (const c10::IValue& one : list.toListRef()) {
    const auto& fields = one.toTupleRef().elements();
    PickledValue& object = objects.emplace_back(PickledValue{fields[0].toStringRef()});
    for (const c10::IValue& type : fields[1].toListRef())
      object.types.push_back(type.toStringRef());
    for (const c10::IValue& size : fields[2].toListRef()) {
      const std::string key =
          key_prefix(objects.size() - 1, rank) + std::to_string(object.storages.size());
      object.storages.push_back({key, static_cast<std::uint64_t>(size.toInt()), nullptr});
    }
  }
  return objects;
}

/// A line for each thing in which ranks must not differ.
inline std::string describe(const TrainingState& state, bool with_values) {
  std::ostringstream lines;
  for (const auto& [name, part, is_per_rank] : CheckpointAccess::parts(state)) {
    lines << name << ": " << part->kind() << (is_per_rank ? " of each rank" : "");
    const std::string layout = part->layout();
    if (!layout.empty()) {
      lines << ", names and shapes with the CRC-32C " << crc32c_text(layout.data(), layout.size());
    }
    if (with_values && !is_per_rank) lines << ' ' << part->value_in_common();
    lines << '\n';
  }
  return lines.str();
}

/// Calls `f` of each part, also of those behind one that throws, for other ranks may wait for them.
/// \returns what the first one threw
template <class F>
std::string first_failure(const TrainingState& state, const F& f) {
  std::string failure;
  for (const NamedPart& part : CheckpointAccess::parts(state)) {
    try {
      f(part);
    } catch (...) {
      if (failure.empty()) failure = '"' + part.name + "\": " + failure_of_current_exception();
    }
  }
  return failure;
}

inline void check_states(const char* caller, RankAgreement& ranks, const TrainingState& state,
                         const std::string& call, bool with_values) {
  std::string text;
  std::string failure;
  try {
    TORCH_CHECK(
        !CheckpointAccess::parts(state).empty(),
        "the state is empty; add what training goes on from, as in state.add(\"model\", model)");
    text = call + '\n' + describe(state, with_values);
  } catch (...) {
    failure = failure_of_current_exception();
  }
  ranks.check(caller, failure);
  ranks.check_alike(caller, text);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
