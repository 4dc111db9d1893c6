// Attention over a paged KV pool, the write of new rows into it, and products with weights, for CPUs.
//
// A unit of work is one decode row and one chunk of its keys, all KV heads at once, because a token's
// row of the pool is contiguous: the pool is read once, in order, block by block. Each unit leaves a
// partial (sum of p*v, max, sum of p); a row's partials are merged in the order of its chunks. Which
// thread works a unit never changes a result.
//
// Letters as in layout.py: S decode rows, K KV heads, G query heads per KV head, H lanes of a key, V lanes of a
// value (its own, or the key's first), M table width, P blocks per layer, B tokens per block, W floats per token row.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "elements.h"
#include "products.h"
#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using elements::BFloat16;
using elements::Fp8;
using elements::Int8;
using elements::kIsCode;
using elements::ToFloat;
using lanes::ExpNegative;

constexpr float kNone = -1e30f;  // the maximum over no key, as in xla.py
constexpr int kStrip = 16;       // tokens whose scores are computed before the maximum is renewed

struct Shape {
  int64_t S, K, G, H, V, M, P, B, W;
  int64_t value_offset;  // of the first head's value in a token's row
  int64_t chunk;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
};

// Scores p of some keys, `count` of kStrip, to weights, in place; returns what the sums so far shrink by.
inline float Soften(float* __restrict p, int count, float soft_cap, float* m, float* l) {
  if (soft_cap > 0) {
    for (int t = 0; t < count; ++t) p[t] = soft_cap * std::tanh(p[t] / soft_cap);
  }
  for (int t = count; t < kStrip; ++t) p[t] = kNone;
  float top = *m;
#pragma omp simd reduction(max : top)
  for (int t = 0; t < kStrip; ++t) top = p[t] > top ? p[t] : top;
  const float shrink = ExpNegative(*m - top);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int t = 0; t < kStrip; ++t) {
    p[t] = ExpNegative(p[t] - top);
    sum += p[t];
  }
  *m = top;
  *l = *l * shrink + sum;
  return shrink;
}

// Up to kStrip consecutive rows against one KV head. kH, kV: lanes of key and value known at compile time, or 0.
template <typename T, int kH, int kV>
void Strip(const T* __restrict keys, const T* __restrict values, int64_t width, int count, const float* __restrict q,
           int64_t G, int64_t key_dim, int64_t value_dim, float soft_cap, float* __restrict acc, float* __restrict m,
           float* __restrict l) {
  const int64_t H = kH ? kH : key_dim;
  const int64_t V = kV ? kV : value_dim;
  for (int64_t g = 0; g < G; ++g) {
    const float* __restrict query = q + g * H;
    float p[kStrip];
    for (int t = 0; t < count; ++t) {
      const T* __restrict key = keys + t * width;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t h = 0; h < H; ++h) sum += query[h] * ToFloat(key[h]);
      p[t] = sum;
    }
    const float shrink = Soften(p, count, soft_cap, m + g, l + g);
    float* __restrict out = acc + g * V;
    if constexpr (kV != 0) {
      float part[kV ? kV : 1];
      for (int h = 0; h < kV; ++h) part[h] = out[h] * shrink;
      for (int t = 0; t < count; ++t) {
        const T* __restrict value = values + t * width;
        for (int h = 0; h < kV; ++h) part[h] += p[t] * ToFloat(value[h]);
      }
      for (int h = 0; h < kV; ++h) out[h] = part[h];
    } else {
      for (int64_t h = 0; h < V; ++h) out[h] *= shrink;
      for (int t = 0; t < count; ++t) {
        const T* __restrict value = values + t * width;
        for (int64_t h = 0; h < V; ++h) out[h] += p[t] * ToFloat(value[h]);
      }
    }
  }
}

// Codes of up to kStrip rows against kG query heads of one KV head: a code becomes a float once for all of them, its
// scale joins the scores and the weights. `heads` are [kG, H] of q and acc, [kG] of m and l.
template <typename T, int kG>
void CodeStrip(const T* const* rows, int count, int64_t key_at, int64_t value_at, const float* key_scale,
               const float* value_scale, int64_t H, const float* __restrict q, float soft_cap, float* __restrict acc,
               float* m, float* l) {
  using lanes::Floats;
  using lanes::Fma;
  using lanes::kLanes;
  constexpr int kSums = (2 * kG + 3) / 4 * 4;
  const int64_t whole = H / kLanes * kLanes;
  float p[kG][kStrip];
  for (int t = 0; t < count; t += 2) {
    const T* keys[2] = {rows[t] + key_at, rows[std::min(t + 1, count - 1)] + key_at};
    Floats sums[kSums];
    PAGEDJAX_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = lanes::ZeroFloats();
    for (int64_t h = 0; h < whole; h += kLanes) {
      Floats key[2] = {elements::Load(keys[0] + h), elements::Load(keys[1] + h)};
      PAGEDJAX_KEEP(key[0]);
      PAGEDJAX_KEEP(key[1]);
      PAGEDJAX_UNROLL for (int g = 0; g < kG; ++g) {
        const Floats query = lanes::Load(q + g * H + h);
        sums[2 * g] = Fma(query, key[0], sums[2 * g]);
        sums[2 * g + 1] = Fma(query, key[1], sums[2 * g + 1]);
      }
    }
    float out[kSums];
    PAGEDJAX_UNROLL for (int i = 0; i < kSums; i += 4) lanes::Reduce4(sums + i, out + i);
    for (int i = 0; i < 2 && t + i < count; ++i)
      for (int g = 0; g < kG; ++g) {
        float sum = out[2 * g + i];
        for (int64_t h = whole; h < H; ++h) sum += q[g * H + h] * ToFloat(keys[i][h]);
        p[g][t + i] = sum * key_scale[t + i];
      }
  }
  float shrink[kG];
  for (int g = 0; g < kG; ++g) {
    shrink[g] = Soften(p[g], count, soft_cap, m + g, l + g);
    for (int t = 0; t < count; ++t) p[g][t] *= value_scale[t];
  }
  constexpr int kWide = 2;
  int64_t h = 0;
  for (; h + kWide * kLanes <= H; h += kWide * kLanes) {
    Floats part[kG * kWide];
    PAGEDJAX_UNROLL for (int i = 0; i < kG * kWide; ++i)
      part[i] = Fma(lanes::Load(acc + i / kWide * H + h + i % kWide * kLanes), lanes::Broadcast(shrink[i / kWide]),
                    lanes::ZeroFloats());
    for (int t = 0; t < count; ++t) {
      const T* value = rows[t] + value_at + h;
      Floats wide[kWide];
      PAGEDJAX_UNROLL for (int j = 0; j < kWide; ++j) wide[j] = elements::Load(value + j * kLanes);
      PAGEDJAX_UNROLL for (int g = 0; g < kG; ++g) {
        const Floats weight = lanes::Broadcast(p[g][t]);
        PAGEDJAX_UNROLL for (int j = 0; j < kWide; ++j)
          part[g * kWide + j] = Fma(wide[j], weight, part[g * kWide + j]);
      }
    }
    PAGEDJAX_UNROLL for (int i = 0; i < kG * kWide; ++i)
      lanes::Store(acc + i / kWide * H + h + i % kWide * kLanes, part[i]);
  }
  for (; h < H; ++h)
    for (int g = 0; g < kG; ++g) {
      float sum = acc[g * H + h] * shrink[g];
      for (int t = 0; t < count; ++t) sum += p[g][t] * ToFloat(rows[t][value_at + h]);
      acc[g * H + h] = sum;
    }
}

template <typename T, int kH, int kV>
void Unit(const Shape& s, const float* q, const T* layer_pool, const int32_t* table, int64_t begin, int64_t end,
          float* acc, float* m, float* l) {
  const int64_t heads = s.K * s.G;
  std::fill(acc, acc + heads * s.V, 0.0f);
  std::fill(m, m + heads, kNone);
  std::fill(l, l + heads, 0.0f);
  // Strips are cut by position, not by block, so that the block size changes no bit of the result. Where one
  // spans blocks its rows are copied together first: the same code must see them side by side.
  const int shift = __builtin_ctzll(s.B);
  auto row_of = [&](int64_t pos) {
    int64_t block = table[std::min(pos >> shift, s.M - 1)];
    if (block < 0 || block >= s.P) block = 0;  // as everywhere: a bad id reads the null block
    return layer_pool + ((block << shift) + (pos & (s.B - 1))) * s.W;
  };
  if constexpr (kIsCode<T>) {
    const int64_t H = kH ? kH : s.H, all = 2 * s.K * H;
    for (int64_t pos = begin; pos < end; pos += kStrip) {
      const int count = static_cast<int>(std::min<int64_t>(end - pos, kStrip));
      const T* rows[kStrip];
      for (int t = 0; t < count; ++t) rows[t] = row_of(pos + t);
      const int ahead = static_cast<int>(std::min<int64_t>(end - pos - count, kStrip));
      for (int64_t k = 0; k < s.K; ++k) {
        // Pieces of 100 bytes or so, far from each other, are no stream that a CPU would fetch ahead by itself.
        for (int t = 0; t < ahead; ++t) {
          const T* next = row_of(pos + kStrip + t);
          for (int64_t at = s.W * k / s.K; at < s.W * (k + 1) / s.K; at += 64) __builtin_prefetch(next + at);
        }
        float scales[2][kStrip];
        for (int t = 0; t < count; ++t)
          for (int i = 0; i < 2; ++i) scales[i][t] = elements::Scale(rows[t], all, i * s.K + k);
        for (int64_t g = 0; g < s.G;) {
          const int64_t head = k * s.G + g;
          auto some = [&](auto strip) {
            strip(rows, count, k * H, s.value_offset + k * H, scales[0], scales[1], H, q + head * H, s.soft_cap,
                  acc + head * H, m + head, l + head);
          };
          switch (s.G - g) {
            case 1: some(CodeStrip<T, 1>), g += 1; break;
            case 2: some(CodeStrip<T, 2>), g += 2; break;
            case 3: some(CodeStrip<T, 3>), g += 3; break;
            default: some(CodeStrip<T, 4>), g += 4;
          }
        }
      }
    }
    return;
  }
  std::vector<T> together;
  for (int64_t pos = begin; pos < end; pos += kStrip) {
    const int count = static_cast<int>(std::min<int64_t>(end - pos, kStrip));
    const T* rows = row_of(pos);
    if ((pos & (s.B - 1)) + count > s.B) {
      together.resize(kStrip * s.W);
      for (int t = 0; t < count; ++t) std::copy_n(row_of(pos + t), s.W, together.data() + t * s.W);
      rows = together.data();
    }
    for (int64_t k = 0; k < s.K; ++k) {
      Strip<T, kH, kV>(rows + k * s.H, rows + s.value_offset + k * s.V, s.W, count, q + k * s.G * s.H, s.G, s.H, s.V,
                       s.soft_cap, acc + k * s.G * s.V, m + k * s.G, l + k * s.G);
    }
  }
}

template <typename T>
using UnitFn = void (*)(const Shape&, const float*, const T*, const int32_t*, int64_t, int64_t, float*, float*,
                        float*);

template <typename T>
UnitFn<T> ChooseUnit(int64_t key_dim, int64_t value_dim) {
  if constexpr (!kIsCode<T>) {
    if (key_dim == 576 && value_dim == 512) return Unit<T, 576, 512>;
  }
  switch (key_dim == value_dim ? key_dim : 0) {
    case 32: return Unit<T, 32, 32>;
    case 64: return Unit<T, 64, 64>;
    case 80: return Unit<T, 80, 80>;
    case 96: return Unit<T, 96, 96>;
    case 128: return Unit<T, 128, 128>;
    case 256: return Unit<T, 256, 256>;
    default: return Unit<T, 0, 0>;
  }
}

// Runs work(0) .. work(n - 1) on the pool's threads and on the caller's; returns when all are done.
template <typename Work>
void ParallelFor(ffi::ThreadPool& pool, int64_t n, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto state = std::make_shared<State>();
  // A helper that wakes up after the end finds no unit left and touches only `state`.
  const Work* shared = &work;
  auto drain = [state, shared, n] {
    for (int64_t i; (i = state->next.fetch_add(1)) < n;) {
      (*shared)(i);
      if (state->done.fetch_add(1) + 1 == n) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_all();
      }
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, n - 1);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(drain)(drain));
  drain();
  // The last units are short: spinning is cheaper than being woken.
  for (int spin = 0; spin < 20000 && state->done.load() < n; ++spin) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load() >= n; });
}

struct Task {
  int64_t row, begin, end;
};

template <typename T>
void DecodeAll(ffi::ThreadPool& threads, const Shape& s, const float* q, const T* pool, int64_t layer,
               const int32_t* tables, const int32_t* lens, const int32_t* skip, int64_t num_rows, float* acc,
               float* m, float* l) {
  const int64_t heads = s.K * s.G;
  const int64_t state = heads * (s.V + 2);
  const T* layer_pool = pool + layer * s.P * s.B * s.W;
  std::vector<Task> tasks;
  std::vector<int64_t> first(s.S + 1, 0);
  for (int64_t row = 0; row < s.S; ++row) {
    const int64_t len = row < num_rows ? std::min<int64_t>(lens[row], s.M * s.B) : 0;
    const int64_t behind = s.window > 0 ? std::max<int64_t>(len - s.window, 0) : 0;
    for (int64_t at = row < num_rows ? std::max<int64_t>(skip[row], 0) * s.chunk : 0; at < len; at += s.chunk) {
      const int64_t begin = std::max(at, behind);
      const int64_t end = std::min(at + s.chunk, len);
      if (begin < end) tasks.push_back({row, begin, end});
    }
    first[row + 1] = static_cast<int64_t>(tasks.size());
  }
  const int64_t n = static_cast<int64_t>(tasks.size());
  std::vector<float> parts(std::max<int64_t>(n, 1) * state);
  const UnitFn<T> unit = ChooseUnit<T>(s.H, s.V);
  ParallelFor(threads, n, [&](int64_t i) {
    const Task& task = tasks[i];
    float* part = parts.data() + i * state;
    unit(s, q + task.row * heads * s.H, layer_pool, tables + task.row * s.M, task.begin, task.end, part,
         part + heads * s.V, part + heads * (s.V + 1));
  });
  for (int64_t row = 0; row < s.S; ++row) {
    float* out = acc + row * heads * s.V;
    std::fill(out, out + heads * s.V, 0.0f);
    for (int64_t head = 0; head < heads; ++head) {
      float top = kNone;
      for (int64_t i = first[row]; i < first[row + 1]; ++i)
        top = std::max(top, parts[i * state + heads * s.V + head]);
      float sum = 0;
      for (int64_t i = first[row]; i < first[row + 1]; ++i) {
        const float* part = parts.data() + i * state;
        const float weight = ExpNegative(part[heads * s.V + head] - top);
        sum += weight * part[heads * (s.V + 1) + head];
        for (int64_t h = 0; h < s.V; ++h) out[head * s.V + h] += weight * part[head * s.V + h];
      }
      m[row * heads + head] = top;
      l[row * heads + head] = sum;
    }
  }
}

// Buffers whose dtype and rank the interface itself checks.
using F32x4 = ffi::Buffer<ffi::F32, 4>;
using F32x3 = ffi::Buffer<ffi::F32, 3>;
using F32x2 = ffi::Buffer<ffi::F32, 2>;
using Floats = ffi::Buffer<ffi::F32, 1>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Ints = ffi::Buffer<ffi::S32, 1>;
using Int = ffi::Buffer<ffi::S32, 0>;

// Calls work(data) with the pool's array as what its elements are; `codes`: of an array of bytes 1 is int8, 2 fp8_e4m3,
// 3 fp8_e4m3 without scales.
template <typename Work>
ffi::Error WithPool(ffi::AnyBuffer pool, int64_t codes, const Work& work) {
  const ffi::DataType type = pool.element_type();
  if (codes == 0 && type == ffi::F32) return work(static_cast<const float*>(pool.untyped_data()));
  if (codes == 0 && type == ffi::BF16) return work(static_cast<const BFloat16*>(pool.untyped_data()));
  if (codes == 1 && type == ffi::S8) return work(static_cast<const Int8*>(pool.untyped_data()));
  if (codes == 2 && type == ffi::S8) return work(static_cast<const Fp8*>(pool.untyped_data()));
  if (codes == 3 && type == ffi::S8) return work(static_cast<const elements::Fp8Unscaled*>(pool.untyped_data()));
  return ffi::Error::InvalidArgument("pool: must be float32, bfloat16, or codes of eight bits");
}

// Whether every token's row has room for its codes and their scales.
bool HoldsCodes(int64_t codes, int64_t K, int64_t H, int64_t W) {
  return 2 * K * (H + (codes == 3 ? 0 : static_cast<int64_t>(sizeof(float)))) <= W;
}

// How many layers of so many blocks a pool [rows, B, W] holds, or 0 if it is no such pool.
int64_t NumLayers(ffi::AnyBuffer pool, int64_t blocks) {
  const auto dims = pool.dimensions();
  return dims.size() == 3 && blocks > 0 && dims[0] % blocks == 0 ? dims[0] / blocks : 0;
}

ffi::Error Decode(ffi::ThreadPool threads, F32x4 q, ffi::AnyBuffer pool, Int layer, Table tables,
                  Ints lens, Ints skip, Int num_rows, ffi::Result<F32x4> acc, ffi::Result<F32x3> m,
                  ffi::Result<F32x3> l, int64_t blocks, int64_t chunk, int64_t window,
                  int64_t value_dim, int64_t value_offset, int64_t codes, float soft_cap) {
  const auto dims = q.dimensions();
  const auto pool_dims = pool.dimensions();
  const int64_t layers = NumLayers(pool, blocks);
  if (layers == 0) return ffi::Error::InvalidArgument("pool: must be [L*P, B, W]");
  const Shape s{dims[0],      dims[1],      dims[2],      dims[3], value_dim, tables.dimensions()[1], blocks,
                pool_dims[1], pool_dims[2], value_offset, chunk,   window,    soft_cap};
  const int64_t heads = s.S * s.K * s.G;
  if (codes != 0 && (s.V != s.H || value_offset != s.K * s.H || !HoldsCodes(codes, s.K, s.H, s.W)))
    return ffi::Error::InvalidArgument("pool: must hold the scales of its codes behind keys and values of equal lanes");
  if (s.K * s.H > s.W || s.V < 1 || value_offset < 0 || value_offset + s.K * s.V > s.W || s.B < 1 || (s.B & (s.B - 1)) || s.M < 1 || chunk < 1)
    return ffi::Error::InvalidArgument("pool: must hold keys and values of every token in blocks of a power of two");
  if (tables.dimensions()[0] < s.S || static_cast<int64_t>(lens.element_count()) < s.S ||
      static_cast<int64_t>(skip.element_count()) < s.S || static_cast<int64_t>(acc->element_count()) != heads * s.V ||
      static_cast<int64_t>(m->element_count()) != heads || static_cast<int64_t>(l->element_count()) != heads)
    return ffi::Error::InvalidArgument("tables, lens, skip and results: must have the queries' rows");
  const int64_t rows = std::clamp<int64_t>(num_rows.typed_data()[0], 0, s.S);
  // As in xla.py: the caller has made NaN of the queries of a layer that is none.
  const int64_t at = std::clamp<int64_t>(layer.typed_data()[0], 0, layers - 1);
  auto run = [&](auto* data) {
    DecodeAll(threads, s, q.typed_data(), data, at, tables.typed_data(), lens.typed_data(), skip.typed_data(), rows,
              acc->typed_data(), m->typed_data(), l->typed_data());
    return ffi::Error::Success();
  };
  return WithPool(pool, codes, run);
}

// Tiles of queries of rows of several tokens; their states are written over `acc`, `m` and `l`.
ffi::Error Tiles(ffi::ThreadPool threads, F32x4 q, ffi::AnyBuffer pool, Int layer, Table tables, Ints lens, Ints starts,
                 Ints tile_row, Ints tile_start, Int num_tiles, F32x4 old_acc, F32x3 old_m, F32x3 old_l,
                 ffi::Result<F32x4> acc, ffi::Result<F32x3> m, ffi::Result<F32x3> l, int64_t blocks,
                 int64_t tile_queries, int64_t window, int64_t codes) {
  const auto dims = q.dimensions();
  const auto pool_dims = pool.dimensions();
  const int64_t layers = NumLayers(pool, blocks);
  if (layers == 0) return ffi::Error::InvalidArgument("pool: must be [L*P, B, W]");
  const tiles::Shape s{dims[1], dims[2], dims[3], tables.dimensions()[1], blocks, pool_dims[1], pool_dims[2], window};
  const int64_t T = dims[0], S = tables.dimensions()[0], heads = T * s.K * s.G;
  if (2 * s.K * s.H > s.W || (codes != 0 && !HoldsCodes(codes, s.K, s.H, s.W)) || s.B < 1 || (s.B & (s.B - 1)) || s.M < 1 ||
      S < 1 || tile_queries < 1)
    return ffi::Error::InvalidArgument(
        "pool: must hold 2*K*H lanes a token, and their scales, in blocks of a power of two");
  if (static_cast<int64_t>(lens.element_count()) < S || static_cast<int64_t>(starts.element_count()) < S + 1 ||
      tile_start.element_count() != tile_row.element_count() ||
      static_cast<int64_t>(old_acc.element_count()) != heads * s.H ||
      static_cast<int64_t>(old_m.element_count()) != heads || static_cast<int64_t>(old_l.element_count()) != heads ||
      acc->size_bytes() != old_acc.size_bytes() || m->size_bytes() != old_m.size_bytes() ||
      l->size_bytes() != old_l.size_bytes())
    return ffi::Error::InvalidArgument("tables, lens, tiles and state: must have the queries' rows");
  auto keep = [](auto& old, auto& now) {
    if (old.untyped_data() != now->untyped_data()) std::memcpy(now->untyped_data(), old.untyped_data(), old.size_bytes());
  };
  keep(old_acc, acc), keep(old_m, m), keep(old_l, l);
  const tiles::State state{acc->typed_data(), m->typed_data(), l->typed_data()};
  const int64_t most = std::max<int64_t>(1, tiles::kRows / s.G);
  const int64_t n = std::clamp<int64_t>(num_tiles.typed_data()[0], 0, tile_row.element_count());
  std::vector<tiles::Unit> units;
  for (int64_t i = n - 1; i >= 0; --i) {  // the last ones see the most keys
    const int64_t row = std::clamp<int64_t>(tile_row.typed_data()[i], 0, S - 1);
    const int64_t end = std::min<int64_t>(starts.typed_data()[row + 1], T);
    const int64_t from = std::max<int64_t>(tile_start.typed_data()[i], 0), to = std::min(from + tile_queries, end);
    const int64_t before = lens.typed_data()[row] - end;
    for (int64_t at = from; at < to; at += most)
      for (int64_t k = 0; k < s.K && before + at >= 0; ++k)
        units.push_back({tables.typed_data() + row * s.M, at, std::min(most, to - at), before + at, k});
  }
  const int64_t where = std::clamp<int64_t>(layer.typed_data()[0], 0, layers - 1) * blocks * s.B * s.W;
  auto run = [&](auto* data) {
    ParallelFor(threads, static_cast<int64_t>(units.size()),
                [&](int64_t i) { tiles::Work(s, units[i], q.typed_data(), data + where, state); });
    return ffi::Error::Success();
  };
  return WithPool(pool, codes, run);
}

// Rows kv[t] to slots[t] of one layer, in place; slots outside the layer, and layers outside the pool, are dropped.
ffi::Error Write(ffi::AnyBuffer pool, ffi::AnyBuffer kv, Ints slots, Int layer, ffi::Result<ffi::AnyBuffer> out,
                 int64_t blocks) {
  const int64_t layers = NumLayers(pool, blocks);
  if (layers == 0) return ffi::Error::InvalidArgument("pool: must be [L*P, B, W]");
  const auto dims = pool.dimensions();
  const auto kv_dims = kv.dimensions();
  if (kv.element_type() != pool.element_type() || kv_dims.size() != 2 || kv_dims[1] > dims[2] ||
      static_cast<int64_t>(slots.element_count()) < kv_dims[0] || out->size_bytes() != pool.size_bytes())
    return ffi::Error::InvalidArgument("kv: must be rows of the pool's dtype, a slot each");
  const int64_t size = static_cast<int64_t>(pool.size_bytes()) / (dims[0] * dims[1] * dims[2]);
  const int64_t row_bytes = dims[2] * size, used = kv_dims[1] * size;
  char* data = static_cast<char*>(out->untyped_data());
  if (data != pool.untyped_data()) std::memcpy(data, pool.untyped_data(), pool.size_bytes());
  const char* rows = static_cast<const char*>(kv.untyped_data());
  const int32_t* slot = slots.typed_data();
  const int64_t per_layer = blocks * dims[1], at = layer.typed_data()[0];
  if (at < 0 || at >= layers) return ffi::Error::Success();
  data += at * per_layer * row_bytes;
  for (int64_t t = 0; t < kv_dims[0]; ++t) {
    if (slot[t] >= 0 && slot[t] < per_layer) std::memcpy(data + slot[t] * row_bytes, rows + t * used, used);
  }
  return ffi::Error::Success();
}

// work(weights, scales): of matrices [rows, K]; scales, one per row, are null but of int8.
template <typename Work>
ffi::Error WithWeights(ffi::AnyBuffer w, Floats scale, const Work& work) {
  const ffi::DataType type = w.element_type();
  if (type == ffi::F32) return work(static_cast<const float*>(w.untyped_data()), nullptr);
  if (type == ffi::BF16) return work(static_cast<const uint16_t*>(w.untyped_data()), nullptr);
  if (type == ffi::S8 && static_cast<int64_t>(scale.element_count()) == w.dimensions()[0])
    return work(static_cast<const int8_t*>(w.untyped_data()), scale.typed_data());
  return ffi::Error::InvalidArgument("w: must be float32, bfloat16, or int8 with a scale per row");
}

// y[T, O] = x[T, K] w[O, K]^T; `scale` is empty, or of int8 rows.
ffi::Error Product(ffi::ThreadPool threads, F32x2 x, ffi::AnyBuffer w, Floats scale, ffi::Result<F32x2> y) {
  const auto dims = w.dimensions();
  const int64_t T = x.dimensions()[0], K = x.dimensions()[1];
  if (dims.size() != 2 || dims[1] != K || static_cast<int64_t>(y->element_count()) != T * dims[0])
    return ffi::Error::InvalidArgument("w: must be [O, K] for x [T, K] and y [T, O]");
  const int64_t O = dims[0];
  auto parallel = [&](int64_t n, const auto& work) { ParallelFor(threads, n, work); };
  auto run = [&](auto* data, const float* scales) {
    products::Product(parallel, threads.num_threads(), x.typed_data(), data, scales, y->typed_data(), T, O, K);
    return ffi::Error::Success();
  };
  return WithWeights(w, scale, run);
}

// y[A, O]: of assignment a row a / (A / T) of x[T, K] times group ids[a] of w[G * O, K]; zeros where there is none.
ffi::Error Grouped(ffi::ThreadPool threads, F32x2 x, ffi::AnyBuffer w, Floats scale, Ints ids, ffi::Result<F32x2> y,
                   int64_t groups) {
  const auto dims = w.dimensions();
  const int64_t T = x.dimensions()[0], K = x.dimensions()[1];
  const int64_t A = y->dimensions()[0], O = y->dimensions()[1];
  if (dims.size() != 2 || dims[1] != K || groups < 1 || dims[0] != groups * O || T < 1 || A % T ||
      static_cast<int64_t>(ids.element_count()) != A)
    return ffi::Error::InvalidArgument("w: must be [G*O, K] for x [T, K] and y [A, O], A a multiple of T, ids [A]");
  auto parallel = [&](int64_t n, const auto& work) { ParallelFor(threads, n, work); };
  auto run = [&](auto* data, const float* scales) {
    products::Grouped(parallel, threads.num_threads(), x.typed_data(), ids.typed_data(), data, scales, y->typed_data(),
                      A, A / T, groups, O, K);
    return ffi::Error::Success();
  };
  return WithWeights(w, scale, run);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedjaxGrouped, Grouped,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32x2>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Ret<F32x2>()
                                  .Attr<int64_t>("groups"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedjaxTiles, Tiles,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32x4>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Int>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Int>()
                                  .Arg<F32x4>()
                                  .Arg<F32x3>()
                                  .Arg<F32x3>()
                                  .Ret<F32x4>()
                                  .Ret<F32x3>()
                                  .Ret<F32x3>()
                                  .Attr<int64_t>("blocks")
                                  .Attr<int64_t>("tile_queries")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("codes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedjaxProduct, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32x2>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Ret<F32x2>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedjaxDecode, Decode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32x4>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Int>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Int>()
                                  .Ret<F32x4>()
                                  .Ret<F32x3>()
                                  .Ret<F32x3>()
                                  .Attr<int64_t>("blocks")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("value_dim")
                                  .Attr<int64_t>("value_offset")
                                  .Attr<int64_t>("codes")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedjaxWrite, Write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Int>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("blocks"));
