// Includes all headers and uses nothing: the object file must not define symbols of mezzo.
#include "every_header.h"
