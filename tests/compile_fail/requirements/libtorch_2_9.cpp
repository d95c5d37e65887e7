// flags: -std=c++20 -Iold_libtorch
// error: mezzo needs libtorch 2\.10
#include <mezzo/mezzo.h>
