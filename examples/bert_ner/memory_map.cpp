#include "memory_map.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "formatted.h"

namespace bert_ner {

MemoryMap parse_smaps(std::istream& smaps) {
  constexpr int64_t kKibibyte = 1024;
  MemoryMap map;
  int64_t* cause = &map.rest;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::string first, second;
    words >> first >> second;
    if (first == "Rss:") {
      *cause += std::stoll(second) * kKibibyte;
    } else if (!first.ends_with(':')) {  // "7f0c-7f1d r-xp 00000000 fe:00 1234  /lib/libc.so.6"
      std::string offset, device, inode, path;
      words >> offset >> device >> inode >> path;
      const bool is_file = path.starts_with('/');
      const bool is_code =
          second.size() > 2 && second[2] == 'x' && path != "[vdso]" && path != "[vsyscall]";
      cause = is_file ? &map.files : is_code ? &map.kernels : &map.rest;
    }
  }
  return map;
}

MemoryMap memory_map() {
  std::ifstream file("/proc/self/smaps");
  auto map = parse_smaps(file);
  const auto heap = mallinfo2();
  const auto anonymous = map.rest;
  map.in_use = std::min(anonymous, static_cast<int64_t>(heap.uordblks + heap.hblkhd));
  // What malloc has handed back to the kernel (MADV_DONTNEED) still counts as free with malloc.
  map.free = std::min(anonymous - map.in_use, static_cast<int64_t>(heap.fordblks));
  map.rest = anonymous - map.in_use - map.free;
  return map;
}

std::string format_memory_map(const MemoryMap& map, int64_t tensors, int64_t peak) {
  constexpr double kMebibyte = 1024.0 * 1024.0;
  std::string text =
      "| memory between steps                            |  MiB |\n"
      "|-------------------------------------------------|-----:|\n";
  const auto line = [&](const char* cause, int64_t bytes) {
    text += formatted("| %-47s | %4.0f |\n", cause, static_cast<double>(bytes) / kMebibyte);
  };
  line("libraries and mapped files", map.files);
  line("weights and the optimizer's state", tensors);
  line("other objects: text, batches, libraries' own", map.in_use - tensors);
  line("kernels that oneDNN compiled for the shapes seen", map.kernels);
  line("free, kept by malloc for the next step", map.free);
  line("stacks and other mappings", map.rest);
  line("all", map.total());
  line("peak (VmHWM)", peak);
  return text;
}

}  // namespace bert_ner
