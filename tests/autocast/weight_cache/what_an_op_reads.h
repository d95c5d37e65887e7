#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

/// The values that linear reads for a square weight in the calling thread's region: multiplied by
/// one and added to zeros, they come out as they are, transposed back.
inline at::Tensor what_linear_reads(const at::Tensor& weight) {
  return at::linear(at::eye(weight.size(1)), weight).t();
}

/// The same of an op that cannot know which argument is a weight.
inline at::Tensor what_mm_reads(const at::Tensor& weight) {
  return at::mm(at::eye(weight.size(0)), weight);
}
