// A unit that uses nothing of mezzo's: what it holds of mezzo is there because a header was
// included.
#include "every_header.h"
