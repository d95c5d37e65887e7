#pragma once

#include <mezzo/base/version.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__GNUC__) && defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using Sha256State = std::array<std::uint32_t, 8>;
using Sha256Digest = std::array<std::byte, 32>;
using Sha256Compress = void (*)(Sha256State&, const std::byte* blocks, std::size_t count);

alignas(16) inline constexpr std::array<std::uint32_t, 64> kSha256Constants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline constexpr std::size_t kSha256BlockBytes = 64;

/// FIPS 180-4, section 6.2.2, in its letters.
inline void sha256_compress_plain(Sha256State& state, const std::byte* blocks, std::size_t count) {
  const auto big_endian = [](const std::byte* bytes) {
    std::uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word = (word << 8) | std::to_integer<std::uint32_t>(bytes[i]);
    return word;
  };
  for (; count > 0; --count, blocks += kSha256BlockBytes) {
    std::array<std::uint32_t, 64> w{};
    for (std::size_t t = 0; t < 16; ++t) w[t] = big_endian(blocks + 4 * t);
    for (std::size_t t = 16; t < 64; ++t) {
      const std::uint32_t a = w[t - 15], b = w[t - 2];
      w[t] = w[t - 16] + w[t - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t t = 0; t < 64; ++t) {
      const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                               ((e & f) ^ (~e & g)) + kSha256Constants[t] + w[t];
      const std::uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const Sha256State next{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state[i] += next[i];
  }
}

#if defined(__GNUC__) && defined(__x86_64__)
inline bool has_sha_instructions() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  const bool has_shuffles = (ecx & bit_SSSE3) != 0 && (ecx & bit_SSE4_1) != 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return has_shuffles && (ebx & (1U << 29)) != 0;
}

/// The same on the CPU's own instructions, which want the state as (a, b, e, f) and (c, d, g, h).
__attribute__((target("sha,ssse3,sse4.1"))) inline void sha256_compress_native(
    Sha256State& state, const std::byte* blocks, std::size_t count) {
  auto* const words = reinterpret_cast<__m128i*>(state.data());
  const auto* const constants = reinterpret_cast<const __m128i*>(kSha256Constants.data());
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(abcd, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, abcd, 0xF0);
  for (; count > 0; --count, blocks += kSha256BlockBytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks) + i);
      w[i] = _mm_shuffle_epi8(w[i], to_big_endian);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // four rounds each
      const __m128i sum = _mm_add_epi32(w[i % 4], _mm_load_si128(constants + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
      const __m128i last = w[(i + 3) % 4];
      const __m128i back = _mm_alignr_epi8(last, w[(i + 2) % 4], 4);
      const __m128i partial = _mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]);
      w[i % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(partial, back), last);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}
#endif

inline Sha256Compress best_sha256_compress() {
#if defined(__GNUC__) && defined(__x86_64__)
  static const bool is_native = has_sha_instructions();
  if (is_native) return &sha256_compress_native;
#endif
  return &sha256_compress_plain;
}

/// SHA-256 of bytes that come in pieces.
class Sha256 {
 public:
  explicit Sha256(Sha256Compress compress = best_sha256_compress()) : compress_(compress) {}

  void add(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const std::byte*>(data);
    total_ += size;
    if (pending_ > 0) {
      const std::size_t taken = std::min(size, kSha256BlockBytes - pending_);
      std::memcpy(block_.data() + pending_, bytes, taken);
      pending_ += taken, bytes += taken, size -= taken;
      if (pending_ < kSha256BlockBytes) return;
      compress_(state_, block_.data(), 1);
      pending_ = 0;
    }
    compress_(state_, bytes, size / kSha256BlockBytes);
    pending_ = size % kSha256BlockBytes;
    if (pending_ > 0) std::memcpy(block_.data(), bytes + (size - pending_), pending_);
  }

  /// Of all that was added; nothing may be added after.
  Sha256Digest finish() {
    const std::uint64_t bits = total_ * 8;
    std::array<std::byte, 2 * kSha256BlockBytes> padding{std::byte{0x80}};
    const std::size_t zeros = (pending_ < 56 ? 56 : 120) - pending_;
    for (std::size_t i = 0; i < 8; ++i) {
      padding[zeros + i] = static_cast<std::byte>(bits >> (56 - 8 * i));
    }
    add(padding.data(), zeros + 8);
    Sha256Digest digest{};
    for (std::size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  Sha256Compress compress_;
  Sha256State state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kSha256BlockBytes> block_{};
  std::size_t pending_ = 0;
  std::uint64_t total_ = 0;
};

/// The first half of it, in hexadecimal digits.
inline std::string digest_text(const void* data, std::size_t size) {
  Sha256 sum;
  sum.add(data, size);
  const Sha256Digest digest = sum.finish();
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < digest.size() / 2; ++i) {
    text += kDigits[std::to_integer<unsigned>(digest[i] >> 4)];
    text += kDigits[std::to_integer<unsigned>(digest[i] & std::byte{15})];
  }
  return text;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
