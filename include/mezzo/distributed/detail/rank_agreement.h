/// \file
/// What ranks tell one another, so that they throw or go on together, and of a state before it is
/// saved.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/load_checkpoint.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/detail/collectives.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Never empty, for that says that all went well. To be called while an exception is handled.
inline std::string failure_of_current_exception() {
  std::string words = message_of_current_exception();
  return words.empty() ? "an exception without words" : words;
}

/// Calls `f`. \returns what it threw; empty where it did not
template <std::invocable F>
std::string failure_of(const F& f) {
  try {
    f();
    return {};
  } catch (...) {
    return failure_of_current_exception();
  }
}

/// What ranks tell each other so that they throw, or go on, together.
class RankAgreement {
 public:
  explicit RankAgreement(GroupPtr group) : group_(std::move(group)), device_(device_of(*group_)) {}

  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }

  /// Every rank's text, on every rank.
  std::vector<std::string> gather(const std::string& own) {
    return gather_texts(own, group_, device_);
  }

  /// Throws on all ranks what the first one with a text says.
  void check(const char* caller, const std::string& failure) {
    throw_first(caller, gather(failure));
  }
  void throw_first(const char* caller, const std::vector<std::string>& failures) const {
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      TORCH_CHECK(failures[rank].empty(), caller, ": rank ", rank, " of ", size(), ": ",
                  failures[rank]);
    }
  }

  /// Throws on all ranks where one has another text, naming the first lines that differ.
  void check_alike(const char* caller, const std::string& own) {
    const std::vector<std::string> texts = gather(own);
    for (std::size_t rank = 1; rank < texts.size(); ++rank) {
      if (texts[rank] == texts[0]) continue;
      const auto [theirs, firsts] = first_difference(texts[rank], texts[0]);
      TORCH_CHECK(false, caller, ": rank ", rank, " has \"", theirs, "\" where rank 0 has \"",
                  firsts,
                  "\"; ranks save and load the same, and what is each rank's own is added with "
                  "add_per_rank");
    }
  }

  /// What `f` returns on rank 0, on all; and what it throws there.
  template <std::invocable F>
  std::string from_rank_0(const char* caller, const F& f) {
    std::string text, failure;
    if (rank() == 0) failure = failure_of([&] { text = f(); });
    failure = gather(failure)[0];
    TORCH_CHECK(failure.empty(), caller, ": rank 0 of ", size(), ": ", failure);
    return gather(text)[0];
  }

  /// Sends the bytes of rank `from` to rank 0, where `take` gets them piece by piece; the other
  /// ranks hold one piece. Before each piece rank 0 says whether it wants it, and each is taken off
  /// `pieces_left`. \returns whether all was wanted
  bool send_to_rank_0(int from, const char* bytes, std::uint64_t size,
                      const PickledStorage::Take& take, std::uint64_t& pieces_left) {
    for (std::uint64_t begin = 0; begin < size; begin += kPieceBytes) {
      if (!asks_for_more(true)) return false;
      --pieces_left;
      const auto count = static_cast<std::size_t>(std::min(kPieceBytes, size - begin));
      const at::Tensor piece = at::empty({static_cast<int64_t>(count)}, at::kByte);
      if (rank() == from) std::memcpy(piece.mutable_data_ptr(), bytes + begin, count);
      const at::Tensor sent = piece.to(device_);
      broadcast(group_, sent, from).wait();
      if (rank() == 0) take(sent.cpu().const_data_ptr(), count);
    }
    return true;
  }
  static std::uint64_t pieces_of(std::uint64_t size) {
    return (size + kPieceBytes - 1) / kPieceBytes;
  }

  /// Rank 0's answer, on all.
  bool asks_for_more(bool does) {
    const at::Tensor flag =
        at::full({1}, does ? 1 : 0, at::TensorOptions(at::kByte).device(device_));
    broadcast(group_, flag, 0).wait();
    return flag.item<uint8_t>() != 0;
  }

 private:
  static constexpr std::uint64_t kPieceBytes = std::uint64_t{4} << 20;

  GroupPtr group_;
  at::Device device_;
};

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
    if (with_values && !is_per_rank) {
      std::string value;
      const std::string failure = failure_of([&, &of = *part] { value = of.value_in_common(); });
      TORCH_CHECK(failure.empty(), '"', name, "\": ", failure);
      c10::ReplaceAll(value, "\n", "\n" + name + ": ");
      lines << ' ' << value;
    }
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
    const std::string own = failure_of([&] { f(part); });
    if (failure.empty() && !own.empty()) failure = '"' + part.name + "\": " + own;
  }
  return failure;
}

inline void check_states(const char* caller, RankAgreement& ranks, const TrainingState& state,
                         const std::string& call, bool with_values) {
  std::string text;
  ranks.check(caller, failure_of([&] {
                TORCH_CHECK(!CheckpointAccess::parts(state).empty(),
                            "the state is empty; add what training goes on from, as in "
                            "state.add(\"model\", model)");
                text = call + '\n' + describe(state, with_values);
              }));
  ranks.check_alike(caller, text);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
