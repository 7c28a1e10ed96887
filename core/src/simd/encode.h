// Encode-side kernels: transforms, scale search, packing. Every target gives the same bits: no fused
// multiply-add, sums in the order that the scalar reference states.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvant/format.h"

namespace kvant::simd {

struct EncodeKernels {
  // y[r][i] = sum_j m[j * dim + i] * x[r][j], j ascending, multiply then add.
  void (*matvec)(const float* m, const float* x, float* y, int dim, int rows);
  // In place, orthonormal, on each of dim / block blocks; block = 2^k * {1, 12, 20, 28}.
  void (*hadamard)(float* x, int dim, int block, int rows);
  // Packs codes[64][stored_channels] (token-major bytes) of one band into its planes of the tile, and back.
  void (*pack_band)(const BandLayout& band, Side side, const uint8_t* codes, std::byte* tile);
  void (*unpack_band)(const BandLayout& band, Side side, const std::byte* tile, uint8_t* codes);
};

const EncodeKernels* scalar_encode_kernels();
const EncodeKernels* avx2_encode_kernels();    // nullptr when not compiled for x86-64
const EncodeKernels* avx512_encode_kernels();

}  // namespace kvant::simd
