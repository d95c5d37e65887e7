#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "atomic_file.h"
#include "mapped_file.h"

namespace bert_ner {

/// The element types of the safetensors format that this example reads and writes.
enum class Dtype { f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean };

/// The format's own word: "F32", "BF16", "BOOL".
std::string_view name_of(Dtype dtype);

/// A tensor's description and its bytes: row-major, little-endian, somebody else's memory. The
/// bytes of a file need not be aligned for their dtype (files by other writers may have a header of
/// any length): copy, don't cast.
struct TensorView {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// A safetensors file, memory-mapped and read-only.
///
/// The constructor believes nothing and throws InputError naming the file and the tensor. Checked:
/// the length of the header (at most the file and 100 MB), its JSON (no key twice), every tensor's
/// dtype, shape (not negative, product without overflow) and offsets, which must together cover the
/// rest of the file without a hole or an overlap; tensors without elements are allowed; metadata
/// are strings. PyTorch pickles and Git LFS pointers are recognised and refused with a word on what
/// to do.
///
/// Views point into the mapping and live as long as the object. Reading from several threads is
/// safe.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  /// In the order of their bytes in the file.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  /// Null if there is none of that name; valid as long as the object is.
  const TensorView* find(std::string_view name) const;
  /// The header's "__metadata__"; empty if it has none.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  MappedFile file_;
  std::vector<TensorView> tensors_;
  std::map<std::string, std::size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

/// Writes the tensors to `path`, whole or not at all (see AtomicFile): byte for byte the file of
/// Hugging Face's own writer (but for the order of the metadata, which it leaves open and which
/// here follows their keys). The largest dtypes come first, then names in order, behind a header
/// padded to 8 bytes: every tensor is aligned for its dtype, and equal tensors give equal files
/// whatever their order. Throws std::invalid_argument for tensors that make no file (a name twice,
/// bytes that do not fit the shape, a name that is no UTF-8) and InputError if the system refuses.
AtomicFile::Durability write_safetensors(const std::filesystem::path& path,
                                         std::span<const TensorView> tensors,
                                         const std::map<std::string, std::string>& metadata = {});

}  // namespace bert_ner
