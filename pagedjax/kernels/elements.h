// What a pool's array is made of, and each as a float.
//
// Of eight bits a number is code * scale: a token's row holds the codes of all its keys and values, and behind them a
// float32 scale for each head of keys, then for each head of values.

#ifndef PAGEDJAX_ELEMENTS_H_
#define PAGEDJAX_ELEMENTS_H_

#include "lanes.h"

#include <cstdint>
#include <cstring>

namespace elements {

struct BFloat16 {
  uint16_t bits;
};

struct Int8 {
  int8_t bits;
};

struct Fp8 {  // e4m3fn: no infinity, one NaN
  uint8_t bits;
};

struct Fp8Unscaled : Fp8 {};  // the number itself

inline float ToFloat(float x) { return x; }

inline float ToFloat(BFloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

inline float ToFloat(Int8 x) { return static_cast<float>(x.bits); }

inline float ToFloat(Fp8 x) {
  // Subnormal codes by a difference: as float32's own subnormals they would be flushed to 0 by XLA's threads.
  const uint32_t size = x.bits & 0x7fu;
  const uint32_t normal = (size << 20) + (120u << 23), raised = (size << 20) + (121u << 23);
  float small;
  std::memcpy(&small, &raised, sizeof small);
  small -= 0x1p-6f;
  uint32_t small_bits;
  std::memcpy(&small_bits, &small, sizeof small_bits);
  uint32_t bits = size < 8 ? small_bits : normal;
  bits = size == 0x7f ? 0x7fc00000u : bits;
  bits |= (x.bits & 0x80u) << 24;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// lanes::kLanes codes.
inline lanes::Floats Load(const Int8* p) { return lanes::Load(&p->bits); }
inline lanes::Floats Load(const Fp8* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  // As float16 the same bits stand for 2^-8 of the number, and its subnormal numbers are not flushed.
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7),
                                       _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7),
                                    _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
#else
  float out[lanes::kLanes];
  for (int i = 0; i < lanes::kLanes; ++i) out[i] = ToFloat(p[i]);
  return lanes::Load(out);
#endif
}

template <typename T>
inline constexpr bool kHasScales = false;
template <>
inline constexpr bool kHasScales<Int8> = true;
template <>
inline constexpr bool kHasScales<Fp8> = true;

// Of head `head` of the keys, or of head K + `head` of the values; `codes` is how many a token has.
template <typename T>
inline float Scale(const T* row, int64_t codes, int64_t head) {
  if constexpr (!kHasScales<T>) return 1.0f;
  float out;
  std::memcpy(&out, row + codes + head * static_cast<int64_t>(sizeof out), sizeof out);
  return out;
}

template <typename T>
inline constexpr bool kIsCode = kHasScales<T>;
template <>
inline constexpr bool kIsCode<Fp8Unscaled> = true;

}  // namespace elements

#endif  // PAGEDJAX_ELEMENTS_H_
