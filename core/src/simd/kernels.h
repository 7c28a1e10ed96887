// The table of kernels that differ by ISA. One table per target; every target passes the same tests.
//
// Contract. Encode-side kernels and integer dot products give the same bits on every target. The float part
// of attention may differ between targets, but on one target the result for a query row never depends on
// which other rows are processed with it, on the number of threads, or on earlier calls: every kernel treats
// each row by the same sequence of operations whatever `rows` is.
//
// A "row" is one (query token, query head) pair; all rows of a call share one KV head. Logits are in base 2:
// queries carry scale * log2(e).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvant/format.h"
#include "kvant/status.h"
#include "simd/encode.h"

namespace kvant::simd {

// Integer form of query rows against one key layout, made by prepare_queries. Memory belongs to the caller
// (workspace): sizes by prepared_query_bytes(). One per thread: qk_tiles may write into it for channel-scaled
// layouts, whose channel scales it folds into q and quantizes per tile.
struct PreparedQueries {
  int rows = 0;
  const float* q = nullptr;  // [rows][head_dim] transformed, times scale * log2(e)
  // Band b, row r: q ~ scale * v with integers v. Bands have one term, v = q8, or two, v = 64 * q8[term 0] +
  // q8[term 1]; wide ones two (query_terms). Term k starts at q8 + band_offset[b] + (r * terms[b] + k) *
  // channels(b).
  int8_t* q8 = nullptr;
  uint32_t band_offset[kMaxBands] = {};
  uint8_t terms[kMaxBands] = {};
  float* scale = nullptr;   // [band][rows]
  float* offset = nullptr;  // [band][rows]: -middle * scale * sum of v, asymmetric + middle * sum of q
  float* q_sum = nullptr;   // [band][rows]: sum of q over the band, the factor of token lows
};

// One row's running softmax over base-2 logits. acc_tile is in the values' transformed space (quantized
// tiles), acc_rows in the original space (exact rows).
struct RowState {
  float max = -__builtin_huge_valf();  // an integer: the largest logit so far, rounded up
  float sum = 0.0f;                    // of weights 2^(logit - max)
  // Kept by the caller: the share of `sum` that fell on quantized values, and whether acc_rows was written.
  float tile_sum = 0.0f;
  bool exact = false;
};

// Logits of some pages for some rows: token t of page i for row r at logits[i * page_stride + r * 64 + t].
struct LogitStrip {
  float* logits = nullptr;
  size_t page_stride = 0;
  const uint64_t* live = nullptr;  // page i, row r at [i * live_stride + r]: the tokens that the row sees
  size_t live_stride = 0;
  int pages = 0;  // at most kMaxStripPages
  int rows = 0;
  float* sums = nullptr;  // out: sum of weights of page i and row r at [i * sum_stride + r]
  size_t sum_stride = 0;
  // Weights of a page are zero, and so is their sum, when its largest logit, rounded up, is further than this
  // below the largest up to this page; infinity: never.
  float skip_below = __builtin_huge_valf();
};

// One tile of keys and the rows that read it: logits[r * 64 + t] = base[r] + q_r . k_t. Rows with live[r] ==
// 0 may be skipped.
struct KeyTask {
  const TileLayout* layout = nullptr;
  const std::byte* tile = nullptr;
  // A tile, of this layout or another, that will be read soon: as many lines of its codes as this tile has
  // are prefetched to the second-level cache while those of `tile` are used, and all that lies behind them.
  // Pages lie anywhere in memory, and asking for a whole tile at once would stall on the line-fill buffers.
  // `tile` and 0 when there is none.
  const std::byte* next = nullptr;
  uint32_t next_bytes = 0;
  const PreparedQueries* queries = nullptr;
  const float* base = nullptr;
  const uint64_t* live = nullptr;
  float* logits = nullptr;
};

// One tile of values: acc[r * value_dim + c] += sum over t of weights[r * 64 + t] * v_t[c], for rows with
// live[r] != 0. Weights of hidden tokens are zero.
struct ValueTask {
  const TileLayout* layout = nullptr;
  const std::byte* tile = nullptr;
  const std::byte* next = nullptr;  // as above
  uint32_t next_bytes = 0;
  const float* weights = nullptr;
  int rows = 0;
  const uint64_t* live = nullptr;
  float* acc = nullptr;
};

struct AttentionKernels {
  void (*prepare_queries)(const TileLayout& key_layout, const float* q, int rows, PreparedQueries* out);
  // Scores of some tiles. Tasks of one call are in the order of their memory; the work on queries of several
  // tasks overlaps, which is why there is not one call per tile.
  void (*qk_tiles)(const KeyTask* tasks, int count);
  // Exact rows: `count` <= 64 rows of f16 (or bf16) words, `stride` words apart. base is not added. next:
  // rows that will be read soon, prefetched; k or v itself when there are none.
  void (*qk_rows)(const uint16_t* k, const uint16_t* next, size_t stride, int count, bool bf16, int head_dim,
                  const float* q, int rows, const uint64_t* live, float* logits);
  // Dequantize-first reference of qk_tiles/pv_tiles: k and v as decoded floats [64][dim].
  void (*qk_floats)(const float* k, int count, int head_dim, const float* q, int rows, const uint64_t* live,
                    float* logits);
  // Online softmax over a strip: hides tokens whose live bit is 0, updates max and sum, turns logits into
  // weights 2^(logit - max) in place (0 where hidden) and writes the factor that accumulators must be
  // multiplied with into rescale[r] (1 when the maximum stayed). Weights of pages of which a row sees nothing
  // are undefined, their sums 0. max is an integer, so factors are powers of two and a row's result does not
  // depend on how its pages are cut into strips.
  void (*softmax)(const LogitStrip& strip, RowState* state, float* rescale);
  // acc[r * value_dim ..] *= factor[r] for rows with factor[r] != 1.
  void (*rescale)(float* acc, int value_dim, int rows, const float* factor);
  // acc[c] = acc[c] * keep + from[c] * add for `count` channels; powers of two or 0, so that only the sum
  // rounds.
  void (*combine)(float* acc, const float* from, int count, float keep, float add);
  // Adds weighted values of some tiles, one after the other. workspace: pv_workspace_bytes(rows).
  void (*pv_tiles)(const ValueTask* tasks, int count, std::byte* workspace);
  void (*pv_rows)(const uint16_t* v, const uint16_t* next, size_t stride, int count, bool bf16, int value_dim,
                  const float* weights, int rows, const uint64_t* live, float* acc);
  void (*pv_floats)(const float* v, int count, int value_dim, const float* weights, int rows,
                    const uint64_t* live, float* acc);
};

struct KernelTable {
  const char* name;  // "scalar", "hwy128", "avx2", "avx512vnni", ...
  const EncodeKernels* encode;
  const AttentionKernels* attention;
};

// Largest number of rows in one call, and of pages in a strip.
inline constexpr int kMaxRows = 256;
inline constexpr int kMaxStripPages = 8;

size_t prepared_query_bytes(const TileLayout& key_layout, int rows);
// Points the arrays of `out` into `memory` (prepared_query_bytes, 64-byte aligned).
void place_prepared_queries(const TileLayout& key_layout, int rows, std::byte* memory, PreparedQueries* out);
size_t pv_workspace_bytes(const TileLayout& value_layout, int rows);

// The table in use: the best one this CPU runs, unless forced.
const KernelTable& kernels();
// Tables that this CPU can run, best last; "scalar" is always first.
std::vector<const KernelTable*> available_kernels();
// Forces a table by name for the whole process; the error lists the names that this CPU can run.
Status force_kernels(std::string_view name);

}  // namespace kvant::simd
