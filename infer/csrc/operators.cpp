// Operators of the CPU engine: attention over row groups (the `native` backend), and linear layers that read their
// weights in the order in which they lie.
//
// A compiled forward must see neither pages nor packed weights. So an engine registers a model (add_model, set_pages,
// set_projection), announces every pass (set_pass), and each layer calls attend or linear with its own index.
//
// K pages lie transposed, [page, kv_head, head_dim, page_size], V pages as they are read, [page, kv_head, page_size,
// head_dim]: 16 keys of one dimension are one vector, and nothing is gathered or copied. A row's result depends on its
// own keys only, visited in tiles of 64 positions counted from 0, each tile in the same order of operations: it is the
// same whatever else shares the pass, however its prefix came into the pages.
// Softmax over tiles: Milakov and Gimelshein 2018 (arXiv 1805.02867).

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kTile = 64;       // keys per softmax step
constexpr int64_t kMaxQueries = 32; // rows x heads of one unit of work
constexpr int64_t kRowTile = 16;    // rows of one product in batch-invariant mode
constexpr int kAccumulators = 16;   // vectors summed at a time by the low-rank products
constexpr int64_t kMaxPanels = 4;   // panels of one piece of a low-rank product
constexpr size_t kManyRows = 64;    // from here on oneDNN is faster
constexpr int64_t kMinPieceWork = 1 << 15; // multiplications worth a thread of their own

// Columns of the groups tensor.
enum Column { kFirstRow, kNumRows, kPrefixLen, kWritesPages, kTable, kAdapter, kNumLogitRows, kNumColumns };

// One low-rank update of a part of a projection: output[:, first : first + size] += scale * (input A^T) B^T.
// A^T and B^T lie in panels of 16 columns, as K pages do; columns and ranks are filled up with zeros. In bfloat16 they
// are here a second time as they were read: oneDNN has matrix instructions, which pay for many rows.
struct LowRank {
  at::Tensor a, b; // [ranks / 16, in_features, 16], [ceil(size / 16), ranks, 16]
  at::Tensor plain_a, plain_b; // [rank, in_features], [size, rank]
  double scale;
  int64_t first, size;

  int64_t ranks() const { return b.size(1); }
};

using Adapter = std::map<int64_t, std::vector<LowRank>>; // projection -> updates

struct Projection {
  at::Tensor weight; // as oneDNN wants it when is_packed, else [out_features, in_features]
  std::optional<at::Tensor> bias;
  bool is_packed;
  bool is_head; // sees the logit rows only
};

// keys [pages, kv_heads, head_dim, page_size] and values [pages, kv_heads, page_size, value_dim] by layer.
struct Model {
  int64_t page_size;
  std::vector<at::Tensor> keys, values;
  std::vector<Projection> projections;
  std::map<int64_t, Adapter> adapters;
};

// Rows of one adapter in the running pass, ascending; logit_rows are counted among the logit rows.
struct AdapterRows {
  const Adapter* adapter;
  std::vector<int64_t> rows, logit_rows;
};

struct Pass {
  Model* model = nullptr;
  at::Tensor groups; // [num_groups, kNumColumns] int64
  at::Tensor tables; // [*] int64, block tables one after the other
  int64_t num_rows = 0;
  bool is_tiled = false;
  std::vector<AdapterRows> adapters;
};

// Never destroyed: at exit torch may be gone before these tensors are.
std::map<int64_t, Model>& models = *new std::map<int64_t, Model>();
int64_t next_model = 0;
thread_local Pass running;

template <typename A> struct Lanes {
  typedef A Vec __attribute__((vector_size(kLanes * sizeof(A)), aligned(1)));
};
template <typename A> using Vec = typename Lanes<A>::Vec;
typedef uint16_t Half __attribute__((vector_size(kLanes * 2), aligned(1)));
typedef uint32_t Word __attribute__((vector_size(kLanes * 4), aligned(1)));

template <typename A, typename T> inline Vec<A> load(const T* from) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
#ifdef __AVX512F__ // g++ widens in two halves, five instructions for one
    const __m512i word = _mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#else
    Half half;
    std::memcpy(&half, from, sizeof(half));
    const Word word = __builtin_convertvector(half, Word) << 16;
#endif
    Vec<A> out;
    std::memcpy(&out, &word, sizeof(out));
    return out;
  } else {
    Vec<A> out;
    std::memcpy(&out, from, sizeof(out));
    return out;
  }
}

template <typename T, typename A> inline void store(T* to, Vec<A> x) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    typedef int32_t Int __attribute__((vector_size(kLanes * 4), aligned(1)));
    Word bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const Word rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; // to nearest, ties to even
    const Int is_number = x == x;
    const Word word = is_number ? rounded : Word{} + 0x7fc0;
    const Half half = __builtin_convertvector(word, Half);
    std::memcpy(to, &half, sizeof(half));
  } else {
    std::memcpy(to, &x, sizeof(x));
  }
}

inline Vec<double> exp_of(Vec<double> x) {
  for (int64_t i = 0; i < kLanes; i++) x[i] = std::exp(x[i]);
  return x;
}

// exp for x <= 0 within 2 ulp: x = n ln 2 + r, polynomial of the Cephes library for e^r.
inline Vec<float> exp_of(Vec<float> x) {
  typedef int32_t Int __attribute__((vector_size(kLanes * 4), aligned(1)));
  const float magic = 12582912.f; // 1.5 * 2^23: adding it rounds to an integer
  Int alive = x > -87.f;
  Vec<float> clamped = alive ? x : Vec<float>{} - 87.f;
  Vec<float> n = (clamped * 1.44269504088896341f + magic) - magic;
  Vec<float> r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  Int exponent = (__builtin_convertvector(n, Int) + 127) << 23;
  Vec<float> scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  Int bits;
  p = p * scale;
  std::memcpy(&bits, &p, sizeof(bits));
  bits &= alive;
  std::memcpy(&p, &bits, sizeof(p));
  return p;
}

template <typename A> inline A largest(Vec<A> x) {
  A out = x[0];
  for (int64_t i = 1; i < kLanes; i++) out = x[i] > out ? x[i] : out;
  return out;
}

template <typename A> inline A total(Vec<A> x) {
  A part[8];
  for (int64_t i = 0; i < 8; i++) part[i] = x[i] + x[i + 8];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

struct Heads {
  int64_t num_kv_heads, num_groups, head_dim, value_dim;
};

struct Rule {
  double scale, softcap;
  int64_t window; // 0: none
};

// Queries of one unit: rows first_row .. of one group, one key/value head, the query heads [head, head + num_heads).
struct Unit {
  int64_t group, kv_head, first_head, num_heads, first_row, num_rows;
};

// Keys of one unit in order of position: pages below page_end, then own rows that no page holds.
template <typename T> struct Keys {
  const T *keys, *values;
  const int64_t* table;
  int64_t page_size, page_end;
  std::vector<T> own_keys, own_values; // laid out like pages, from position own_start on
  int64_t own_start;
};

template <typename T, typename A> struct Scratch {
  std::vector<A> queries, sums;
  alignas(64) A scores[kMaxQueries][kTile];
  A best[kMaxQueries], weight[kMaxQueries];
};

// scores[x][16 keys] for X queries over one block of 16 keys.
template <typename A, typename T, int X>
inline void score(const A* queries, int64_t dim, const T* keys, int64_t key_stride, A* out, int64_t out_stride) {
  Vec<A> sum[X];
  for (int x = 0; x < X; x++) sum[x] = Vec<A>{};
  for (int64_t d = 0; d < dim; d++) {
    Vec<A> key = load<A>(keys + d * key_stride);
    for (int x = 0; x < X; x++) sum[x] += queries[x * dim + d] * key;
  }
  for (int x = 0; x < X; x++) std::memcpy(out + x * out_stride, &sum[x], sizeof(sum[x]));
}

template <typename A, typename T>
inline void score_all(const A* queries, int64_t num, int64_t dim, const T* keys, int64_t key_stride, A* out) {
  int64_t x = 0;
  for (; x + 8 <= num; x += 8) score<A, T, 8>(queries + x * dim, dim, keys, key_stride, out + x * kTile, kTile);
  for (; x + 3 <= num; x += 3) score<A, T, 3>(queries + x * dim, dim, keys, key_stride, out + x * kTile, kTile);
  for (; x < num; x++) score<A, T, 1>(queries + x * dim, dim, keys, key_stride, out + x * kTile, kTile);
}

// sums[x] += weights[x] * values over `count` keys of one page, for X queries; 16 numbers of the value at a time.
template <typename A, typename T, int X>
inline void mix(const A* weights, int64_t count, const T* values, int64_t dim, A* sums) {
  int64_t e = 0;
  for (; e + kLanes <= dim; e += kLanes) {
    Vec<A> sum[X];
    for (int x = 0; x < X; x++) std::memcpy(&sum[x], sums + x * dim + e, sizeof(sum[x]));
    for (int64_t j = 0; j < count; j++) {
      Vec<A> value = load<A>(values + j * dim + e);
      for (int x = 0; x < X; x++) sum[x] += weights[x * kTile + j] * value;
    }
    for (int x = 0; x < X; x++) std::memcpy(sums + x * dim + e, &sum[x], sizeof(sum[x]));
  }
  for (; e < dim; e++)
    for (int x = 0; x < X; x++)
      for (int64_t j = 0; j < count; j++) sums[x * dim + e] += weights[x * kTile + j] * A(values[j * dim + e]);
}

template <typename A, typename T>
inline void mix_all(const A* weights, int64_t num, int64_t count, const T* values, int64_t dim, A* sums) {
  int64_t x = 0;
  for (; x + 8 <= num; x += 8) mix<A, T, 8>(weights + x * kTile, count, values, dim, sums + x * dim);
  for (; x + 3 <= num; x += 3) mix<A, T, 3>(weights + x * kTile, count, values, dim, sums + x * dim);
  for (; x < num; x++) mix<A, T, 1>(weights + x * kTile, count, values, dim, sums + x * dim);
}

// The page of the keys at `position`, which is a multiple of the page size.
template <typename T> struct Page {
  const T *keys, *values;
};

template <typename T>
inline Page<T> page_at(const Keys<T>& from, int64_t index, int64_t kv_head, const Heads& heads, bool is_own) {
  const int64_t k_page = heads.head_dim * from.page_size, v_page = heads.value_dim * from.page_size;
  if (is_own) {
    return {from.own_keys.data() + index * k_page, from.own_values.data() + index * v_page};
  }
  const int64_t at = from.table[index] * heads.num_kv_heads + kv_head;
  return {from.keys + at * k_page, from.values + at * v_page};
}

// One softmax step over the keys [start, end) of at most kTile positions, which lie in whole pages from `start` on.
template <typename T, typename A>
void step(Scratch<T, A>& s, const Keys<T>& from, const Heads& heads, const Rule& rule, int64_t kv_head, bool is_own,
          int64_t start, int64_t end, int64_t first_index, const std::vector<int64_t>& position, int64_t limit_by_row,
          int64_t num) {
  const int64_t page_size = from.page_size;
  const int64_t num_keys = end - start;
  for (int64_t at = 0; at < num_keys; at += page_size) {
    Page<T> page = page_at(from, first_index + at / page_size, kv_head, heads, is_own);
    for (int64_t block = 0; block < page_size && at + block < num_keys; block += kLanes)
      score_all(s.queries.data(), num, heads.head_dim, page.keys + block, page_size, &s.scores[0][at + block]);
  }
  const A lowest = -std::numeric_limits<A>::infinity();
  const int64_t padded = (num_keys + kLanes - 1) / kLanes * kLanes;
  for (int64_t x = 0; x < num; x++) {
    A* row = s.scores[x];
    const int64_t row_end = limit_by_row ? std::min(end, position[x] + 1) : end;
    const int64_t row_start = rule.window ? std::max(start, position[x] - rule.window + 1) : start;
    for (int64_t j = 0; j < num_keys; j++) row[j] *= A(rule.scale);
    if (rule.softcap)
      for (int64_t j = 0; j < num_keys; j++) row[j] = A(rule.softcap) * std::tanh(row[j] / A(rule.softcap));
    for (int64_t j = 0; j < std::min(row_start - start, padded); j++) row[j] = lowest;
    for (int64_t j = std::max<int64_t>(row_end - start, 0); j < padded; j++) row[j] = lowest;
    A best = s.best[x];
    for (int64_t j = 0; j < padded; j += kLanes) best = std::max(best, largest<A>(load<A>(row + j)));
    if (best == lowest) { // nothing visible yet
      for (int64_t j = 0; j < padded; j++) row[j] = 0;
      continue;
    }
    const A old = s.best[x] == lowest ? A(0) : std::exp(s.best[x] - best);
    A sum = s.weight[x] * old;
    for (int64_t j = 0; j < padded; j += kLanes) {
      Vec<A> p = exp_of(load<A>(row + j) - best);
      sum += total<A>(p);
      std::memcpy(row + j, &p, sizeof(p));
    }
    s.weight[x] = sum;
    s.best[x] = best;
    if (old != A(1)) {
      A* out = s.sums.data() + x * heads.value_dim;
      for (int64_t e = 0; e < heads.value_dim; e++) out[e] *= old;
    }
  }
  for (int64_t at = 0; at < num_keys; at += page_size) {
    Page<T> page = page_at(from, first_index + at / page_size, kv_head, heads, is_own);
    mix_all(&s.scores[0][at], num, std::min(page_size, num_keys - at), page.values, heads.value_dim, s.sums.data());
  }
}

template <typename T, typename A>
void attend_unit(const Unit& unit, const int64_t* group, const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value, const Model& cache, int64_t layer, const int64_t* tables, const Heads& heads,
                 const Rule& rule, T* out) {
  thread_local Scratch<T, A> s;
  const int64_t num = unit.num_rows * unit.num_heads;
  const int64_t prefix_len = group[kPrefixLen];
  s.queries.resize(kMaxQueries * heads.head_dim);
  s.sums.assign(kMaxQueries * heads.value_dim, A(0));
  std::vector<int64_t> position(num);
  const T* queries = query.const_data_ptr<T>();
  for (int64_t r = 0; r < unit.num_rows; r++) {
    const int64_t row = group[kFirstRow] + unit.first_row + r;
    for (int64_t h = 0; h < unit.num_heads; h++) {
      const int64_t x = r * unit.num_heads + h;
      const T* from = queries + (unit.first_head + h) * query.stride(1) + row * query.stride(2);
      for (int64_t d = 0; d < heads.head_dim; d++) s.queries[x * heads.head_dim + d] = A(from[d]);
      position[x] = prefix_len + unit.first_row + r;
      s.best[x] = -std::numeric_limits<A>::infinity();
      s.weight[x] = 0;
    }
  }
  Keys<T> from;
  from.keys = cache.keys[layer].const_data_ptr<T>();
  from.values = cache.values[layer].const_data_ptr<T>();
  from.table = tables + group[kTable];
  from.page_size = cache.page_size;
  const int64_t last = prefix_len + unit.first_row + unit.num_rows; // one past the newest position
  from.page_end = group[kWritesPages] ? last : prefix_len;
  const int64_t oldest = rule.window ? std::max<int64_t>(prefix_len + unit.first_row - rule.window + 1, 0) : 0;
  for (int64_t start = oldest / kTile * kTile; start < from.page_end; start += kTile) {
    step<T, A>(s, from, heads, rule, unit.kv_head, false, start, std::min(start + kTile, from.page_end),
               start / cache.page_size, position, group[kWritesPages], num);
  }
  if (!group[kWritesPages]) {
    const int64_t count = unit.first_row + unit.num_rows, page_size = cache.page_size;
    const int64_t num_pages = (count + page_size - 1) / page_size;
    from.own_keys.assign(num_pages * heads.head_dim * page_size, T(0));
    from.own_values.assign(num_pages * heads.value_dim * page_size, T(0));
    const T *keys = key.const_data_ptr<T>(), *values = value.const_data_ptr<T>();
    for (int64_t i = 0; i < count; i++) {
      const int64_t row = group[kFirstRow] + i, page = i / page_size, slot = i % page_size;
      const T* k = keys + unit.kv_head * key.stride(1) + row * key.stride(2);
      const T* v = values + unit.kv_head * value.stride(1) + row * value.stride(2);
      for (int64_t d = 0; d < heads.head_dim; d++)
        from.own_keys[(page * heads.head_dim + d) * page_size + slot] = k[d];
      for (int64_t e = 0; e < heads.value_dim; e++)
        from.own_values[(page * page_size + slot) * heads.value_dim + e] = v[e];
    }
    for (int64_t i = 0; i < count; i += kTile)
      step<T, A>(s, from, heads, rule, unit.kv_head, true, prefix_len + i, prefix_len + std::min(i + kTile, count),
                 i / page_size, position, 1, num);
  }
  const int64_t num_heads = heads.num_kv_heads * heads.num_groups;
  for (int64_t r = 0; r < unit.num_rows; r++) {
    const int64_t row = group[kFirstRow] + unit.first_row + r;
    for (int64_t h = 0; h < unit.num_heads; h++) {
      const int64_t x = r * unit.num_heads + h;
      const A share = A(1) / s.weight[x];
      T* to = out + (row * num_heads + unit.first_head + h) * heads.value_dim;
      const A* sums = s.sums.data() + x * heads.value_dim;
      for (int64_t e = 0; e < heads.value_dim; e++) to[e] = T(sums[e] * share);
    }
  }
}

template <typename T>
void write_group(const int64_t* group, const at::Tensor& key, const at::Tensor& value, const Model& cache,
                 int64_t layer, const int64_t* tables, const Heads& heads) {
  T *keys = cache.keys[layer].data_ptr<T>(), *values = cache.values[layer].data_ptr<T>();
  const int64_t page_size = cache.page_size;
  at::parallel_for(0, group[kNumRows], 32, [&](int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = group[kFirstRow] + i, at = group[kPrefixLen] + i;
    const int64_t page = tables[group[kTable] + at / page_size], slot = at % page_size;
    for (int64_t h = 0; h < heads.num_kv_heads; h++) {
      const T* k = key.const_data_ptr<T>() + h * key.stride(1) + row * key.stride(2);
      const T* v = value.const_data_ptr<T>() + h * value.stride(1) + row * value.stride(2);
      T* to_k = keys + (page * heads.num_kv_heads + h) * heads.head_dim * page_size + slot;
      T* to_v = values + ((page * heads.num_kv_heads + h) * page_size + slot) * heads.value_dim;
      for (int64_t d = 0; d < heads.head_dim; d++) to_k[d * page_size] = k[d];
      std::memcpy(to_v, v, heads.value_dim * sizeof(T));
    }
  }
  });
}

std::vector<Unit> units_of(const int64_t* groups, int64_t num_groups, const Heads& heads) {
  // Few and small units leave a thread idle: then a unit is one query head, which reads the keys again.
  const bool is_small = num_groups * heads.num_kv_heads < 4 * at::get_num_threads();
  std::vector<Unit> units;
  for (int64_t g = 0; g < num_groups; g++) {
    const int64_t num_rows = groups[g * kNumColumns + kNumRows];
    const int64_t heads_each = is_small || heads.num_groups > kMaxQueries ? 1 : heads.num_groups;
    const int64_t rows_each = std::max<int64_t>(kMaxQueries / heads_each, 1);
    for (int64_t first = 0; first < num_rows; first += rows_each)
      for (int64_t h = 0; h < heads.num_kv_heads * heads.num_groups; h += heads_each)
        units.push_back({g, h / heads.num_groups, h, heads_each, first, std::min(rows_each, num_rows - first)});
  }
  return units;
}

template <typename T, typename A>
void attend_typed(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t layer,
                  const Rule& rule, at::Tensor& out) {
  const Model& cache = *running.model;
  const int64_t* groups = running.groups.const_data_ptr<int64_t>();
  const int64_t* tables = running.tables.const_data_ptr<int64_t>();
  const int64_t num_groups = running.groups.size(0);
  const Heads heads{key.size(1), query.size(1) / key.size(1), query.size(3), value.size(3)};
  for (int64_t g = 0; g < num_groups; g++)
    if (groups[g * kNumColumns + kWritesPages])
      write_group<T>(groups + g * kNumColumns, key, value, cache, layer, tables, heads);
  const std::vector<Unit> units = units_of(groups, num_groups, heads);
  // Later rows see more keys: neighbours in the list go to different threads.
  const int64_t num_units = units.size(), num_threads = std::min<int64_t>(at::get_num_threads(), num_units);
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++)
      for (int64_t u = thread; u < num_units; u += num_threads)
        attend_unit<T, A>(units[u], groups + units[u].group * kNumColumns, query, key, value, cache, layer, tables,
                          heads, rule, out.data_ptr<T>());
  });
}

// query [1, H, R, D], key [1, K, R, D], value [1, K, R, E] -> [1, R, H, E]; window 0 and softcap 0 are none.
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t layer, double scale,
                  int64_t window, double softcap) {
  TORCH_CHECK(running.model, "attend was called outside a pass of the engine");
  TORCH_CHECK(layer < static_cast<int64_t>(running.model->keys.size()) && running.model->keys[layer].defined(),
              "layer ", layer, " has no pages");
  TORCH_CHECK(query.size(2) >= running.num_rows, query.size(2), " rows in a pass of ", running.num_rows);
  auto packed = [](const at::Tensor& x) { return x.stride(3) == 1 || x.size(3) == 1 ? x : x.contiguous(); };
  const at::Tensor q = packed(query), k = packed(key), v = packed(value);
  // Zeros: a row that pads the pass belongs to no group.
  at::Tensor out = at::zeros({1, query.size(2), query.size(1), value.size(3)}, query.options());
  const Rule rule{scale, softcap, window};
  switch (query.scalar_type()) {
    case at::kBFloat16: attend_typed<at::BFloat16, float>(q, k, v, layer, rule, out); break;
    case at::kFloat: attend_typed<float, float>(q, k, v, layer, rule, out); break;
    case at::kDouble: attend_typed<double, double>(q, k, v, layer, rule, out); break;
    default: TORCH_CHECK(false, "attend knows bfloat16, float32 and float64");
  }
  return out;
}

at::Tensor product(const at::Tensor& input, const Projection& projection) {
  if (!projection.is_packed) return at::linear(input, projection.weight, projection.bias);
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                               c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Signature>();
  return op.call(input, projection.weight, projection.bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// f over 16 rows at a time, so that a row meets the same kernel whatever else is in the pass.
template <typename F> at::Tensor in_tiles(const at::Tensor& rows, const F& f) {
  const int64_t num = rows.size(0), padded = (num + kRowTile - 1) / kRowTile * kRowTile;
  const at::Tensor input = num == padded ? rows : at::constant_pad_nd(rows, {0, 0, 0, padded - num});
  std::vector<at::Tensor> parts;
  for (int64_t first = 0; first < padded; first += kRowTile) parts.push_back(f(input.narrow(0, first, kRowTile)));
  return at::cat(parts).narrow(0, 0, num);
}

// An update and the rows that it acts on. In scratch: its rows of the input [n, in_features], and their products with
// A^T [n, ranks].
struct Update {
  const LowRank* low_rank;
  const std::vector<int64_t>* rows;
  int64_t input_at, product_at;
};

// Some panels of one update, for some of its rows.
struct Piece {
  int64_t update, panel, num_panels, first, num;
};

std::vector<Piece> pieces_of(const std::vector<Update>& updates, at::Tensor LowRank::*matrix) {
  int64_t total = 0;
  for (const Update& update : updates) total += (update.low_rank->*matrix).size(0);
  const int64_t share = std::clamp<int64_t>(total / at::get_num_threads(), 1, kMaxPanels);
  std::vector<Piece> pieces;
  for (size_t u = 0; u < updates.size(); u++) {
    const int64_t num_panels = (updates[u].low_rank->*matrix).size(0), num_rows = updates[u].rows->size();
    // Many rows fill the registers with one panel, few rows need several.
    const int64_t most = num_rows >= kAccumulators ? 1 : share;
    for (int64_t panel = 0; panel < num_panels; panel += most)
      for (int64_t first = 0; first < num_rows; first += kMaxQueries)
        pieces.push_back({static_cast<int64_t>(u), panel, std::min(most, num_panels - panel), first,
                          std::min(kMaxQueries, num_rows - first)});
  }
  return pieces;
}

// out[x][16 c ...] = left[x] times panel c, for X rows and C panels [depth, 16].
template <typename A, typename T, int X, int C>
inline void multiply(const A* left, int64_t depth, const T* panels, A* out, int64_t stride) {
  Vec<A> sum[X][C];
  for (int x = 0; x < X; x++)
    for (int c = 0; c < C; c++) sum[x][c] = Vec<A>{};
  for (int64_t d = 0; d < depth; d++) {
    Vec<A> right[C];
    for (int c = 0; c < C; c++) right[c] = load<A>(panels + (c * depth + d) * kLanes);
    for (int x = 0; x < X; x++)
      for (int c = 0; c < C; c++) sum[x][c] += left[x * depth + d] * right[c];
  }
  for (int x = 0; x < X; x++)
    for (int c = 0; c < C; c++) store<A, A>(out + x * stride + c * kLanes, sum[x][c]);
}

template <typename A, typename T, int C>
inline void multiply_rows(const A* left, int64_t num, int64_t depth, const T* panels, A* out, int64_t stride) {
  constexpr int kMost = kAccumulators / C;
  int64_t x = 0;
  for (; x + kMost <= num; x += kMost) multiply<A, T, kMost, C>(left + x * depth, depth, panels, out + x * stride, stride);
  for (; x + 4 <= num; x += 4) multiply<A, T, 4, C>(left + x * depth, depth, panels, out + x * stride, stride);
  for (; x < num; x++) multiply<A, T, 1, C>(left + x * depth, depth, panels, out + x * stride, stride);
}

template <typename A, typename T>
inline void multiply_all(const A* left, int64_t num, int64_t depth, const T* panels, int64_t num_panels, A* out,
                         int64_t stride) {
  int64_t c = 0;
  for (; c + 4 <= num_panels; c += 4)
    multiply_rows<A, T, 4>(left, num, depth, panels + c * depth * kLanes, out + c * kLanes, stride);
  for (; c + 2 <= num_panels; c += 2)
    multiply_rows<A, T, 2>(left, num, depth, panels + c * depth * kLanes, out + c * kLanes, stride);
  for (; c < num_panels; c++)
    multiply_rows<A, T, 1>(left, num, depth, panels + c * depth * kLanes, out + c * kLanes, stride);
}

template <typename T, typename A> void gather_rows(const T* input, int64_t dim, const std::vector<int64_t>& rows, A* to) {
  at::parallel_for(0, rows.size(), 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T* from = input + rows[i] * dim;
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) store<A, A>(to + i * dim + d, load<A>(from + d));
      for (; d < dim; d++) to[i * dim + d] = A(from[d]);
    }
  });
}

template <typename T, typename A>
void add_to_output(const A* change, int64_t change_stride, const Update& update, const Piece& piece, T* output,
                   int64_t out_features) {
  const LowRank& low_rank = *update.low_rank;
  for (int64_t i = 0; i < piece.num; i++) {
    T* row = output + (*update.rows)[piece.first + i] * out_features + low_rank.first;
    for (int64_t c = 0; c < piece.num_panels; c++) {
      const int64_t column = (piece.panel + c) * kLanes, count = std::min(kLanes, low_rank.size - column);
      T* to = row + column;
      T own[kLanes] = {};
      T* at = count == kLanes ? to : own;
      if (count < kLanes) std::copy_n(to, count, own);
      store<T, A>(at, load<A>(at) + load<A>(change + i * change_stride + c * kLanes) * A(low_rank.scale));
      if (count < kLanes) std::copy_n(own, count, to);
    }
  }
}

// A row's change is summed in the same order whatever shares the pass, and rounded once, with its product.
template <typename T, typename A>
void add_low_rank(const at::Tensor& input, std::vector<Update>& updates, at::Tensor& output) {
  thread_local std::vector<A> input_scratch, product_scratch;
  const int64_t dim = input.size(1), out_features = output.size(1);
  int64_t num_inputs = 0, num_products = 0;
  const std::vector<int64_t>* last = nullptr;
  for (Update& update : updates) { // updates of one adapter follow each other and share their input
    const int64_t num_rows = update.rows->size();
    if (update.rows != last) num_inputs += num_rows;
    last = update.rows;
    update.input_at = (num_inputs - num_rows) * dim;
    update.product_at = num_products;
    num_products += num_rows * update.low_rank->ranks();
  }
  input_scratch.resize(num_inputs * dim);
  product_scratch.resize(num_products);
  A *inputs = input_scratch.data(), *products = product_scratch.data();
  last = nullptr;
  for (const Update& update : updates) {
    if (update.rows != last) gather_rows<T, A>(input.const_data_ptr<T>(), dim, *update.rows, inputs + update.input_at);
    last = update.rows;
  }
  const std::vector<Piece> down = pieces_of(updates, &LowRank::a), up = pieces_of(updates, &LowRank::b);
  const auto grain = [&](int64_t num_pieces) { // what is over in a microsecond stays on one thread
    return std::max<int64_t>(kMinPieceWork * num_pieces / (num_products * dim), 1);
  };
  at::parallel_for(0, down.size(), grain(down.size()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Update& update = updates[down[i].update];
      const int64_t ranks = update.low_rank->ranks();
      const T* panel = update.low_rank->a.const_data_ptr<T>() + down[i].panel * dim * kLanes;
      multiply_all(inputs + update.input_at + down[i].first * dim, down[i].num, dim, panel, down[i].num_panels,
                   products + update.product_at + down[i].first * ranks + down[i].panel * kLanes, ranks);
    }
  });
  T* to = output.data_ptr<T>();
  at::parallel_for(0, up.size(), grain(up.size()), [&](int64_t begin, int64_t end) {
    constexpr int64_t stride = kMaxPanels * kLanes;
    A change[kMaxQueries * stride];
    for (int64_t i = begin; i < end; i++) {
      const Update& update = updates[up[i].update];
      const int64_t ranks = update.low_rank->ranks();
      const T* panel = update.low_rank->b.const_data_ptr<T>() + up[i].panel * ranks * kLanes;
      multiply_all(products + update.product_at + up[i].first * ranks, up[i].num, ranks, panel, up[i].num_panels,
                   change, stride);
      add_to_output<T, A>(change, stride, update, up[i], to, out_features);
    }
  });
}

void add_many_rows(const at::Tensor& input, const std::vector<LowRank>& low_ranks, const std::vector<int64_t>& rows,
                   at::Tensor& output) {
  const bool is_all = static_cast<int64_t>(rows.size()) == input.size(0);
  const at::Tensor index = at::from_blob(const_cast<int64_t*>(rows.data()), {int64_t(rows.size())}, at::kLong);
  const at::Tensor chosen = is_all ? input : input.index_select(0, index);
  for (const LowRank& low_rank : low_ranks) {
    const at::Tensor change = at::linear(at::linear(chosen, low_rank.plain_a), low_rank.plain_b);
    at::Tensor to = output.narrow(1, low_rank.first, low_rank.size);
    if (is_all) to.add_(change, low_rank.scale);
    else to.index_add_(0, index, change, low_rank.scale);
  }
}

void add_adapters(const at::Tensor& input, int64_t index, bool is_head, at::Tensor& output) {
  std::vector<Update> updates;
  for (const AdapterRows& rows_of : running.adapters) {
    const std::vector<int64_t>& rows = is_head ? rows_of.logit_rows : rows_of.rows;
    const auto found = rows_of.adapter->find(index);
    if (found == rows_of.adapter->end() || rows.empty()) continue;
    TORCH_CHECK(rows.back() < input.size(0), "projection ", index, " sees ", input.size(0), " rows of ",
                running.num_rows);
    if (input.scalar_type() == at::kBFloat16 && !running.is_tiled && rows.size() >= kManyRows)
      add_many_rows(input, found->second, rows, output);
    else
      for (const LowRank& low_rank : found->second) updates.push_back({&low_rank, &rows, 0, 0});
  }
  if (updates.empty()) return;
  const at::Tensor rows = input.contiguous();
  switch (rows.scalar_type()) {
    case at::kBFloat16: add_low_rank<at::BFloat16, float>(rows, updates, output); break;
    case at::kFloat: add_low_rank<float, float>(rows, updates, output); break;
    case at::kDouble: add_low_rank<double, double>(rows, updates, output); break;
    default: TORCH_CHECK(false, "adapters know bfloat16, float32 and float64");
  }
}

// input [1, R, in_features] -> [1, R, out_features], with the updates of the rows' adapters.
at::Tensor linear(const at::Tensor& input, int64_t index, int64_t out_features) {
  TORCH_CHECK(running.model, "linear was called outside a pass of the engine");
  const Projection& projection = running.model->projections.at(index);
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = out_features;
  if (input.numel() == 0) return at::empty(shape, input.options());
  const at::Tensor rows = input.reshape({-1, input.size(-1)});
  at::Tensor output = running.is_tiled
      ? in_tiles(rows, [&](const at::Tensor& x) { return product(x, projection); })
      : product(rows, projection);
  if (!running.adapters.empty()) {
    output = output.contiguous();
    add_adapters(rows, index, projection.is_head, output);
  }
  return output.view(shape);
}

int64_t add_model(int64_t page_size) {
  TORCH_CHECK(page_size % kLanes == 0 && kTile % page_size == 0, "pages of ", page_size, " tokens: 16, 32 or 64");
  models[next_model].page_size = page_size;
  return next_model++;
}

void drop_model(int64_t model) {
  const auto found = models.find(model);
  if (found == models.end()) return;
  if (running.model == &found->second) running = Pass{};
  models.erase(found);
}

void set_pages(int64_t model, int64_t layer, const at::Tensor& keys, const at::Tensor& values) {
  Model& to = models.at(model);
  if (layer >= static_cast<int64_t>(to.keys.size())) {
    to.keys.resize(layer + 1);
    to.values.resize(layer + 1);
  }
  to.keys[layer] = keys;
  to.values[layer] = values;
}

int64_t add_projection(int64_t model, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool is_packed,
                       bool is_head) {
  auto& to = models.at(model).projections;
  to.push_back(Projection{weight, bias, is_packed, is_head});
  return to.size() - 1;
}

// In panels of 16 columns [ceil(columns / 16), depth, 16], of a matrix [columns, depth].
at::Tensor panels_of(const at::Tensor& matrix) {
  const int64_t missing = (kLanes - matrix.size(0) % kLanes) % kLanes;
  return at::constant_pad_nd(matrix, {0, 0, 0, missing}).contiguous().view({-1, kLanes, matrix.size(1)}).transpose(1, 2).contiguous();
}

// a [rank, in_features], b [size, rank].
void add_low_rank_update(int64_t model, int64_t adapter, int64_t projection, const at::Tensor& a, const at::Tensor& b,
                         double scale, int64_t first) {
  TORCH_CHECK(a.size(0) == b.size(1), "a low-rank update of ranks ", a.size(0), " and ", b.size(1));
  const at::Tensor panels_a = panels_of(a);
  const at::Tensor panels_b = panels_of(at::constant_pad_nd(b, {0, panels_a.size(0) * kLanes - a.size(0)}));
  const bool has_matrix_instructions = a.scalar_type() == at::kBFloat16;
  models.at(model).adapters[adapter][projection].push_back(
      LowRank{panels_a, panels_b, has_matrix_instructions ? a.contiguous() : at::Tensor(),
              has_matrix_instructions ? b.contiguous() : at::Tensor(), scale, first, b.size(0)});
}

void drop_adapter(int64_t model, int64_t adapter) {
  Model& from = models.at(model);
  if (running.model == &from) running = Pass{};
  from.adapters.erase(adapter);
}

// Adapters are numbered from 0; -1 is none.
std::vector<AdapterRows> adapters_of(const Model& model, const int64_t* groups, int64_t num_groups) {
  std::map<int64_t, AdapterRows> found;
  int64_t logit_row = 0;
  for (int64_t g = 0; g < num_groups; g++) {
    const int64_t* group = groups + g * kNumColumns;
    if (group[kAdapter] >= 0) {
      AdapterRows& to = found[group[kAdapter]];
      to.adapter = &model.adapters.at(group[kAdapter]);
      for (int64_t i = 0; i < group[kNumRows]; i++) to.rows.push_back(group[kFirstRow] + i);
      for (int64_t i = 0; i < group[kNumLogitRows]; i++) to.logit_rows.push_back(logit_row + i);
    }
    logit_row += group[kNumLogitRows];
  }
  std::vector<AdapterRows> all;
  for (auto& [_, rows_of] : found) all.push_back(std::move(rows_of));
  return all;
}

void set_pass(int64_t model, const at::Tensor& groups, const at::Tensor& tables, bool is_tiled) {
  TORCH_CHECK(groups.size(1) == kNumColumns, "groups have ", groups.size(1), " columns, not ", int64_t(kNumColumns));
  Pass pass;
  pass.model = &models.at(model);
  pass.groups = groups;
  pass.tables = tables;
  pass.is_tiled = is_tiled;
  for (int64_t g = 0; g < groups.size(0); g++) {
    const int64_t* group = groups.const_data_ptr<int64_t>() + g * kNumColumns;
    pass.num_rows = std::max(pass.num_rows, group[kFirstRow] + group[kNumRows]);
  }
  pass.adapters = adapters_of(*pass.model, groups.const_data_ptr<int64_t>(), groups.size(0));
  running = std::move(pass);
}

} // namespace

TORCH_LIBRARY(jacobi_llm, library) {
  library.def("attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int window, float softcap) -> Tensor");
  library.def("linear(Tensor input, int projection, int out_features) -> Tensor");
  library.def("add_model(int page_size) -> int");
  library.def("drop_model(int model) -> ()");
  library.def("set_pages(int model, int layer, Tensor keys, Tensor values) -> ()");
  library.def("add_projection(int model, Tensor weight, Tensor? bias, bool is_packed, bool is_head) -> int");
  library.def("add_low_rank_update(int model, int adapter, int projection, Tensor a, Tensor b, float scale, int first) -> ()");
  library.def("drop_adapter(int model, int adapter) -> ()");
  library.def("set_pass(int model, Tensor groups, Tensor tables, bool is_tiled) -> ()");
}

TORCH_LIBRARY_IMPL(jacobi_llm, CPU, library) {
  library.impl("attend", attend);
  library.impl("linear", linear);
}

TORCH_LIBRARY_IMPL(jacobi_llm, CompositeExplicitAutograd, library) {
  library.impl("add_model", add_model);
  library.impl("drop_model", drop_model);
  library.impl("set_pages", set_pages);
  library.impl("add_projection", add_projection);
  library.impl("add_low_rank_update", add_low_rank_update);
  library.impl("drop_adapter", drop_adapter);
  library.impl("set_pass", set_pass);
}
