#include <cstdlib>
#include <iostream>

#include "every_header.h"
#include "what_a_unit_sees.h"

WhatAUnitSees first_unit() { return what_this_unit_sees(); }
WhatAUnitSees second_unit();

int main() {
  if (first_unit() != second_unit()) {
    std::cerr << "the two units disagree about what mezzo is\n";
    return EXIT_FAILURE;
  }
  std::cout << "two units, one mezzo\n";
}
