// A fake libtorch.so that exports std::filesystem::remove_all.

#include <cstdint>
#include <filesystem>

namespace std::filesystem {
std::uintmax_t remove_all(const path&) { return 12345; }
}  // namespace std::filesystem

int fake_libtorch() { return 0; }
