#include <cstdlib>
#include <iostream>

#include "every_header.h"
#include "unit_fingerprint.h"

UnitFingerprint first_unit() { return unit_fingerprint(); }
UnitFingerprint second_unit();

int main() {
  if (first_unit() != second_unit()) {
    std::cerr << "two translation units have different addresses or sizes\n";
    return EXIT_FAILURE;
  }
}
