#pragma once

#include <ATen/core/Tensor.h>

/// A step of mezzo's AdamW on one parameter, at a rate of 0.1.
void step(const at::Tensor& parameter);
