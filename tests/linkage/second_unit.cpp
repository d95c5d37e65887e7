#include "every_header.h"
#include "unit_fingerprint.h"

UnitFingerprint second_unit() { return unit_fingerprint(); }
