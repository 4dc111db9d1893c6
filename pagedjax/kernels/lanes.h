// What an instruction set offers to the kernels: vectors of floats, chosen by the macros that the compiler sets.

#ifndef PAGEDJAX_LANES_H_
#define PAGEDJAX_LANES_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lanes {

#define PAGEDJAX_UNROLL _Pragma("GCC unroll 64")
#define PAGEDJAX_INLINE inline __attribute__((always_inline))
#define PAGEDJAX_INLINED __attribute__((always_inline))  // of a lambda
// GCC would load a value again for each of the instructions that take it.
#if defined(__x86_64__) && defined(__AVX2__) && !defined(__clang__)
#define PAGEDJAX_KEEP(value) asm("" : "+v"(value))
#else
#define PAGEDJAX_KEEP(value) (void)(value)
#endif

// ---- float lanes, and sums of products of 16-bit numbers ---------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__)

constexpr int kLanes = 16;
constexpr int kRegisters = 32;
using Floats = __m512;
using Shorts = __m512i;  // 2 * kLanes of 16 bits
using Longs = __m512i;   // kLanes of 32 bits

inline Floats Load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats Load(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Floats Load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Floats Broadcast(float x) { return _mm512_set1_ps(x); }
inline void Store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats Fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Shorts Load16(const int16_t* p) { return _mm512_loadu_si512(p); }
inline Shorts Load16(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Longs Madd(Shorts a, Shorts b, Longs c) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(c, a, b);
#else
  return _mm512_add_epi32(c, _mm512_madd_epi16(a, b));
#endif
}
inline Floats ToFloats(Longs x) { return _mm512_cvtepi32_ps(x); }
inline Floats ZeroFloats() { return _mm512_setzero_ps(); }
inline Longs ZeroLongs() { return _mm512_setzero_si512(); }

// The sums of four accumulators, each over its lanes by the same tree.
inline void Reduce4(const Floats* a, float* out) {
  const Floats ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
  const Floats cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const Floats abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 low = _mm512_castps512_ps256(abcd);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1));
  const __m256 half = _mm256_add_ps(low, high);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
using Floats = __m256;
using Shorts = __m256i;
using Longs = __m256i;

inline Floats Load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats Load(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Floats Load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Floats Broadcast(float x) { return _mm256_set1_ps(x); }
inline void Store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats Fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Shorts Load16(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Shorts Load16(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Longs Madd(Shorts a, Shorts b, Longs c) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(c, a, b);
#else
  return _mm256_add_epi32(c, _mm256_madd_epi16(a, b));
#endif
}
inline Floats ToFloats(Longs x) { return _mm256_cvtepi32_ps(x); }
inline Floats ZeroFloats() { return _mm256_setzero_ps(); }
inline Longs ZeroLongs() { return _mm256_setzero_si256(); }

inline void Reduce4(const Floats* a, float* out) {
  const Floats ab = _mm256_add_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
  const Floats cd = _mm256_add_ps(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
  const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
  const Floats abcd = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

#elif defined(__ARM_NEON) && defined(__aarch64__)

constexpr int kLanes = 4;
constexpr int kRegisters = 32;
using Floats = float32x4_t;
using Shorts = int16x8_t;
using Longs = int32x4_t;

inline Floats Load(const float* p) { return vld1q_f32(p); }
inline Floats Load(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline Floats Load(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}
inline Floats Broadcast(float x) { return vdupq_n_f32(x); }
inline void Store(float* p, Floats x) { vst1q_f32(p, x); }
inline Floats Fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Shorts Load16(const int16_t* p) { return vld1q_s16(p); }
inline Shorts Load16(const int8_t* p) { return vmovl_s8(vld1_s8(p)); }
inline Longs Madd(Shorts a, Shorts b, Longs c) {
  return vmlal_high_s16(vmlal_s16(c, vget_low_s16(a), vget_low_s16(b)), a, b);
}
inline Floats ToFloats(Longs x) { return vcvtq_f32_s32(x); }
inline Floats ZeroFloats() { return vdupq_n_f32(0); }
inline Longs ZeroLongs() { return vdupq_n_s32(0); }
inline void Reduce4(const Floats* a, float* out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])));
}

#else  // whatever the compiler makes of it

constexpr int kLanes = 4;
constexpr int kRegisters = 16;
struct Floats { float at[4]; };
struct Shorts { int16_t at[8]; };
struct Longs { int32_t at[4]; };

inline Floats Load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline Floats Load(const uint16_t* p) {
  Floats out;
  for (int i = 0; i < 4; ++i) {
    const uint32_t wide = static_cast<uint32_t>(p[i]) << 16;
    std::memcpy(&out.at[i], &wide, sizeof wide);
  }
  return out;
}
inline Floats Load(const int8_t* p) {
  Floats out;
  for (int i = 0; i < 4; ++i) out.at[i] = static_cast<float>(p[i]);
  return out;
}
inline Floats Broadcast(float x) { return {{x, x, x, x}}; }
inline void Store(float* p, Floats x) { std::memcpy(p, x.at, sizeof x.at); }
inline Floats Fma(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 4; ++i) c.at[i] += a.at[i] * b.at[i];
  return c;
}
template <typename T>
inline Shorts Load16(const T* p) {
  Shorts out;
  for (int i = 0; i < 8; ++i) out.at[i] = p[i];
  return out;
}
inline Longs Madd(Shorts a, Shorts b, Longs c) {
  for (int i = 0; i < 8; ++i) c.at[i / 2] += static_cast<int32_t>(a.at[i]) * b.at[i];
  return c;
}
inline Floats ToFloats(Longs x) {
  Floats out;
  for (int i = 0; i < 4; ++i) out.at[i] = static_cast<float>(x.at[i]);
  return out;
}
inline Floats ZeroFloats() { return {}; }
inline Longs ZeroLongs() { return {}; }
inline void Reduce4(const Floats* a, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = (a[i].at[0] + a[i].at[2]) + (a[i].at[1] + a[i].at[3]);
}

#endif

// ---- functions ------------------------------------------------------------------------------------------

// exp for x <= 0, relative error below 2e-7 and 0 below -87; a polynomial, so that the compiler vectorises it.
inline float ExpNegative(float x) {
  const bool tiny = x < -87.0f;
  x = tiny ? -87.0f : x;
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return tiny ? 0.0f : y * scale;
}

}  // namespace lanes

#endif  // PAGEDJAX_LANES_H_
