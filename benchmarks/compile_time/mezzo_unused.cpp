#include <mezzo/mezzo.h>

#include <torch/torch.h>
