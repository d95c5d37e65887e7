#include <filesystem>
#include <iostream>

int fake_libtorch();  // so that the library is linked

int main() {
  const auto folder = std::filesystem::temp_directory_path() / "mezzo_libstdcxx_first";
  std::filesystem::create_directories(folder);
  const auto removed = std::filesystem::remove_all(folder);
  if (std::filesystem::exists(folder)) {
    std::cerr << "remove_all is not the function of libstdc++: it returned " << removed << "\n";
    return 1;
  }
  return fake_libtorch();
}
