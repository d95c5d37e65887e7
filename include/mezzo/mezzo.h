/// \file
/// All of mezzo but distributed/, whose headers are included by name. Include the single headers
/// instead where compile time counts: autocast_module.h and initialize.h bring in libtorch's
/// modules, grad_scaler.h and lr_schedule.h its optimizers, optim/*.h its archives,
/// activation_checkpoint.h, autograd_function.h and weight_cache.h its autograd engine, op_policy.h
/// and what stands on it the dispatcher, the others little more than c10.
#pragma once

#include <mezzo/activation_checkpoint.h>
#include <mezzo/autocast.h>
#include <mezzo/autocast_module.h>
#include <mezzo/autograd_function.h>
#include <mezzo/cast_functions.h>
#include <mezzo/cast_trace.h>
#include <mezzo/checkpoint.h>
#include <mezzo/clip_grad.h>
#include <mezzo/ema.h>
#include <mezzo/gemm_times.h>
#include <mezzo/grad_bucket.h>
#include <mezzo/grad_buckets.h>
#include <mezzo/grad_scaler.h>
#include <mezzo/initialize.h>
#include <mezzo/loss_scale.h>
#include <mezzo/loss_scale_optimizer.h>
#include <mezzo/lr_schedule.h>
#include <mezzo/master_weights.h>
#include <mezzo/matmul_precision.h>
#include <mezzo/op_policy.h>
#include <mezzo/opt_level.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/precision.h>
#include <mezzo/scaler_tensors.h>
#include <mezzo/step_result.h>
#include <mezzo/version.h>
#include <mezzo/weight_cache.h>
