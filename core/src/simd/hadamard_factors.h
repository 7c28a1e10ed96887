// Symmetric Hadamard matrices of order 1, 12, 20 and 28 by Paley's constructions, computed when compiling.
// R. E. A. C. Paley, "On orthogonal matrices", J. Math. Phys. 12 (1933).
#pragma once

#include <array>

namespace kvant::simd {

// Floats from one row to the next: rows are padded with zeros, so that they can be read in vectors of 16.
inline constexpr int kHadamardStride = 32;

namespace detail {

// Quadratic character of a modulo the prime q: 0, 1 or -1.
constexpr int quadratic_character(int a, int q) {
  a = ((a % q) + q) % q;
  if (a == 0) return 0;
  for (int i = 1; i < q; ++i) {
    if (i * i % q == a) return 1;
  }
  return -1;
}

// q = 3 mod 4: I + S with S skew, rows in the order 0, -1, -2, ... and the first column negated, which makes
// it symmetric.
template <int kOrder>
constexpr std::array<float, kOrder * kHadamardStride> paley_one() {
  constexpr int q = kOrder - 1;
  std::array<float, kOrder * kHadamardStride> h{};
  for (int i = 0; i < kOrder; ++i) {
    for (int j = 0; j < kOrder; ++j) {
      int sign = 1;
      if (i == 0 || j == 0) {
        sign = (i == 0 && j == 0) ? -1 : 1;
      } else {
        const int sum = (i - 1) + (j - 1);
        sign = sum % q == 0 ? 1 : quadratic_character(-sum, q);
      }
      h[i * kHadamardStride + j] = static_cast<float>(sign);
    }
  }
  return h;
}

// q = 1 mod 4: C (x) [1 1; 1 -1] + I (x) [1 -1; -1 -1] with the symmetric conference matrix C of order q + 1.
template <int kOrder>
constexpr std::array<float, kOrder * kHadamardStride> paley_two() {
  constexpr int q = kOrder / 2 - 1;
  std::array<float, kOrder * kHadamardStride> h{};
  for (int i = 0; i < kOrder; ++i) {
    for (int j = 0; j < kOrder; ++j) {
      const int a = i / 2, b = j / 2, p = i % 2, r = j % 2;
      int sign = 0;
      if (a == b) {
        sign = (p == 0 && r == 0) ? 1 : -1;
      } else {
        const int c = (a == 0 || b == 0) ? 1 : quadratic_character(a - b, q);
        sign = (p == 1 && r == 1) ? -c : c;
      }
      h[i * kHadamardStride + j] = static_cast<float>(sign);
    }
  }
  return h;
}

}  // namespace detail

inline constexpr std::array<float, 12 * kHadamardStride> kHadamard12 = detail::paley_one<12>();
inline constexpr std::array<float, 20 * kHadamardStride> kHadamard20 = detail::paley_one<20>();
inline constexpr std::array<float, 28 * kHadamardStride> kHadamard28 = detail::paley_two<28>();

// Factor in {1, 12, 20, 28} of a block 2^k * factor; 0 when it has no such form.
constexpr int hadamard_factor(int block) {
  for (int factor : {28, 20, 12, 1}) {
    if (block <= 0 || block % factor != 0) continue;
    const int rest = block / factor;
    if ((rest & (rest - 1)) == 0) return factor;
  }
  return 0;
}

constexpr const float* hadamard_matrix(int factor) {
  return factor == 12 ? kHadamard12.data() : factor == 20 ? kHadamard20.data() : kHadamard28.data();
}

}  // namespace kvant::simd
