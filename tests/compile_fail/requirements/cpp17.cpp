// flags: -std=c++17
// error: mezzo needs C\+\+20
#include <mezzo/mezzo.h>
