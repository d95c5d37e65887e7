// Prints autocast's op lists as this libtorch has them, one op a line: device, op, category.
//     print_op_lists [POLICY_FILE]    with an op policy: the edits it makes

#include <mezzo/autocast/op_policy.h>

#include <iostream>

int main(int argc, char** argv) {
  try {
    if (argc > 1) {
      std::cout << mezzo::OpPolicy::from_file(argv[1]);
    } else {
      std::cout << mezzo::autocast_op_lists(c10::DeviceType::CPU)
                << mezzo::autocast_op_lists(c10::DeviceType::CUDA);
    }
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
}
