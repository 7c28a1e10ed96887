// Bodies of the encode kernels that are the same for every target, written over a vector type V:
//   kLanes                      1, 8 or 16
//   F                           kLanes floats
//   load, store, set1, add, sub, mul, div, min, max, floor
//   less_blend(a, b, x, y)      per lane a < b ? x : y
//   butterfly<stride>(a)        per lane l with partner p = l ^ stride: l < p ? a[l] + a[p] : a[p] - a[l]
//   load_codes, store_codes     kLanes bytes <-> floats, truncating
//   load_f16                    kLanes binary16 -> floats
// and for 16 lanes the same loads and stores over the lower 8 lanes: load_half reads zeros into the upper
// ones. Included only by the files of the targets; V is local to each of them, so nothing here is shared
// between code compiled for different instruction sets. Nothing from std:: is called for the same reason.
#pragma once

#include "simd/encode.h"
#include "simd/hadamard_factors.h"

namespace kvant::simd {

template <class V>
struct EncodeBody {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kGroups = 16 / kLanes;  // vectors per 16 channels

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

  static void hadamard(float* x, int dim, int block, int rows) {
    const int factor = hadamard_factor(block);
    const int n = block / factor;
    const float norm = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block)));
    for (int r = 0; r < rows; ++r, x += dim) {
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

  template <bool kWeighted>
  static void trial_errors(const ScaleSearch& s, int lane, int first, F* errors) {
    const float half_levels = static_cast<float>(1 << (s.bits - 1));
    const F lowest = V::set1(-half_levels), highest = V::set1(half_levels - 1.0f), half = V::set1(0.5f);
    const F centre = V::load(s.centre + lane), inverse = V::load(s.inverse_anchor + lane);
    F factor[4], sum[4];
    for (int t = 0; t < 4; ++t) {
      factor[t] = V::mul(inverse, V::set1(s.inverse_ratio[first + t]));
      sum[t] = V::set1(0.0f);
    }
    const float* x = s.x + lane;
    for (int i = 0; i < s.steps; ++i, x += s.stride) {
      const F shifted = V::sub(V::load(x), centre);
      F weight;
      if constexpr (kWeighted) weight = V::set1(s.weight[i]);
      for (int t = 0; t < 4; ++t) {
        const F y = V::mul(shifted, factor[t]);
        const F level = V::min(V::max(V::floor(y), lowest), highest);
        const F d = V::add(V::sub(level, y), half);
        F square = V::mul(d, d);
        if constexpr (kWeighted) square = V::mul(square, weight);
        sum[t] = V::add(sum[t], square);
      }
    }
    const F anchor = V::load(s.anchor + lane);
    for (int t = 0; t < 4; ++t) {
      const F scale = V::mul(anchor, V::set1(s.ratio[first + t]));
      errors[t] = V::mul(V::mul(scale, scale), sum[t]);
    }
  }

  static F zero_error(const ScaleSearch& s, int lane) {
    const F centre = V::load(s.centre + lane);
    F sum = V::set1(0.0f);
    const float* x = s.x + lane;
    for (int i = 0; i < s.steps; ++i, x += s.stride) {
      const F shifted = V::sub(V::load(x), centre);
      F square = V::mul(shifted, shifted);
      if (s.weight != nullptr) square = V::mul(square, V::set1(s.weight[i]));
      sum = V::add(sum, square);
    }
    return sum;
  }

  static void search_scale(const ScaleSearch& s, uint8_t* best) {
    for (int lane = 0; lane < s.lanes; lane += kLanes) {
      F errors[kMaxScaleTrials];
      for (int first = 0; first < s.trials; first += 4) {
        if (s.weight != nullptr) {
          trial_errors<true>(s, lane, first, errors + first);
        } else {
          trial_errors<false>(s, lane, first, errors + first);
        }
      }
      F least = errors[0], index = V::set1(0.0f);
      for (int t = 1; t <= s.trials; ++t) {
        const F error = t < s.trials ? errors[t] : zero_error(s, lane);
        index = V::less_blend(error, least, V::set1(static_cast<float>(t)), index);
        least = V::less_blend(error, least, error, least);
      }
      V::store_codes(best + lane, index);
    }
  }

  struct LineSums {
    F code, code_square, value, product, error;
  };

  // Sums of one pass: codes, their squares, x - low, products, squared errors.
  static LineSums line_sums(const LineFit& fit, int lane, F scale, F low) {
    const F zero = V::set1(0.0f), half = V::set1(0.5f),
            top = V::set1(static_cast<float>((1 << fit.bits) - 1));
    const F inverse = V::less_blend(zero, scale, V::div(V::set1(1.0f), scale), zero);
    LineSums sums = {zero, zero, zero, zero, zero};
    const float* x = fit.x + lane;
    for (int i = 0; i < fit.steps; ++i, x += fit.stride) {
      const F value = V::sub(V::load(x), low);
      const F code = V::floor(V::min(V::max(V::add(V::mul(value, inverse), half), zero), top));
      const F difference = V::sub(V::mul(code, scale), value);
      sums.code = V::add(sums.code, code);
      sums.code_square = V::add(sums.code_square, V::mul(code, code));
      sums.value = V::add(sums.value, value);
      sums.product = V::add(sums.product, V::mul(code, value));
      sums.error = V::add(sums.error, V::mul(difference, difference));
    }
    return sums;
  }

  static void fit_line(const LineFit& fit) {
    const F zero = V::set1(0.0f), count = V::set1(static_cast<float>(fit.steps));
    for (int lane = 0; lane < fit.lanes; lane += kLanes) {
      F scale = V::load(fit.scale + lane), low = V::load(fit.low + lane);
      F best_scale = scale, best_low = low, best_error = zero;
      for (int pass = 0; pass < kFitPasses; ++pass) {
        const LineSums s = line_sums(fit, lane, scale, low);
        if (pass == 0) best_error = s.error;
        best_scale = V::less_blend(s.error, best_error, scale, best_scale);
        best_low = V::less_blend(s.error, best_error, low, best_low);
        best_error = V::less_blend(s.error, best_error, s.error, best_error);
        const F spread = V::sub(V::mul(count, s.code_square), V::mul(s.code, s.code));
        const F slope =
            V::div(V::sub(V::mul(count, s.product), V::mul(s.code, s.value)), V::max(spread, V::set1(1.0f)));
        // All codes equal, or a slope that is not positive: nothing to fit.
        const F fitted = V::less_blend(zero, spread, slope, scale);
        const F next = V::less_blend(zero, fitted, fitted, scale);
        low = V::add(low, V::div(V::sub(s.value, V::mul(next, s.code)), count));
        scale = next;
      }
      V::store(fit.scale + lane, best_scale);
      V::store(fit.low + lane, best_low);
    }
  }

  struct GridVectors {
    F mid, offset, zero, top;
    explicit GridVectors(const BandGrid& g)
        : mid(V::set1(g.mid)),
          offset(V::set1(g.mid + 0.5f)),
          zero(V::set1(0.0f)),
          top(V::set1(static_cast<float>((1 << g.bits) - 1))) {}
  };
  struct TokenVectors {
    F scale, inverse, low;
    TokenVectors(const BandGrid& g, int t)
        : scale(V::set1(g.token[t])), inverse(V::set1(g.inverse_token[t])), low(V::set1(g.low[t])) {}
  };

  static F decode_vector(const GridVectors& g, F channel, F token, F low, F centre, F code) {
    const F scaled = V::mul(V::mul(channel, token), V::sub(code, g.mid));
    return V::add(V::add(scaled, low), centre);
  }

  static F code_vector(const GridVectors& g, const TokenVectors& t, F inverse_channel, F centre, F x) {
    const F shifted = V::sub(V::sub(x, centre), t.low);
    const F y = V::add(V::mul(shifted, V::mul(inverse_channel, t.inverse)), g.offset);
    return V::min(V::max(y, g.zero), g.top);
  }

  struct ErrorSums {
    F signal[kGroups], error[kGroups], max_error;
  };

  static void add_errors(ErrorSums* sums, int group, F x, F difference) {
    sums->signal[group] = V::add(sums->signal[group], V::mul(x, x));
    sums->error[group] = V::add(sums->error[group], V::mul(difference, difference));
    sums->max_error = V::max(sums->max_error, V::max(difference, V::sub(V::set1(0.0f), difference)));
  }

  // One token. The decoded value is computed from the stored codes, which are read back.
  template <bool kLive>
  static void quantize_row(const BandGrid& g, const GridVectors& grid, const TokenVectors& token,
                           const float* x, uint8_t* codes, ErrorSums* sums) {
    int c = 0;
    for (; c + kLanes <= g.channels; c += kLanes) {
      const F value = V::load(x + c), centre = V::load(g.centre + c);
      const F y = code_vector(grid, token, V::load(g.inverse_channel + c), centre, value);
      V::store_codes(codes + c, y);
      if constexpr (kLive) {
        const F decoded =
            decode_vector(grid, V::load(g.channel + c), token.scale, token.low, centre, V::floor(y));
        add_errors(sums, (c / kLanes) % kGroups, value, V::sub(decoded, value));
      }
    }
    if constexpr (kLanes == 16) {
      if (c == g.channels) return;
      const F value = V::load_half(x + c), centre = V::load_half(g.centre + c);
      const F y = code_vector(grid, token, V::load_half(g.inverse_channel + c), centre, value);
      V::store_codes_half(codes + c, y);
      if constexpr (kLive) {
        const F decoded =
            decode_vector(grid, V::load_half(g.channel + c), token.scale, token.low, centre, V::floor(y));
        add_errors(sums, 0, value, V::lower_half(V::sub(decoded, value)));
      }
    }
  }

  static void quantize(const BandGrid& g, const float* x, size_t stride, uint64_t live, uint8_t* codes,
                       size_t code_stride, BandErrors* errors) {
    const GridVectors grid(g);
    ErrorSums sums;
    for (int i = 0; i < kGroups; ++i) sums.signal[i] = sums.error[i] = V::set1(0.0f);
    sums.max_error = V::set1(0.0f);
    for (int t = 0; t < kPageTokens; ++t, x += stride, codes += code_stride) {
      const TokenVectors token(g, t);
      if ((live >> t) & 1) {
        quantize_row<true>(g, grid, token, x, codes, &sums);
      } else {
        quantize_row<false>(g, grid, token, x, codes, &sums);
      }
    }
    for (int i = 0; i < kGroups; ++i) {
      V::store(errors->signal + i * kLanes, sums.signal[i]);
      V::store(errors->error + i * kLanes, sums.error[i]);
    }
    float largest[kLanes];
    V::store(largest, sums.max_error);
    errors->max_error = 0.0f;
    for (int i = 0; i < kLanes; ++i) {
      if (largest[i] > errors->max_error) errors->max_error = largest[i];
    }
  }

  static void dequantize(const BandGrid& g, const uint8_t* codes, size_t code_stride, float* x,
                         size_t stride) {
    const GridVectors grid(g);
    for (int t = 0; t < kPageTokens; ++t, x += stride, codes += code_stride) {
      const F token = V::set1(g.token[t]), low = V::set1(g.low[t]);
      int c = 0;
      for (; c + kLanes <= g.channels; c += kLanes) {
        V::store(x + c, decode_vector(grid, V::load(g.channel + c), token, low, V::load(g.centre + c),
                                      V::load_codes(codes + c)));
      }
      if constexpr (kLanes == 16) {
        if (c == g.channels) continue;
        V::store_half(x + c, decode_vector(grid, V::load_half(g.channel + c), token, low,
                                           V::load_half(g.centre + c), V::load_codes_half(codes + c)));
      }
    }
  }
};

}  // namespace kvant::simd
