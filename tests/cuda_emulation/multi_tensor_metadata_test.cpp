// Chunks of tensors beyond 2^32 elements. No memory is touched.

#include <mezzo/kernels/multi_tensor_metadata.h>

#include <gtest/gtest.h>

#include <cstdint>

namespace {

constexpr int64_t kHuge = (int64_t{1} << 33) + 5;

TEST(MultiTensorMetadata, DividesGradientBeyond2To32) {
  using mezzo::detail::GradListMetadata;
  GradListMetadata metadata(16384);
  float data = 0;
  ASSERT_TRUE(metadata.push_back({&data, kHuge, 0}));
  ASSERT_TRUE(metadata.push_back({&data, kHuge, metadata.num_blocks()}));
  const auto last = metadata.get_chunk(metadata.num_blocks() - 1);
  EXPECT_EQ(last.begin, int64_t{1} << 33);
  EXPECT_EQ(last.end, kHuge);
  EXPECT_EQ(last.first_partial + last.chunk_in_tensor, metadata.num_blocks() - 1);
}

TEST(MultiTensorMetadata, DividesParameterBeyond2To32) {
  mezzo::detail::ParamListMetadata metadata(8192);
  mezzo::detail::ParamArgs param{};
  param.pointers.numel = kHuge;
  ASSERT_TRUE(metadata.push_back(param, {}));
  EXPECT_EQ(metadata.num_blocks(), (int64_t{1} << 20) + 1);
  const auto last = metadata.get_chunk(metadata.num_blocks() - 1);
  EXPECT_EQ(last.begin, int64_t{1} << 33);
  EXPECT_EQ(last.end, kHuge);
}

}  // namespace
