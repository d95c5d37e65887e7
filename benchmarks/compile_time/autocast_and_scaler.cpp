#include <mezzo/autocast/autocast.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>
