#pragma once

#include <ATen/core/Tensor.h>

/// One step of mezzo's AdamW on `parameter`, with a learning rate of 0.1.
void step(const at::Tensor& parameter);
