// Bodies of the encode kernels that are the same for every target, written over a vector type V:
//   kLanes                      1, 8 or 16
//   F                           kLanes floats
//   load, store, set1, add, sub, mul, div, min, max, floor
//   less_blend(a, b, x, y)      per lane a < b ? x : y
//   butterfly<stride>(a)        per lane l with partner p = l ^ stride: l < p ? a[l] + a[p] : a[p] - a[l]
//   load_codes, store_codes     kLanes bytes <-> floats, truncating
//   load_f16                    kLanes binary16 -> floats
// Optional: hadamard_of_factor(x, factor, n, norm), a whole normalised rotation, false where it has none.
// And for 16 lanes the same loads and stores over the lower 8 lanes: load_half reads zeros into the upper
// ones. Included only by the files of the targets; V is local to each of them, so nothing here is shared
// between code compiled for different instruction sets. Nothing from std:: is called for the same reason.
#pragma once

#include "simd/encode.h"
#include "simd/encode_transforms.h"

namespace kvant::simd {

template <class V>
struct EncodeBody : TransformBody<V> {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kGroups = 16 / kLanes;  // vectors per 16 channels

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
