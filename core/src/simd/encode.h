// Encode-side kernels: transforms, scale search, quantizing, packing. Every target gives the same bits: no
// fused multiply-add, and every sum in the order that is stated here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvant/format.h"

namespace kvant::simd {

inline constexpr int kMaxScaleTrials = 16;

// One search of scales: each lane (a token, or a channel) has `steps` values x[i * stride + lane] and picks
// among trial scales anchor[lane] * ratio[j]. The error of a trial is that of the symmetric grid around
// centre[lane]: with y = (x - centre) * (inverse_anchor * inverse_ratio[j]) and h = 2^(bits - 1),
//   d = (min(max(floor(y), -h), h - 1) - y) + 0.5,   error_j = (anchor * ratio[j])^2 * sum_i d * d *
//   weight[i]
// summed over i ascending, one sum per lane; "weight" of null leaves the factor out. The error of scale zero
// is sum_i (x - centre)^2 * weight[i].
struct ScaleSearch {
  const float* x = nullptr;
  size_t stride = 0;
  int steps = 0;
  int lanes = 0;  // a multiple of 16; arrays below are readable to the end
  int bits = 0;
  const float* weight = nullptr;          // [steps] or null
  const float* centre = nullptr;          // [lanes]
  const float* anchor = nullptr;          // [lanes]
  const float* inverse_anchor = nullptr;  // [lanes]
  int trials = 0;                         // a multiple of 4, at most kMaxScaleTrials
  float ratio[kMaxScaleTrials] = {};
  float inverse_ratio[kMaxScaleTrials] = {};
};

// One line through codes and values per lane (asymmetric grids): starting from the given scale and low,
//   code = trunc(min(max((x - low) * (1 / scale) + 0.5, 0), 2^bits - 1))
// and the scale and low of least squared error for these codes replace the given ones when the error they
// give is smaller; kFitPasses - 1 times. Sums over i ascending, one per lane; lanes of scale 0 keep it.
inline constexpr int kFitPasses = 3;
struct LineFit {
  const float* x = nullptr;  // as in ScaleSearch
  size_t stride = 0;
  int steps = 0;
  int lanes = 0;  // a multiple of 16
  int bits = 0;
  float* scale = nullptr;  // [lanes], in and out
  float* low = nullptr;    // [lanes], in and out
};

// Everything that turns values of one band into codes and back, as floats (see kvant/format.h):
//   code = trunc(min(max((x - centre[c] - low[t]) * (inverse_channel[c] * inverse_token[t]) + (mid + 0.5),
//   0),
//                    2^bits - 1))
//   x    = (channel[c] * token[t]) * (code - mid) + low[t] + centre[c]
// evaluated left to right. So a value half way between two levels takes the upper one.
struct BandGrid {
  int channels = 0;  // a multiple of 8
  int bits = 0;
  float mid = 0;
  const float* token = nullptr;          // [64]
  const float* inverse_token = nullptr;  // [64]; 0 where token is 0. Quantizing only, like inverse_channel
  const float* low = nullptr;            // [64]
  const float* channel = nullptr;        // [channels]
  const float* inverse_channel = nullptr;
  const float* centre = nullptr;  // [channels]
};

// Sums over the live values of one band. Lane l sums channels c with c % 16 == l, tokens ascending and for
// one token channels ascending.
struct BandErrors {
  float signal[16] = {};  // of x * x
  float error[16] = {};   // of (decoded - x)^2
  float max_error = 0;
};

struct EncodeKernels {
  // y[r][i] = scale * sum_j m[j * dim + i] * x[r][j], j ascending from 0.0f, multiply then add; m in
  // binary16.
  void (*matvec)(const uint16_t* m, float scale, const float* x, float* y, int dim, int rows);
  // In place, orthonormal, on each of dim / block blocks; block = 2^k * {1, 12, 20, 28}. The matrix is
  // symmetric, so this is its own inverse. Factor of 12, 20 or 28 first, then butterflies of growing stride,
  // then one multiplication with 1 / sqrt(block).
  void (*hadamard)(float* x, int dim, int block, int rows);
  // Packs codes[64][stored_channels] (token-major bytes) of one band into its planes of the tile, and back.
  void (*pack_band)(const BandLayout& band, Side side, const uint8_t* codes, std::byte* tile);
  void (*unpack_band)(const BandLayout& band, Side side, const std::byte* tile, uint8_t* codes);
  // columns[c][64] = rows[64][c], rows stride floats apart; `channels` is a multiple of 8.
  void (*transpose)(const float* rows, size_t stride, int channels, float* columns);
  // best[lane]: index of the trial of least error, the first one of equals; `trials` where scale zero has a
  // smaller error than every trial.
  void (*search_scale)(const ScaleSearch& search, uint8_t* best);
  void (*fit_line)(const LineFit& fit);
  // x: [64] rows, stride floats apart, from the band's first channel. codes: [64][code_stride] bytes.
  // Errors are added up for tokens whose live bit is set.
  void (*quantize)(const BandGrid& grid, const float* x, size_t stride, uint64_t live, uint8_t* codes,
                   size_t code_stride, BandErrors* errors);
  void (*dequantize)(const BandGrid& grid, const uint8_t* codes, size_t code_stride, float* x, size_t stride);
  // Arrays of any length; the conversions of half.h.
  void (*to_half)(const float* x, uint16_t* y, size_t count);
  void (*from_half)(const uint16_t* x, float* y, size_t count);
};

const EncodeKernels* scalar_encode_kernels();
const EncodeKernels* avx2_encode_kernels();  // nullptr when not compiled for x86-64
const EncodeKernels* avx512_encode_kernels();

}  // namespace kvant::simd
