#pragma once

#include <mezzo/base/detail/private_member.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/stateful.h>
#include <mezzo/checkpoint/detail/zip_directory.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_empty_affine_quantized.h>
#include <ATen/ops/_empty_per_channel_affine_quantized.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/_validate_sparse_csr_tensor_args.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/sparse_csr_tensor.h>
#include <c10/core/QScheme.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct DictImplMember {
  friend constexpr auto private_member(DictImplMember);
};
template struct PrivateMember<DictImplMember, &c10::impl::GenericDict::impl_>;

/// Reads the subset of pickle that torch.save and libtorch's Pickler write: numbers, strings,
/// tensors, and lists, tuples and dicts of them. Throws c10::Error for any other bytes:
///
///   - A GLOBAL must name a class or function that `read_global` lists; nothing else is called.
///   - A tensor lies within its storage, and a storage within its record.
///   - A container is immutable once it is nested in another or taken from the memo, so that none
///     contains itself. The nesting depth is limited.
///   - The memory of every value is charged to `budget`. A value taken from the memo is charged
///     again with all its elements, which also bounds the time to traverse the result.
///
/// An OrderedDict becomes a dict, without the attributes that Python adds.
class PickleReader {
 public:
  /// Returns the storage of a record by its key.
  using ReadStorage = std::function<c10::Storage(const std::string& key)>;

  /// \param budget  limit of the memory of all values, in bytes
  PickleReader(std::string_view pickle, ReadStorage read_storage, std::uint64_t budget)
      : rest_(pickle), read_storage_(std::move(read_storage)), budget_(budget) {}

  /// Returns the value. \throws c10::Error for unsupported or malformed bytes
  c10::IValue read() {
    for (;;) {
      const char opcode = read_bytes(1)[0];
      if (opcode == '.') return to_ivalue(*pop());  // STOP
      execute_opcode(opcode);
    }
  }

 private:
  enum class Kind : std::uint8_t {
    value,         ///< `value`: a number, string, tensor, list or dict
    tuple,         ///< `elements`
    mark,          ///< start of the elements of a tuple, list or dict
    ordered_dict,  ///< the class
    rebuild,       ///< a function of torch, whose name is `value`
    dtype,         ///< a storage class: `enum_value` is the ScalarType
    qscheme,       ///< `enum_value` is the QScheme
    storage,       ///< `storage`, whose ScalarType is `enum_value`
  };

  /// An entry of the stack or of the memo.
  struct Item {
    Kind kind = Kind::value;
    c10::IValue value{};
    std::vector<std::shared_ptr<Item>> elements{};
    c10::Storage storage{};
    int enum_value = 0;
    std::uint64_t bytes = 0;  ///< including its elements
    int depth = 0;
    bool is_closed = false;  ///< nested in another container, or taken from the memo
  };
  using ItemPtr = std::shared_ptr<Item>;

  static constexpr int kMaxDepth = 64;  // of nested containers
  static constexpr std::uint64_t kScalarBytes = 64, kContainerBytes = 256, kTensorBytes = 512;

  void charge(std::uint64_t bytes) {
    TORCH_CHECK(bytes <= budget_, "its values need more memory than allowed for its size");
    budget_ -= bytes;
  }

  std::string_view read_bytes(std::uint64_t count) {
    check_format(count <= rest_.size(), "its pickle is truncated");
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  std::uint64_t read_uint(std::size_t size) {
    return read_little_endian(read_bytes(size), 0, size);
  }
  std::string_view read_line() {
    const std::string_view line = read_bytes(std::min(rest_.find('\n'), rest_.size()));
    read_bytes(1);
    return line;
  }

  ItemPtr pop() {
    check_format(!stack_.empty(), "its pickle pops from an empty stack");
    ItemPtr item = std::move(stack_.back());
    stack_.pop_back();
    return item;
  }
  Item& push(Item item) {
    charge(item.bytes);
    stack_.push_back(std::make_shared<Item>(std::move(item)));
    return *stack_.back();
  }
  void push(c10::IValue value, std::uint64_t bytes = kScalarBytes) {
    push(Item{.value = std::move(value), .bytes = bytes});
  }
  /// Returns the items above the last mark, and removes both.
  std::vector<ItemPtr> pop_to_mark() {
    const auto mark = std::find_if(stack_.rbegin(), stack_.rend(),
                                   [](const ItemPtr& item) { return item->kind == Kind::mark; });
    check_format(mark != stack_.rend(), "its pickle lacks a mark");
    std::vector<ItemPtr> items(std::make_move_iterator(mark.base()),
                               std::make_move_iterator(stack_.end()));
    stack_.erase(std::prev(mark.base()), stack_.end());
    return items;
  }

  static c10::IValue to_ivalue(const Item& item) {
    if (item.kind == Kind::value) return item.value;
    check_format(item.kind == Kind::tuple, "it has a class or a storage instead of a value");
    std::vector<c10::IValue> values;
    for (const ItemPtr& element : item.elements) values.push_back(to_ivalue(*element));
    return c10::ivalue::Tuple::create(std::move(values));
  }

  /// Adds the bytes and depth of `item` to `container`, and closes `item`.
  static void enclose(Item& container, Item& item) {
    check_format(!container.is_closed && &container != &item,
                 "it modifies a container that is nested in another or in itself");
    item.is_closed = true;
    container.bytes += item.bytes;
    container.depth = std::max(container.depth, item.depth + 1);
    check_format(container.depth <= kMaxDepth, "it nests containers more than ", kMaxDepth,
                 " deep");
  }

  void append(Item& list, const std::vector<ItemPtr>& items) {
    check_format(list.kind == Kind::value && list.value.isList(),
                 "it appends to a value that is not a list");
    for (const ItemPtr& item : items) {
      enclose(list, *item);
      list.value.toList().push_back(to_ivalue(*item));
    }
  }

  void set_items(Item& dict, const std::vector<ItemPtr>& items) {
    check_format(dict.kind == Kind::value && dict.value.isGenericDict() && items.size() % 2 == 0,
                 "it sets items of a value that is not a dict");
    auto values = dict.value.toGenericDict();
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const c10::IValue key = to_ivalue(*items[i]);
      check_format(key.isString() || key.isInt(), "it has a key that is ", describe_type(key));
      enclose(dict, *items[i]);
      enclose(dict, *items[i + 1]);
      values.insert_or_assign(key, to_ivalue(*items[i + 1]));
      // Keys with equal hashes make the table grow without bound.
      const auto& table = (values.*private_member(DictImplMember()))->dict;
      check_format(table.bucket_count() <= 64 * (table.size() + 4),
                   "it has a dict with too many hash collisions");
    }
  }

  void make_tuple(std::vector<ItemPtr> items) {
    charge(kContainerBytes);
    auto tuple = std::make_shared<Item>(Item{.kind = Kind::tuple, .bytes = kContainerBytes});
    for (const ItemPtr& item : items) enclose(*tuple, *item);
    tuple->elements = std::move(items);
    stack_.push_back(std::move(tuple));
  }
  void make_tuple(std::size_t size) {
    std::vector<ItemPtr> items(size);
    for (std::size_t i = size; i > 0; --i) items[i - 1] = pop();
    make_tuple(std::move(items));
  }

  void memo_put(std::uint64_t index) {
    check_format(!stack_.empty(), "its pickle memoizes from an empty stack");
    charge(kScalarBytes);
    memo_[index] = stack_.back();
  }
  void memo_get(std::uint64_t index) {
    const auto found = memo_.find(index);
    check_format(found != memo_.end(), "its pickle reads a memo entry that does not exist");
    charge(found->second->bytes);
    found->second->is_closed = true;
    stack_.push_back(found->second);
  }

  void execute_opcode(char opcode) {
    switch (opcode) {
      case '\x80':  // PROTO
        read_bytes(1);
        return;
      case '}':  // EMPTY_DICT
        return push(make_dict(), kContainerBytes);
      case ']':  // EMPTY_LIST
        return push(make_list(), kContainerBytes);
      case ')':  // EMPTY_TUPLE
        return make_tuple(0);
      case '\x85':  // TUPLE1 to TUPLE3
      case '\x86':
      case '\x87':
        return make_tuple(static_cast<std::size_t>(opcode - '\x84'));
      case '(':  // MARK
        push(Item{.kind = Kind::mark, .bytes = kScalarBytes});
        return;
      case 't':  // TUPLE
        return make_tuple(pop_to_mark());
      case 'a': {  // APPEND
        const ItemPtr item = pop();
        return append(top(), {item});
      }
      case 'e': {  // APPENDS
        const std::vector<ItemPtr> items = pop_to_mark();
        return append(top(), items);
      }
      case 's': {  // SETITEM
        const ItemPtr value = pop(), key = pop();
        return set_items(top(), {key, value});
      }
      case 'u': {  // SETITEMS
        const std::vector<ItemPtr> items = pop_to_mark();
        return set_items(top(), items);
      }
      case 'N':  // NONE
        return push(c10::IValue());
      case '\x88':  // NEWTRUE, NEWFALSE
      case '\x89':
        return push(opcode == '\x88');
      case 'K':  // BININT1, BININT2, BININT
        return push(static_cast<std::int64_t>(read_uint(1)));
      case 'M':
        return push(static_cast<std::int64_t>(read_uint(2)));
      case 'J':
        return push(std::int64_t{static_cast<std::int32_t>(read_uint(4))});
      case '\x8a': {  // LONG1
        const std::string_view bytes = read_bytes(read_uint(1));
        check_format(bytes.size() <= 8, "it has an integer of ", bytes.size(), " bytes");
        std::uint64_t number = read_little_endian(bytes, 0, bytes.size());
        if (!bytes.empty() && bytes.size() < 8 && (bytes.back() & '\x80') != 0) {
          number |= ~std::uint64_t{0} << (8 * bytes.size());
        }
        return push(static_cast<std::int64_t>(number));
      }
      case 'G': {  // BINFLOAT, big-endian
        std::string bytes(read_bytes(8));
        std::reverse(bytes.begin(), bytes.end());
        return push(std::bit_cast<double>(read_little_endian(bytes, 0, 8)));
      }
      case 'X': {  // BINUNICODE
        const std::string_view text = read_bytes(read_uint(4));
        return push(std::string(text), kScalarBytes + text.size());
      }
      case 'q':  // BINPUT, LONG_BINPUT
      case 'r':
        return memo_put(read_uint(opcode == 'q' ? 1 : 4));
      case 'h':  // BINGET, LONG_BINGET
      case 'j':
        return memo_get(read_uint(opcode == 'h' ? 1 : 4));
      case 'c': {  // GLOBAL
        const std::string_view module = read_line(), name = read_line();
        push(read_global(module, name));
        return;
      }
      case 'Q':  // BINPERSID
        return read_storage();
      case 'R':  // REDUCE
        return reduce();
      case 'b': {  // BUILD
        const ItemPtr attributes = pop();
        check_format(top().kind == Kind::value && top().value.isGenericDict(),
                     "it sets attributes of a value that is not an OrderedDict");
        return;
      }
      default:
        TORCH_CHECK(false, "its pickle has the opcode ", int{static_cast<unsigned char>(opcode)},
                    ", which torch.save does not write; save it again with pickle_protocol=2");
    }
  }

  Item& top() {
    check_format(!stack_.empty(), "its pickle modifies the top of an empty stack");
    return *stack_.back();
  }

  static Item read_global(std::string_view module, std::string_view name) {
    if (module == "collections" && name == "OrderedDict") {
      return {.kind = Kind::ordered_dict, .bytes = kScalarBytes};
    }
    constexpr std::array<std::string_view, 4> kRebuilds{
        "_rebuild_tensor_v2", "_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_parameter"};
    const bool is_rebuild = module == "torch._utils" &&
                            std::find(kRebuilds.begin(), kRebuilds.end(), name) != kRebuilds.end();
    const bool is_value =
        (module == "builtins" && name == "complex") || (module == "torch" && name == "device");
    // libtorch's pickle_save calls functions of this module for typed lists and dicts.
    if (is_rebuild || is_value || module == "torch.jit._pickle") {
      return {.kind = Kind::rebuild,
              .value = std::string(is_rebuild || is_value ? name : module),
              .bytes = kScalarBytes + name.size()};
    }
    if (module == "torch") {
      for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
        const auto dtype = static_cast<at::ScalarType>(i);
        if (dtype == at::kQUInt4x2 || dtype == at::kQUInt2x4)
          continue;  // elements smaller than a byte
        if (name != std::string(c10::toString(dtype)) + "Storage") continue;
        return {.kind = Kind::dtype, .enum_value = i, .bytes = kScalarBytes};
      }
      for (const at::QScheme scheme : {at::kPerTensorAffine, at::kPerChannelAffine}) {
        if (name != c10::toString(scheme)) continue;
        return {
            .kind = Kind::qscheme, .enum_value = static_cast<int>(scheme), .bytes = kScalarBytes};
      }
    }
    TORCH_CHECK(false, "it names ", module.substr(0, 100), ".", name.substr(0, 100),
                ", which is not allowed; save numbers, strings, tensors, and lists, tuples and "
                "dicts of them, such as state_dict()");
  }

  /// Replaces ("storage", class, key, device, numel) at the top of the stack by the storage.
  void read_storage() {
    const ItemPtr id = pop();
    const auto& fields = id->elements;
    check_format(id->kind == Kind::tuple && fields.size() == 5 &&
                     is_string(*fields[0], "storage") && fields[1]->kind == Kind::dtype &&
                     fields[2]->value.isString(),
                 "it has a malformed storage");
    const c10::Storage storage = read_storage_(fields[2]->value.toStringRef());
    const auto dtype = static_cast<at::ScalarType>(fields[1]->enum_value);
    std::uint64_t bytes = 0;
    const bool overflows =
        c10::mul_overflows(static_cast<std::uint64_t>(to_size(*fields[4])),
                           static_cast<std::uint64_t>(c10::elementSize(dtype)), &bytes);
    check_format(!overflows && bytes <= storage.nbytes(), kOutOfBounds);
    push(Item{.kind = Kind::storage,
              .storage = storage,
              .enum_value = fields[1]->enum_value,
              .bytes = kContainerBytes});
  }

  static bool is_string(const Item& item, std::string_view text) {
    return item.kind == Kind::value && item.value.isString() && item.value.toStringRef() == text;
  }
  /// Returns a size, stride or offset.
  static std::int64_t to_size(const Item& item) {
    check_format(
        item.kind == Kind::value && item.value.isInt() && item.value.toInt() >= 0,
        "it has a tensor with a size, stride or offset that is not a non-negative integer");
    return item.value.toInt();
  }
  static std::vector<std::int64_t> to_sizes(const Item& item) {
    check_format(item.kind == Kind::tuple && item.elements.size() <= 64,
                 "it has a tensor whose shape is not a tuple of at most 64 integers");
    std::vector<std::int64_t> sizes;
    for (const ItemPtr& element : item.elements) sizes.push_back(to_size(*element));
    return sizes;
  }
  static at::Tensor to_tensor(const Item& item) {
    check_format(item.kind == Kind::value && item.value.isTensor(),
                 "it lacks a component of a sparse or quantized tensor");
    return item.value.toTensor();
  }

  /// Creates an OrderedDict, or calls a rebuild function of torch.
  void reduce() {
    const ItemPtr tuple = pop(), callee = pop();
    const auto& arguments = tuple->elements;
    const bool is_call = tuple->kind == Kind::tuple &&
                         (callee->kind == Kind::ordered_dict || callee->kind == Kind::rebuild);
    check_format(is_call, "it calls a value that is not a function of torch");
    if (callee->kind == Kind::ordered_dict) {
      check_format(arguments.empty(), "it has a malformed OrderedDict");
      return push(make_dict(), kContainerBytes);
    }
    const std::string& name = callee->value.toStringRef();
    const auto check_num_arguments = [&](std::size_t min) {
      check_format(arguments.size() >= min, name, " lacks arguments");
    };
    if (name == "_rebuild_parameter" || name == "torch.jit._pickle") {  // (value, ...)
      check_num_arguments(1);
      arguments[0]->is_closed = true;
      stack_.push_back(arguments[0]);
    } else if (name ==
               "_rebuild_sparse_tensor") {  // (layout, size, requires_grad, indices, values)
      check_num_arguments(5);
      const auto sizes = to_sizes(*arguments[1]);
      const auto layout = static_cast<at::Layout>(to_size(*arguments[0]));
      const auto bytes = kTensorBytes + tuple->bytes;
      if (layout == at::kSparseCsr) {  // ..., crow_indices, col_indices, values)
        check_num_arguments(6);
        const at::Tensor crow_indices = to_tensor(*arguments[3]),
                         col_indices = to_tensor(*arguments[4]);
        const at::Tensor values = to_tensor(*arguments[5]);
        at::_validate_sparse_csr_tensor_args(crow_indices, col_indices, values, sizes);
        return push(at::sparse_csr_tensor(crow_indices, col_indices, values, sizes,
                                          values.options().layout(at::kSparseCsr)),
                    bytes);
      }
      check_format(layout == at::kSparse,
                   "it has a sparse tensor of a layout other than COO and CSR");
      const at::Tensor indices = to_tensor(*arguments[3]), values = to_tensor(*arguments[4]);
      at::_validate_sparse_coo_tensor_args(indices, values, sizes);
      push(at::sparse_coo_tensor(indices, values, sizes), bytes);
    } else if (name == "complex") {
      check_num_arguments(2);
      const c10::IValue real = to_ivalue(*arguments[0]), imaginary = to_ivalue(*arguments[1]);
      check_format(real.isDouble() && imaginary.isDouble(),
                   "it has a complex number whose components are not numbers");
      push(c10::complex<double>(real.toDouble(), imaginary.toDouble()));
    } else if (name == "device") {
      check_num_arguments(1);
      const c10::IValue text = to_ivalue(*arguments[0]);
      check_format(text.isString(), "it has a device that is not a string");
      push(c10::Device(text.toStringRef()));
    } else {
      check_num_arguments(6);
      rebuild_tensor(arguments, name == "_rebuild_qtensor");
    }
  }

  /// Pushes a tensor. Arguments: (storage, offset, sizes, strides, [quantizer,] requires_grad,
  /// hooks, [metadata]).
  void rebuild_tensor(const std::vector<ItemPtr>& arguments, bool is_quantized) {
    check_format(arguments[0]->kind == Kind::storage, "it has a tensor without a storage");
    const c10::Storage& storage = arguments[0]->storage;
    const auto dtype = static_cast<at::ScalarType>(arguments[0]->enum_value);
    const std::int64_t offset = to_size(*arguments[1]);
    const std::vector<std::int64_t> sizes = to_sizes(*arguments[2]),
                                    strides = to_sizes(*arguments[3]);
    check_format(sizes.size() == strides.size(),
                 "it has a tensor with different numbers of sizes and strides");
    std::uint64_t bytes = c10::elementSize(dtype);  // of a contiguous copy
    bool overflows = false;
    for (const std::int64_t size : sizes) {
      const auto nonzero_size = static_cast<std::uint64_t>(std::max<std::int64_t>(size, 1));
      overflows = overflows || c10::mul_overflows(bytes, nonzero_size, &bytes);
    }
    check_format(!overflows && at::detail::computeStorageNbytes(
                                   sizes, strides, c10::elementSize(dtype),
                                   static_cast<std::size_t>(offset)) <= storage.nbytes(),
                 kOutOfBounds);
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    const auto options = at::TensorOptions(dtype).device(at::kCPU);
    check_format(c10::isQIntType(dtype) == is_quantized,
                 "it has a tensor whose dtype does not match its quantizer");
    const at::Tensor tensor =
        is_quantized ? empty_quantized(*arguments[4], sizes, options) : at::empty({0}, options);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    if (!is_quantized && arguments.size() > 6) set_metadata(tensor, to_ivalue(*arguments[6]));
    charge(kTensorBytes);
    push(tensor, is_empty ? 0 : bytes);
  }

  /// Returns an empty tensor with the quantizer (scheme, scale, zero_point) or (scheme, scales,
  /// zero_points, axis).
  static at::Tensor empty_quantized(const Item& quantizer, const std::vector<std::int64_t>& sizes,
                                    const at::TensorOptions& options) {
    const auto& fields = quantizer.elements;
    check_format(
        quantizer.kind == Kind::tuple && fields.size() >= 3 && fields[0]->kind == Kind::qscheme,
        "it has a quantized tensor without a quantizer");
    if (fields[0]->enum_value == static_cast<int>(at::kPerTensorAffine)) {
      check_format(fields[1]->value.isDouble() && fields[2]->value.isInt(),
                   "it has a quantized tensor whose scale is not a number");
      return at::_empty_affine_quantized({0}, options, fields[1]->value.toDouble(),
                                         fields[2]->value.toInt());
    }
    check_format(fields.size() >= 4, "it has a quantized tensor without an axis");
    const at::Tensor scales = to_tensor(*fields[1]), zero_points = to_tensor(*fields[2]);
    const auto axis = static_cast<std::size_t>(to_size(*fields[3]));
    check_format(axis < sizes.size() && scales.dim() == 1 && scales.size(0) == sizes[axis] &&
                     scales.is_floating_point() && zero_points.scalar_type() == at::kLong &&
                     zero_points.sizes() == scales.sizes(),
                 "it has a quantized tensor whose scales do not match its shape");
    auto empty = std::vector<std::int64_t>(sizes.size(), 0);
    return at::_empty_per_channel_affine_quantized(empty, scales.clone(), zero_points.clone(),
                                                   static_cast<std::int64_t>(axis), options);
  }

  static void set_metadata(const at::Tensor& tensor, const c10::IValue& metadata) {
    if (metadata.isNone()) return;
    check_format(metadata.isGenericDict(), "it has a tensor whose metadata is not a dict");
    for (const auto& entry : metadata.toGenericDict()) {
      const std::string key = entry.key().isString() ? entry.key().toStringRef() : "";
      check_format((key == "conj" || key == "neg") && entry.value().isBool(),
                   "it has a tensor with metadata other than conj and neg");
      key == "conj" ? tensor._set_conj(entry.value().toBool())
                    : tensor._set_neg(entry.value().toBool());
    }
  }

  static constexpr const char* kOutOfBounds = "a tensor is out of bounds of its storage";

  std::string_view rest_;
  ReadStorage read_storage_;
  std::uint64_t budget_;
  std::vector<ItemPtr> stack_;
  std::map<std::uint64_t, ItemPtr> memo_;  // not a hash map: lookups are O(log n) for any indices
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
