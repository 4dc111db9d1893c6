// Attention of rows of several queries over a paged KV pool: a unit is some queries of one tile, with all the heads
// that share one KV head.
//
// Queries lie in the lanes: scores of kKeys keys are one product S^T[keys, rows] = K[keys, H] Q^T[H, rows], their
// maximum and sum run over the keys lane by lane, and values add O^T[H, rows] += V^T[H, keys] P^T[keys, rows]. So
// neither keys nor values are turned around, and a row's result does not depend on which rows lie beside it.

#ifndef PAGEDJAX_TILES_H_
#define PAGEDJAX_TILES_H_

#include "elements.h"
#include "lanes.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace tiles {

using namespace lanes;

constexpr float kNone = -1e30f;                         // the maximum over no key, as in xla.py
constexpr int64_t kKeys = 64;                           // scored before the maximum is renewed
constexpr int kTall = kRegisters == 32 ? 8 : 4;         // a product's accumulators: kTall by kWide vectors
constexpr int kWide = 3;
constexpr int64_t kBand = kWide * kLanes;
constexpr int64_t kRows = (96 + kBand - 1) / kBand * kBand;  // of a unit at most, unless one token has more heads

struct Shape {
  int64_t K, G, H, M, P, B, W;
  int64_t window;  // 0: none
};

// Queries at[0] to at[0] + count - 1 of the flat array stand at positions first, first + 1, ... of a table.
struct Unit {
  const int32_t* table;
  int64_t at, count, first, head;
};

// Of all tokens, [T, K, G, H] and [T, K, G].
struct State {
  float *acc, *m, *l;
};

// c[kTall, kBand] (+)= a b, with a[i, d] at i * a_row + d * a_depth and b[d, kBand] in rows of b_pitch.
template <bool kAdd>
inline void Band(const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t pitch, int64_t depth,
                 float* c) {
  Floats acc[kTall * kWide];
  PAGEDJAX_UNROLL for (int i = 0; i < kTall * kWide; ++i)
    acc[i] = kAdd ? Load(c + i / kWide * pitch + i % kWide * kLanes) : ZeroFloats();
  for (int64_t d = 0; d < depth; ++d) {
    Floats column[kWide];
    PAGEDJAX_UNROLL for (int j = 0; j < kWide; ++j) column[j] = Load(b + d * pitch + j * kLanes);
    PAGEDJAX_UNROLL for (int i = 0; i < kTall; ++i) {
      Floats value = Broadcast(a[i * a_row + d * a_depth]);
      PAGEDJAX_KEEP(value);
      PAGEDJAX_UNROLL for (int j = 0; j < kWide; ++j) acc[i * kWide + j] = Fma(column[j], value, acc[i * kWide + j]);
    }
  }
  PAGEDJAX_UNROLL for (int i = 0; i < kTall * kWide; ++i) Store(c + i / kWide * pitch + i % kWide * kLanes, acc[i]);
}

// c[tall, pitch] (+)= a b for `tall` a whole number of kTall and `pitch` one of kBand.
template <bool kAdd>
void Multiply(int64_t tall, const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t pitch,
              int64_t depth, float* c) {
  for (int64_t j = 0; j < pitch; j += kBand)
    for (int64_t i = 0; i < tall; i += kTall)
      Band<kAdd>(a + i * a_row, a_row, a_depth, b + j, pitch, depth, c + i * pitch + j);
}

// Scores of keys pos to pos + kKeys - 1 to weights, in place; maxima and sums of the rows go on.
inline void Soften(float* s, int64_t rows, int64_t pos, const int32_t* at, int64_t window, bool all_seen, float* m,
                   float* l, float* shrink) {
  if (!all_seen) {
    const int32_t reach = window > 0 ? static_cast<int32_t>(std::min<int64_t>(window, INT32_MAX)) : INT32_MAX;
    for (int64_t t = 0; t < kKeys; ++t) {
      float* score = s + t * rows;
      const int32_t key = static_cast<int32_t>(pos + t);
#pragma omp simd
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t behind = at[r] - key;
        score[r] = behind >= 0 && behind < reach ? score[r] : kNone;
      }
    }
  }
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) shrink[r] = m[r];
  for (int64_t t = 0; t < kKeys; ++t) {
    const float* score = s + t * rows;
#pragma omp simd
    for (int64_t r = 0; r < rows; ++r) m[r] = score[r] > m[r] ? score[r] : m[r];
  }
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    shrink[r] = ExpNegative(shrink[r] - m[r]);
    l[r] *= shrink[r];
  }
  for (int64_t t = 0; t < kKeys; ++t) {
    float* score = s + t * rows;
#pragma omp simd
    for (int64_t r = 0; r < rows; ++r) {
      score[r] = ExpNegative(score[r] - m[r]);
      l[r] += score[r];
    }
  }
}

template <typename T>
inline void Widen(const T* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = elements::ToFloat(from[i]);
}
template <typename T>
inline void Widen(const T* __restrict from, int64_t count, float scale, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = elements::ToFloat(from[i]) * scale;
}

// The arrays of a unit, one behind the other.
struct Scratch {
  std::vector<float> all;
  float *q, *out, *s, *keys, *values, *m, *l, *shrink;
  std::vector<int32_t> at;

  Scratch(int64_t H, int64_t tall, int64_t rows)
      : all((H + tall + kKeys + 3) * rows + kKeys * (H + tall)), at(rows) {
    float* next = all.data();
    auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    q = take(H * rows), out = take(tall * rows), s = take(kKeys * rows);
    m = take(rows), l = take(rows), shrink = take(rows);
    keys = take(kKeys * H), values = take(kKeys * tall);
  }
};

// `layer` is the layer's pool [P, B, W] of T; q f32[T, K, G, H], scaled.
template <typename T>
void Work(const Shape& s, const Unit& u, const float* q, const T* layer, const State& state) {
  const int64_t tall = (s.H + kTall - 1) / kTall * kTall;
  const int64_t used = u.count * s.G, rows = (used + kBand - 1) / kBand * kBand;
  Scratch a(s.H, tall, rows);
  std::fill(a.m, a.m + rows, kNone);
  const int64_t last = u.first + u.count - 1;
  for (int64_t r = 0; r < rows; ++r) a.at[r] = static_cast<int32_t>(std::min(u.first + r / s.G, last));
  const int64_t token = s.K * s.G, own = u.head * s.G;
  for (int64_t r = 0; r < used; ++r) {
    const float* from = q + ((u.at + r / s.G) * token + own + r % s.G) * s.H;
    for (int64_t h = 0; h < s.H; ++h) a.q[h * rows + r] = from[h];
  }
  const int64_t begin = s.window > 0 ? std::max<int64_t>(u.first - s.window + 1, 0) : 0;
  const int shift = __builtin_ctzll(s.B);
  for (int64_t pos = begin / kKeys * kKeys; pos <= last; pos += kKeys) {
    for (int64_t t = 0; t < kKeys; ++t) {
      const int64_t key = pos + t;
      if (key < begin || key > last) {  // no query sees it, and it may hold anything
        std::fill_n(a.keys + t * s.H, s.H, 0.0f);
        std::fill_n(a.values + t * tall, tall, 0.0f);
        continue;
      }
      int64_t block = u.table[std::min(key >> shift, s.M - 1)];
      if (block < 0 || block >= s.P) block = 0;  // as everywhere: a bad id reads the null block
      const T* row = layer + ((block << shift) + (key & (s.B - 1))) * s.W;
      const T *of_key = row + u.head * s.H, *of_value = of_key + s.K * s.H;
      if constexpr (elements::kIsCode<T>) {
        const int64_t all = 2 * s.K * s.H;
        Widen(of_key, s.H, elements::Scale(row, all, u.head), a.keys + t * s.H);
        Widen(of_value, s.H, elements::Scale(row, all, s.K + u.head), a.values + t * tall);
      } else {
        Widen(of_key, s.H, a.keys + t * s.H);
        Widen(of_value, s.H, a.values + t * tall);
      }
    }
    Multiply<false>(kKeys, a.keys, s.H, 1, a.q, rows, s.H, a.s);
    const bool all_seen = pos + kKeys - 1 <= u.first && (s.window <= 0 || pos > last - s.window);
    Soften(a.s, rows, pos, a.at.data(), s.window, all_seen, a.m, a.l, a.shrink);
    for (int64_t h = 0; h < tall; ++h) {
      float* out = a.out + h * rows;
#pragma omp simd
      for (int64_t r = 0; r < rows; ++r) out[r] *= a.shrink[r];
    }
    Multiply<true>(tall, a.values, 1, tall, a.s, rows, kKeys, a.out);
  }
  for (int64_t r = 0; r < used; ++r) {
    const int64_t to = (u.at + r / s.G) * token + own + r % s.G;
    for (int64_t h = 0; h < s.H; ++h) state.acc[to * s.H + h] = a.out[h * rows + r];
    state.m[to] = a.m[r];
    state.l[to] = a.l[r];
  }
}

}  // namespace tiles

#endif  // PAGEDJAX_TILES_H_
