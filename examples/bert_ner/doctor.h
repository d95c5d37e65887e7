/// \file
/// What mezzo's doctor says of a model before it is trained.
#pragma once

#include <string>
#include <vector>

#include "batches.h"
#include "training.h"

namespace bert_ner {

/// Warnings and errors, a line each, from forward passes on `batch` as `trainer` would run them;
/// none where autocast is off. The model and the random generators stay as they are.
std::vector<std::string> doctors_warnings(Trainer& trainer, const Batch& batch);

}  // namespace bert_ner
