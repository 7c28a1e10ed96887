// The transforms among the bodies of the encode kernels (encode_body.h, which says what V is): products with
// a matrix of the head's size, and Hadamard transforms.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/hadamard_factors.h"

namespace kvant::simd {

template <class V>
struct TransformBody {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;

  // Each row has its own sums in the same order, whatever kRows is; several rows share the loads of the
  // matrix.
  template <int kVectors, int kRows>
  static void matvec_block(const uint16_t* m, float scale, const float* x, float* y, int dim) {
    F sum[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sum[r][v] = V::set1(0.0f);
    }
    for (int j = 0; j < dim; ++j) {
      const uint16_t* column = m + static_cast<size_t>(j) * dim;
      for (int v = 0; v < kVectors; ++v) {
        const F element = V::load_f16(column + v * kLanes);
        for (int r = 0; r < kRows; ++r) {
          sum[r][v] = V::add(sum[r][v], V::mul(element, V::set1(x[r * dim + j])));
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        V::store(y + r * dim + v * kLanes, V::mul(sum[r][v], V::set1(scale)));
      }
    }
  }

  // Full vectors, then half a vector where 16 lanes meet a multiple of 8.
  template <int kRows>
  static void matvec_rows(const uint16_t* m, float scale, const float* x, float* y, int dim) {
    constexpr int kWide = 8 / kRows;  // 8 sums hide the latency of an addition
    int i = 0;
    for (; i + kWide * kLanes <= dim; i += kWide * kLanes)
      matvec_block<kWide, kRows>(m + i, scale, x, y + i, dim);
    for (; i + 4 * kLanes <= dim; i += 4 * kLanes) matvec_block<4, kRows>(m + i, scale, x, y + i, dim);
    for (; i + kLanes <= dim; i += kLanes) matvec_block<1, kRows>(m + i, scale, x, y + i, dim);
    if constexpr (kLanes == 16) {
      if (i == dim) return;
      for (int r = 0; r < kRows; ++r) {
        F sum = V::set1(0.0f);
        for (int j = 0; j < dim; ++j) {
          const F element = V::load_f16_half(m + static_cast<size_t>(j) * dim + i);
          sum = V::add(sum, V::mul(element, V::set1(x[r * dim + j])));
        }
        V::store_half(y + r * dim + i, V::mul(sum, V::set1(scale)));
      }
    }
  }

  static void matvec(const uint16_t* m, float scale, const float* x, float* y, int dim, int rows) {
    int r = 0;
    if constexpr (kLanes == 1) {  // by columns, so that the matrix is read in order
      for (; r < rows; ++r, x += dim, y += dim) {
        for (int i = 0; i < dim; ++i) y[i] = 0.0f;
        for (int j = 0; j < dim; ++j) {
          for (int i = 0; i < dim; ++i) y[i] = y[i] + V::load_f16(m + j * dim + i) * x[j];
        }
        for (int i = 0; i < dim; ++i) y[i] = y[i] * scale;
      }
    } else {
      for (; r + 4 <= rows; r += 4) matvec_rows<4>(m, scale, x + r * dim, y + r * dim, dim);
      for (; r + 2 <= rows; r += 2) matvec_rows<2>(m, scale, x + r * dim, y + r * dim, dim);
      for (; r < rows; ++r) matvec_rows<1>(m, scale, x + r * dim, y + r * dim, dim);
    }
  }

  // y[a][i] = sum_j h[i][j] * x[j * n + a], j ascending from 0. The matrix is symmetric: lanes are i.
  template <int kColumns>
  static void factor_columns(const float* x, int factor, int n, float (*y)[kHadamardStride]) {
    const float* h = hadamard_matrix(factor);
    for (int i = 0; i < factor; i += kLanes) {
      for (int a = 0; a < n; a += kColumns) {
        F sum[kColumns];
        for (int k = 0; k < kColumns; ++k) sum[k] = V::set1(0.0f);
        for (int j = 0; j < factor; ++j) {
          const F signs = V::load(h + j * kHadamardStride + i);
          for (int k = 0; k < kColumns; ++k) {
            sum[k] = V::add(sum[k], V::mul(signs, V::set1(x[j * n + a + k])));
          }
        }
        for (int k = 0; k < kColumns; ++k) V::store(y[a + k] + i, sum[k]);
      }
    }
  }

  // A block of n * factor channels; n is a power of two with n * factor <= kMaxHeadDim, so at most 16.
  static void hadamard_of_factor(float* x, int factor, int n) {
    alignas(64) float y[16][kHadamardStride];
    switch (n) {
      case 1:
        factor_columns<1>(x, factor, n, y);
        break;
      case 2:
        factor_columns<2>(x, factor, n, y);
        break;
      case 4:
        factor_columns<4>(x, factor, n, y);
        break;
      default:
        factor_columns<8>(x, factor, n, y);
        break;
    }
    for (int stride = 1; stride < n; stride *= 2) {
      for (int a = 0; a < n; ++a) {
        if ((a & stride) != 0) continue;
        for (int i = 0; i < factor; i += kLanes) {
          const F first = V::load(y[a] + i), second = V::load(y[a + stride] + i);
          V::store(y[a] + i, V::add(first, second));
          V::store(y[a + stride] + i, V::sub(first, second));
        }
      }
    }
    for (int i = 0; i < factor; ++i) {
      for (int a = 0; a < n; ++a) x[i * n + a] = y[a][i];
    }
  }

  static void butterflies_scalar(float* x, int n, int stride) {
    for (int i = 0; i < n; i += 2 * stride) {
      for (int j = i; j < i + stride; ++j) {
        const float a = x[j], b = x[j + stride];
        x[j] = a + b;
        x[j + stride] = a - b;
      }
    }
  }

  // All strides below kLanes on each vector.
  static void butterflies_inside(float* x, int n) {
    for (int i = 0; i < n; i += kLanes) {
      F a = V::load(x + i);
      if constexpr (kLanes >= 2) a = V::template butterfly<1>(a);
      if constexpr (kLanes >= 4) a = V::template butterfly<2>(a);
      if constexpr (kLanes >= 8) a = V::template butterfly<4>(a);
      if constexpr (kLanes >= 16) a = V::template butterfly<8>(a);
      V::store(x + i, a);
    }
  }

  static void hadamard_power(float* x, int n) {
    int stride = 1;
    if (n >= kLanes) {
      butterflies_inside(x, n);
      stride = kLanes;
    }
    for (; stride < n; stride *= 2) {
      if (stride < kLanes) {
        butterflies_scalar(x, n, stride);
        continue;
      }
      for (int i = 0; i < n; i += 2 * stride) {
        for (int j = i; j < i + stride; j += kLanes) {
          const F a = V::load(x + j), b = V::load(x + j + stride);
          V::store(x + j, V::add(a, b));
          V::store(x + j + stride, V::sub(a, b));
        }
      }
    }
  }

  // A row of blocks by the target's own rotation, where it has one of this size.
  static bool rotate_blocks(float* x, int dim, int block, int factor, float norm) {
    if constexpr (requires { V::hadamard_of_factor(x, factor, block, norm); }) {
      for (int first = 0; first + block <= dim; first += block) {
        if (!V::hadamard_of_factor(x + first, factor, block / factor, norm)) return false;
      }
      return true;
    }
    return false;
  }

  static void hadamard(float* x, int dim, int block, int rows) {
    const int factor = hadamard_factor(block);
    const int n = block / factor;
    const float norm = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block)));
    for (int r = 0; r < rows; ++r, x += dim) {
      if (factor != 1 && rotate_blocks(x, dim, block, factor, norm)) continue;
      for (int first = 0; first + block <= dim; first += block) {
        if (factor != 1) {
          hadamard_of_factor(x + first, factor, n);
        } else {
          hadamard_power(x + first, block);
        }
      }
      for (int i = 0; i < dim; ++i) x[i] = x[i] * norm;
    }
  }
};

}  // namespace kvant::simd
