// y = x W^T for weights W[O, K] as files have them, row by row: float32, bfloat16, or int8 with a scale per row.
//
// Every output is one accumulator of kLanes partial sums along K, added up by one fixed tree; int8 sums are whole
// numbers before. How many rows of x and of W share a tile is a matter of registers, and which thread works a unit of
// time: neither changes a bit of a result. A unit is some rows of W, which are read from memory once for all rows of x.
//
// int8 weights meet x rounded to 16 bits with a scale per row, in sums of 32 bits: half the instructions of float32.

#ifndef PAGEDJAX_PRODUCTS_H_
#define PAGEDJAX_PRODUCTS_H_

#include "lanes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace products {

using namespace lanes;

// ---- one tile: M rows of x and R rows of W ------------------------------------------------------------------

// What weights of a dtype meet, what a step of them is added to, and how many a step takes.
template <typename W>
struct Kind {
  using X = float;
  using Sum = Floats;
  static constexpr int64_t kStep = kLanes;
  static Sum Zero() { return ZeroFloats(); }
  template <typename T>
  static auto Read(const T* p) { return Load(p); }
  static Sum Add(Floats a, Floats b, Sum c) { return Fma(a, b, c); }
  static Floats Done(Sum x) { return x; }
};
template <>
struct Kind<int8_t> {
  using X = int16_t;
  using Sum = Longs;
  static constexpr int64_t kStep = 2 * kLanes;
  static Sum Zero() { return ZeroLongs(); }
  template <typename T>
  static auto Read(const T* p) { return Load16(p); }
  static Sum Add(Shorts a, Shorts b, Sum c) { return Madd(a, b, c); }
  static Floats Done(Sum x) { return ToFloats(x); }
};

template <typename W>
struct Problem {
  const typename Kind<W>::X* x;  // [T, stride], zeros from K to stride, which is whole steps
  const float* x_scale;          // [T] of int8
  const W* w;                    // [O, K]
  const float* w_scale;          // [O] of int8
  float* y;                      // [T, O]
  int64_t T, O, K, stride;
  const int32_t* to = nullptr;   // [T], rows of y that results go to; null: each to its own
};

// Bytes by which weights are asked for, into the second cache, before they are read: rows are short, and the CPU's own
// guess ends with each. Of one row of x and float32 the guess is quicker.
constexpr uintptr_t kAhead = 16384;

// f(0) to f(N - 1), numbers that are known when compiled: arrays so indexed stay in registers, without copies in memory.
template <typename F, int... I>
PAGEDJAX_INLINE void Each(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F>
PAGEDJAX_INLINE void Repeat(const F& f) {
  Each(f, std::make_integer_sequence<int, N>());
}

template <typename W, int M, int R>
PAGEDJAX_INLINE void Step(const W* w, int64_t w_pitch, const typename Kind<W>::X* x, int64_t x_pitch,
                          typename Kind<W>::Sum (&acc)[M * R]) {
  using K = Kind<W>;
  decltype(K::Read(w)) column[R];
  Repeat<R>([&](auto r) PAGEDJAX_INLINED {
    column[r] = K::Read(w + r * w_pitch);
    if constexpr (M > 1) PAGEDJAX_KEEP(column[r]);
  });
  Repeat<M>([&](auto m) PAGEDJAX_INLINED {
    auto value = K::Read(x + m * x_pitch);
    PAGEDJAX_KEEP(value);
    Repeat<R>([&](auto r) PAGEDJAX_INLINED { acc[m * R + r] = K::Add(column[r], value, acc[m * R + r]); });
  });
}

// Steps begin to end of a tile; the first one starts from nothing and the others from `carry`, where all but the
// last leave their sums. Of `turns` tiles, one or two, of the same rows of W this is number `turn`: each asks for its part of the
// bytes ahead, so that memory is not idle in between.
template <typename W, int M, int R>
void Tile(const Problem<W>& p, int64_t row, int64_t out, int64_t begin, int64_t end, typename Kind<W>::Sum* carry,
          int turn, int turns) {
  using K = Kind<W>;
  constexpr int kSums = (M * R + 3) / 4 * 4;
  constexpr bool kAsk = M > 1 || sizeof(W) < sizeof(float);
  constexpr int64_t kBytes = R * K::kStep * sizeof(W);  // of a step
  const auto* __restrict x = p.x + row * p.stride;
  const W* __restrict w = p.w + out * p.K;
  typename K::Sum acc[M * R];
  if (begin) {
    Repeat<M * R>([&](auto i) PAGEDJAX_INLINED { acc[i] = carry[i]; });
  } else {
    Repeat<M * R>([&](auto i) PAGEDJAX_INLINED { acc[i] = K::Zero(); });
  }
  const int64_t whole = std::min(end, p.K / K::kStep * K::kStep);
  const int64_t bytes = R * std::max<int64_t>(whole - begin, 0) * static_cast<int64_t>(sizeof(W));
  uintptr_t ahead = reinterpret_cast<uintptr_t>(w) + R * begin * sizeof(W) + kAhead + (turn ? bytes / 2 : 0);
  for (int64_t k = begin; k < whole; k += K::kStep) {
    if (kAsk) __builtin_prefetch(reinterpret_cast<const void*>(ahead), 0, 2);
    if (kAsk && kBytes > 64 && turns == 1) __builtin_prefetch(reinterpret_cast<const void*>(ahead + 64), 0, 2);
    ahead += kBytes >> (turns - 1);
    Step<W, M, R>(w + k, p.K, x + k, p.stride, acc);
  }
  if (whole < end) {  // the last step of each row, where K is no whole number of them
    W rest[R][K::kStep] = {};
    for (int r = 0; r < R; ++r) std::memcpy(rest[r], w + r * p.K + whole, (p.K - whole) * sizeof(W));
    Step<W, M, R>(rest[0], K::kStep, x + whole, p.stride, acc);
  }
  if (end < p.stride) {
    Repeat<M * R>([&](auto i) PAGEDJAX_INLINED { carry[i] = acc[i]; });
    return;
  }
  Floats sums[kSums];
  Repeat<kSums>([&](auto i) PAGEDJAX_INLINED { sums[i] = i < M * R ? K::Done(acc[i < M * R ? i : 0]) : ZeroFloats(); });
  float flat[kSums];
  PAGEDJAX_UNROLL for (int i = 0; i < kSums; i += 4) Reduce4(sums + i, flat + i);
  PAGEDJAX_UNROLL for (int m = 0; m < M; ++m) {
    float* y = p.y + (p.to ? p.to[row + m] : row + m) * p.O + out;
    PAGEDJAX_UNROLL for (int r = 0; r < R; ++r) {
      if constexpr (std::is_same_v<W, int8_t>) {
        y[r] = flat[m * R + r] * (p.x_scale[row + m] * p.w_scale[out + r]);
      } else {
        y[r] = flat[m * R + r];
      }
    }
  }
}

// Rows of x of a tile at most, and rows of W beside M of them whose accumulators fit the registers: sums of 16-bit
// products need one of their own before they are added.
constexpr int kTileRows = kRegisters == 32 ? 8 : 4;
template <typename W, int M>
constexpr int WeightRows() {
  if (kRegisters == 32) return M <= 2 ? 8 : M <= 4 ? 6 : M <= 6 ? 4 : 3;
  if (M <= 2) return M == 1 && sizeof(W) == sizeof(float) ? 8 : 4;
  return sizeof(W) == 1 ? 2 : 3;
}
// Rows of x that meet some rows of W before the next are read: these come from memory once, then from the first cache.
constexpr int kBlockRows = 8;
static_assert(kBlockRows <= 2 * kTileRows);
// Depth of a pass over a unit: kBlockRows rows of x of so many bytes stay in the first cache beside what streams by.
constexpr int64_t kPassBytes = 3072;

template <typename W, int M, int R>
void TileOf(const Problem<W>& p, int64_t row, int rows, int64_t out, int64_t begin, int64_t end,
            typename Kind<W>::Sum* carry, int turn, int turns) {
  if constexpr (M > 1) {
    if (rows < M) return TileOf<W, M - 1, R>(p, row, rows, out, begin, end, carry, turn, turns);
  }
  Tile<W, M, R>(p, row, out, begin, end, carry, turn, turns);
}

// Outputs begin to end of rows row to row + count - 1, M at a time.
template <typename W, int M>
void Rows(const Problem<W>& p, int64_t row, int count, int64_t begin, int64_t end) {
  using Sum = typename Kind<W>::Sum;
  constexpr int R = WeightRows<W, M>();
  constexpr int64_t kPass = kPassBytes / sizeof(typename Kind<W>::X) / Kind<W>::kStep * Kind<W>::kStep;
  const int64_t tiles = (end - begin) / R;
  const bool one = p.stride <= kPass + kPass / 2;
  const int64_t pass = one ? p.stride : kPass;
  const int turns = (count + M - 1) / M;
  static thread_local std::vector<char> held;
  Sum* carry = nullptr;
  if (!one) {
    held.resize((tiles + 1) * turns * M * R * sizeof(Sum) + 64);
    carry = reinterpret_cast<Sum*>((reinterpret_cast<uintptr_t>(held.data()) + 63) / 64 * 64);
  }
  for (int64_t from = 0; from < p.stride; from += pass) {
    const int64_t to = std::min(from + pass, p.stride);
    for (int64_t i = 0; i < tiles; ++i)
      for (int turn = 0; turn < turns; ++turn)
        TileOf<W, M, R>(p, row + turn * M, std::min(M, count - turn * M), begin + i * R, from, to,
                        one ? nullptr : carry + (i * turns + turn) * M * R, turn, turns);
  }
  for (int64_t out = begin + tiles * R; out < end; ++out)
    for (int turn = 0; turn < turns; ++turn)
      TileOf<W, M, 1>(p, row + turn * M, std::min(M, count - turn * M), out, 0, p.stride, nullptr, turn, turns);
}

// Outputs begin to end of all rows of x.
template <typename W>
void Unit(const Problem<W>& p, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < p.T; row += kBlockRows) {
    const int count = static_cast<int>(std::min<int64_t>(p.T - row, kBlockRows));
    if (count == 1) {
      Rows<W, 1>(p, row, count, begin, end);
    } else if (count == 2) {
      Rows<W, 2>(p, row, count, begin, end);
    } else if (count <= 4) {
      Rows<W, 4>(p, row, count, begin, end);
    } else {
      Rows<W, kTileRows>(p, row, count, begin, end);
    }
  }
}

// A row of x as 16-bit numbers; its scale. A row with a number that is not finite has NaN for a scale.
inline float Round16(const float* x, int64_t K, int64_t stride, int16_t* out) {
  // A lane adds stride / (2 * kLanes) pairs of products in 32 bits.
  const float limit = std::min<float>(32767, std::floor(2147483647.0f / (128.0f * 2 * (stride / (2 * kLanes))) * 0.999f));
  float most = 0, odd = 0;
#pragma omp simd reduction(max : most) reduction(+ : odd)
  for (int64_t k = 0; k < K; ++k) {
    most = std::fabs(x[k]) > most ? std::fabs(x[k]) : most;
    odd += x[k] * 0.0f;
  }
  std::memset(out + K, 0, (stride - K) * sizeof *out);
  if (!(odd == 0.0f)) {
    std::memset(out, 0, K * sizeof *out);
    return odd;
  }
  const float inverse = most > 1e-30f ? limit / most : 0.0f;
#pragma omp simd
  for (int64_t k = 0; k < K; ++k) {
    const float at = x[k] * inverse;
    out[k] = static_cast<int16_t>(static_cast<int32_t>(at + (at < 0 ? -0.5f : 0.5f)));
  }
  return most > 1e-30f ? most / limit : 0.0f;
}

// y[T, O] = x[T, K] w[O, K]^T. `parallel(n, work)` runs work(0) to work(n - 1) on `threads` threads.
template <typename W, typename Parallel>
void Product(const Parallel& parallel, int64_t threads, const float* x, const W* w, const float* w_scale, float* y,
             int64_t T, int64_t O, int64_t K) {
  constexpr int64_t kStep = Kind<W>::kStep;
  Problem<W> p{nullptr, nullptr, w, w_scale, y, T, O, K, (K + kStep - 1) / kStep * kStep};
  std::vector<typename Kind<W>::X> rows;
  std::vector<float> scales;
  if constexpr (std::is_same_v<W, int8_t>) {
    rows.resize(T * p.stride);
    scales.resize(T);
    auto round = [&](int64_t t) { scales[t] = Round16(x + t * K, K, p.stride, rows.data() + t * p.stride); };
    if (T * K > 1 << 16) {
      parallel(T, round);
    } else {
      for (int64_t t = 0; t < T; ++t) round(t);
    }
    p.x = rows.data();
    p.x_scale = scales.data();
  } else if (p.stride != K) {
    rows.assign(T * p.stride, 0);
    for (int64_t t = 0; t < T; ++t) std::memcpy(rows.data() + t * p.stride, x + t * K, K * sizeof(float));
    p.x = rows.data();
  } else {
    p.x = x;
  }
  // 24 is a whole number of tiles of any height; some units a thread, so that a slow one holds up little.
  const int64_t height = std::max<int64_t>(1, O / (24 * 8 * threads)) * 24;
  parallel((O + height - 1) / height, [&](int64_t i) { Unit(p, i * height, std::min(O, (i + 1) * height)); });
}

// Each assignment a has a row of x, a / per, and a group of weights, ids[a]: y[A, O] = x[a / per] w[ids[a]]^T for w
// [groups, O, K] and w_scale [groups, O]; a row of zeros where there is no such group. Weights of the groups in use are
// read once, the others never, and a row has the bits that Product gives it.
template <typename W, typename Parallel>
void Grouped(const Parallel& parallel, int64_t threads, const float* x, const int32_t* ids, const W* w,
             const float* w_scale, float* y, int64_t A, int64_t per, int64_t groups, int64_t O, int64_t K) {
  using X = typename Kind<W>::X;
  constexpr int64_t kStep = Kind<W>::kStep;
  const int64_t stride = (K + kStep - 1) / kStep * kStep;
  auto known = [&](int64_t a) { return ids[a] >= 0 && ids[a] < groups; };
  std::vector<int64_t> ends(groups, 0);  // of each group in the order of groups
  for (int64_t a = 0; a < A; ++a) {
    if (known(a)) {
      ++ends[ids[a]];
    } else {
      std::memset(y + a * O, 0, O * sizeof *y);
    }
  }
  int64_t total = 0, used = 0;
  for (int64_t& end : ends) {
    used += end > 0;
    total += end;
    end = total - end;
  }
  std::vector<int32_t> order(total);
  for (int64_t a = 0; a < A; ++a) {
    if (known(a)) order[ends[ids[a]]++] = static_cast<int32_t>(a);
  }
  std::vector<X> rows(total * stride);
  std::vector<float> scales(std::is_same_v<W, int8_t> ? total : 0);
  auto pack = [&](int64_t i) {
    const float* from = x + order[i] / per * K;
    X* row = rows.data() + i * stride;
    if constexpr (std::is_same_v<W, int8_t>) {
      scales[i] = Round16(from, K, stride, row);
    } else {
      std::memcpy(row, from, K * sizeof *from);
    }
  };
  if (total * K > 1 << 18) {
    parallel(total, pack);
  } else {
    for (int64_t i = 0; i < total; ++i) pack(i);
  }
  struct Part {
    int64_t group, begin;
  };
  const int64_t height = std::max<int64_t>(1, O * used / (24 * 16 * threads)) * 24;
  std::vector<Part> parts;
  for (int64_t g = 0; g < groups; ++g) {
    if (ends[g] == (g ? ends[g - 1] : 0)) continue;
    for (int64_t begin = 0; begin < O; begin += height) parts.push_back({g, begin});
  }
  parallel(static_cast<int64_t>(parts.size()), [&](int64_t i) {
    const auto [g, begin] = parts[i];
    const int64_t first = g ? ends[g - 1] : 0;
    Problem<W> p{rows.data() + first * stride, scales.data() + (scales.empty() ? 0 : first), w + g * O * K,
                 w_scale ? w_scale + g * O : nullptr, y, ends[g] - first, O, K, stride, order.data() + first};
    Unit(p, begin, std::min(O, begin + height));
  });
}

}  // namespace products

#endif  // PAGEDJAX_PRODUCTS_H_
