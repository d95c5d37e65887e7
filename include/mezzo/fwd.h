/// \file
/// Forward declarations of the classes that programs hold by pointer or reference. Includes no
/// header of libtorch:
///
///     #include <mezzo/fwd.h>
///
///     class Trainer {
///       std::shared_ptr<mezzo::GradScaler> scaler_;
///     };
///
/// AutocastGuard, whose template arguments are libtorch's, is not declared here: it is a local
/// variable, or a `std::optional<mezzo::AutocastGuard<>>`.
#pragma once

#include <mezzo/base/version.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

class Amp;
struct AutocastOptions;
class CheckpointManager;
class DistributedCheckpointManager;
class DivergenceMonitor;
class Ema;
class GradBuckets;
class GradReducer;
class GradScaler;
class GradientAccumulation;
class LossScaleOptimizer;
class MasterWeights;
class MetricsLogger;
class ModelParallelOptimizer;
class OpOverrides;
class OptLevel;
class OptimizerRef;
class RunReport;
struct SkippedStep;
class StepInBackward;
class StepResult;
class TrainingState;

template <class Curve>
class LrSchedule;
struct ConstantCurve;
struct CosineCurve;
struct OneCycleCurve;
struct PolynomialCurve;
struct WarmupStableDecayCurve;
using ConstantSchedule = LrSchedule<ConstantCurve>;
using CosineSchedule = LrSchedule<CosineCurve>;
using LinearSchedule = LrSchedule<PolynomialCurve>;
using OneCycleSchedule = LrSchedule<OneCycleCurve>;
using PolynomialSchedule = LrSchedule<PolynomialCurve>;
using WarmupStableDecaySchedule = LrSchedule<WarmupStableDecayCurve>;

template <class OptimizerType>
class ShardedOptimizer;

namespace optim {

class Adam;
class AdamW;
class AdamW8bit;
class LAMB;
class Lion;
class MixedPrecisionOptimizer;
class Muon;
class SGD;

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
