#include <mezzo/autocast.h>
#include <mezzo/grad_scaler.h>
#include <torch/torch.h>
