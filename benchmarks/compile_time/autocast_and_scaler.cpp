#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>
