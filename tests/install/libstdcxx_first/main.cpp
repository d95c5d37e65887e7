#include <filesystem>
#include <iostream>

int stand_in();  // so that the library is needed

int main() {
  const auto folder = std::filesystem::temp_directory_path() / "mezzo_libstdcxx_first";
  std::filesystem::create_directories(folder);
  const auto removed = std::filesystem::remove_all(folder);
  if (std::filesystem::exists(folder)) {
    std::cerr << "remove_all is not libstdc++'s: it returned " << removed << "\n";
    return 1;
  }
  return stand_in();
}
