#include "every_header.h"
#include "what_a_unit_sees.h"

WhatAUnitSees second_unit() { return what_this_unit_sees(); }
