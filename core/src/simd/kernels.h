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
// (workspace): sizes by prepared_query_bytes(). One per thread: qk_tile writes into it for channel-scaled
// layouts, whose channel scales it folds into q and quantizes per tile.
struct PreparedQueries {
  int rows = 0;
  const float* q = nullptr;  // [rows][head_dim] transformed, times scale * log2(e)
  // Band b, row r: q ~ scale * v with integers v. Bands of at most 6 bits have one term, v = q8. Wider bands
  // have two, v = 64 * q8[term 0] + q8[term 1]. Term k starts at q8 + band_offset[b] + (r * terms[b] + k) *
  // channels(b).
  int8_t* q8 = nullptr;
  uint32_t band_offset[kMaxBands] = {};
  uint8_t terms[kMaxBands] = {};
  float* scale = nullptr;   // [band][rows]
  float* offset = nullptr;  // [band][rows]: -mid * scale * sum of v
  float* q_sum = nullptr;   // [band][rows]: sum of q over the band, the factor of token lows
};

// One row's running softmax over base-2 logits. acc_tile is in the values' transformed space (quantized
// tiles), acc_rows in the original space (exact rows).
struct RowState {
  float max = -__builtin_huge_valf();
  float sum = 0.0f;       // of weights 2^(logit - max)
  float tile_sum = 0.0f;  // the share of `sum` that fell on quantized values; kept by the caller
  float added = 0.0f;     // sum of the weights of the last softmax call with live bits
};

struct AttentionKernels {
  void (*prepare_queries)(const TileLayout& key_layout, const float* q, int rows, PreparedQueries* out);
  // logits[r * 64 + t] = q_r . k_t over the tile, base[r] added. Rows with live[r] == 0 may be skipped.
  // `next`: the tile of this layout that will be read after this one; its lines are prefetched as those of
  // `tile` are used. Pages lie anywhere in memory, and asking for a whole tile at once would stall on the
  // line-fill buffers. `tile` itself when there is none.
  void (*qk_tile)(const TileLayout& layout, const std::byte* tile, const std::byte* next,
                  const PreparedQueries& q, const float* base, const uint64_t* live, float* logits);
  // Exact rows: `count` <= 64 rows of f16 (or bf16) words, `stride` words apart. base is not added.
  void (*qk_rows)(const uint16_t* k, size_t stride, int count, bool bf16, int head_dim, const float* q,
                  int rows, const uint64_t* live, float* logits);
  // Dequantize-first reference of qk_tile/pv_tile: k and v as decoded floats [64][dim].
  void (*qk_floats)(const float* k, int count, int head_dim, const float* q, int rows, const uint64_t* live,
                    float* logits);
  // Online softmax over 64 logits of each row: hides tokens whose live bit is 0, updates max, sum and added,
  // turns logits into weights 2^(logit - max) in place (0 where hidden) and writes the factor that
  // accumulators must be multiplied with into rescale[r] (1 when the maximum stayed). Rows with live 0 are
  // untouched.
  void (*softmax)(float* logits, int rows, const uint64_t* live, RowState* state, float* rescale);
  // acc[r * value_dim ..] = acc * rescale[r] for rows with live[r] != 0 and rescale[r] != 1.
  void (*rescale)(float* acc, int value_dim, int rows, const uint64_t* live, const float* rescale);
  // acc += weights x values. workspace: pv_workspace_bytes(rows).
  void (*pv_tile)(const TileLayout& layout, const std::byte* tile, const std::byte* next,
                  const float* weights, int rows, const uint64_t* live, float* acc, std::byte* workspace);
  void (*pv_rows)(const uint16_t* v, size_t stride, int count, bool bf16, int value_dim, const float* weights,
                  int rows, const uint64_t* live, float* acc);
  void (*pv_floats)(const float* v, int count, int value_dim, const float* weights, int rows,
                    const uint64_t* live, float* acc);
};

struct KernelTable {
  const char* name;  // "scalar", "hwy128", "avx2", "avx512vnni", ...
  const EncodeKernels* encode;
  const AttentionKernels* attention;
};

// Largest number of rows in one call.
inline constexpr int kMaxRows = 256;

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
