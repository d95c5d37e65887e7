#include <mezzo/base/matmul_precision.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace {

using mezzo::MatmulPrecisionGuard;
using Backend = at::Float32Backend;
using Op = at::Float32Op;
using FloatPrecision = at::Float32Precision;
using Matmul = at::Float32MatmulPrecision;
using Reduction = at::CuBLASReductionOption;
using testing::ElementsAre;

at::Context& context() { return at::globalContext(); }

/// The value of float32Precision for every op, without a GENERIC setting and with one: inherited
/// entries change, explicitly set ones do not.
std::vector<FloatPrecision> table() {
  std::vector<FloatPrecision> seen;
  const FloatPrecision generic = context().float32Precision(Backend::GENERIC, Op::ALL);
  for (const FloatPrecision parent :
       {FloatPrecision::NONE, FloatPrecision::IEEE, FloatPrecision::TF32}) {
    context().setFloat32Precision(Backend::GENERIC, Op::ALL, parent);
    for (const Backend backend : {Backend::CUDA, Backend::MKLDNN}) {
      for (const Op op : {Op::ALL, Op::MATMUL, Op::CONV, Op::RNN}) {
        seen.push_back(context().float32Precision(backend, op));
      }
    }
  }
  context().setFloat32Precision(Backend::GENERIC, Op::ALL, generic);
  seen.push_back(generic);
  return seen;
}

FloatPrecision cuda(Op op) { return context().float32Precision(Backend::CUDA, op); }
FloatPrecision onednn(Op op) { return context().float32Precision(Backend::MKLDNN, op); }

/// Restores the settings of the process after each test.
class MatmulPrecision : public testing::Test {
 protected:
  void SetUp() override {
    // Defaults of libtorch 2.11.
    context().setFloat32MatmulPrecision("highest");
    context().setAllowTF32CuDNN(true);
    context().setFloat32Precision(Backend::GENERIC, Op::ALL, FloatPrecision::NONE);
    for (const Backend backend : {Backend::CUDA, Backend::MKLDNN}) {
      for (const Op op : {Op::ALL, Op::MATMUL, Op::CONV, Op::RNN}) {
        const bool cudnn = backend == Backend::CUDA && (op == Op::CONV || op == Op::RNN);
        context().setFloat32Precision(backend, op,
                                      cudnn ? FloatPrecision::TF32 : FloatPrecision::NONE);
      }
    }
    context().setAllowFP16ReductionCuBLAS(true);
    context().setAllowBF16ReductionCuBLAS(true);
    context().setAllowFP16AccumulationCuBLAS(false);
  }
  void TearDown() override { SetUp(); }
};

TEST_F(MatmulPrecision, SetsTf32AndRestores) {
  const auto before = table();
  {
    const MatmulPrecisionGuard guard({.float32 = Matmul::HIGH});
    EXPECT_EQ(cuda(Op::MATMUL), FloatPrecision::TF32);
    EXPECT_TRUE(context().allowTF32CuBLAS());
    EXPECT_EQ(context().float32MatmulPrecision(), Matmul::HIGH);
  }
  EXPECT_EQ(table(), before);
  EXPECT_FALSE(context().allowTF32CuBLAS());
  EXPECT_EQ(context().float32MatmulPrecision(), Matmul::HIGHEST);
}

TEST_F(MatmulPrecision, MatchesTorchForEachName) {
  {
    const MatmulPrecisionGuard guard({.float32 = Matmul::MEDIUM});
    EXPECT_EQ(cuda(Op::MATMUL), FloatPrecision::TF32);
    EXPECT_EQ(onednn(Op::MATMUL), FloatPrecision::BF16);
  }
  context().setFloat32Precision(Backend::GENERIC, Op::ALL, FloatPrecision::TF32);
  const MatmulPrecisionGuard guard({.float32 = Matmul::HIGHEST});
  EXPECT_EQ(cuda(Op::MATMUL), FloatPrecision::IEEE) << "not inherited";
  EXPECT_EQ(onednn(Op::MATMUL), FloatPrecision::IEEE);
}

TEST_F(MatmulPrecision, KeepsUnsetOptions) {
  context().setAllowFP16ReductionCuBLAS(false);
  const auto before = table();
  const MatmulPrecisionGuard guard({.bf16_reduction = false});
  EXPECT_EQ(table(), before);
  EXPECT_EQ(context().allowFP16ReductionCuBLAS(), Reduction::DisallowReducedPrecisionAllowSplitK);
  EXPECT_EQ(context().allowBF16ReductionCuBLAS(), Reduction::DisallowReducedPrecisionAllowSplitK);
  EXPECT_FALSE(context().allowFP16AccumulationCuBLAS());
}

TEST_F(MatmulPrecision, RestoresReductionFlags) {
  context().setAllowBF16ReductionCuBLAS(false, false);
  {
    const MatmulPrecisionGuard guard({.cudnn_tf32 = false,
                                      .fp16_reduction = false,
                                      .bf16_reduction = true,
                                      .fp16_accumulation = true});
    EXPECT_FALSE(context().allowTF32CuDNN());
    EXPECT_EQ(cuda(Op::CONV), FloatPrecision::IEEE);
    EXPECT_EQ(cuda(Op::RNN), FloatPrecision::IEEE);
    EXPECT_EQ(context().allowFP16ReductionCuBLAS(), Reduction::DisallowReducedPrecisionAllowSplitK);
    EXPECT_EQ(context().allowBF16ReductionCuBLAS(), Reduction::AllowReducedPrecisionWithSplitK);
    EXPECT_TRUE(context().allowFP16AccumulationCuBLAS());
  }
  EXPECT_TRUE(context().allowTF32CuDNN());
  EXPECT_EQ(context().allowFP16ReductionCuBLAS(), Reduction::AllowReducedPrecisionWithSplitK);
  EXPECT_EQ(context().allowBF16ReductionCuBLAS(),
            Reduction::DisallowReducedPrecisionDisallowSplitK);
  EXPECT_FALSE(context().allowFP16AccumulationCuBLAS());
}

TEST_F(MatmulPrecision, RestoresNestedScopes) {
  std::vector<Matmul> seen;
  const auto look = [&] { seen.push_back(context().float32MatmulPrecision()); };
  {
    const MatmulPrecisionGuard outer({.float32 = Matmul::MEDIUM});
    look();
    {
      const MatmulPrecisionGuard inner({.float32 = Matmul::HIGHEST});
      look();
      context().setAllowTF32CuBLAS(true);
    }
    look();
  }
  look();
  EXPECT_THAT(seen, ElementsAre(Matmul::MEDIUM, Matmul::HIGHEST, Matmul::MEDIUM, Matmul::HIGHEST));
}

TEST_F(MatmulPrecision, RestoresMixedInterfaces) {
  context().setFloat32Precision(Backend::CUDA, Op::MATMUL, FloatPrecision::TF32);
  context().setFloat32Precision(Backend::CUDA, Op::CONV, FloatPrecision::IEEE);
  ASSERT_ANY_THROW(context().float32MatmulPrecision()) << "the legacy getter throws";
  ASSERT_ANY_THROW(context().allowTF32CuDNN());
  const auto before = table();
  {
    const MatmulPrecisionGuard guard({.float32 = Matmul::HIGHEST, .cudnn_tf32 = true});
    EXPECT_EQ(context().float32MatmulPrecision(), Matmul::HIGHEST);
    EXPECT_TRUE(context().allowTF32CuDNN());
  }
  EXPECT_EQ(table(), before);
  context().setFloat32Precision(Backend::CUDA, Op::MATMUL, FloatPrecision::NONE);
  context().setFloat32Precision(Backend::CUDA, Op::CONV, FloatPrecision::TF32);
  EXPECT_EQ(context().float32MatmulPrecision(), Matmul::HIGHEST) << "the legacy setting too";
  EXPECT_TRUE(context().allowTF32CuDNN());
}

TEST_F(MatmulPrecision, RestoresLegacyCudnnFlag) {
  context().setAllowTF32CuDNN(false);
  { const MatmulPrecisionGuard guard({.cudnn_tf32 = true}); }
  EXPECT_FALSE(context().allowTF32CuDNN());
}

}  // namespace
