#include <cstdlib>
#include <iostream>

#include "every_header.h"
#include "unit_fingerprint.h"

UnitFingerprint first_unit() { return unit_fingerprint_here(); }
UnitFingerprint second_unit();

int main() {
  if (first_unit() != second_unit()) {
    std::cerr << "the two units disagree about what mezzo is\n";
    return EXIT_FAILURE;
  }
  std::cout << "two units, one mezzo\n";
}
