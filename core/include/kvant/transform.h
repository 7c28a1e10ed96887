// Transforms: an invertible matrix A and a centre mu per layer, KV head and side. A key or value x is stored
// as y = A (x - mu). A query meets stored keys as A^-T q (plus the constant q . mu, which only matters when
// centred and exact keys stand in one softmax); an output accumulated over stored values is brought back as
// A^-1 o + mu * (sum of weights).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kvant/status.h"
#include "kvant/types.h"

namespace kvant {

enum class TransformKind : uint8_t { kIdentity = 0, kHadamard, kDense };

// Immutable and thread safe. Arithmetic order is fixed: the same bits on every ISA for apply().
class Transform {
 public:
  static Transform identity(int dim);
  // Orthonormal Hadamard matrix. dim must be 2^k * {1, 12, 20, 28}, k >= 0; for other sizes the largest
  // such block size that divides dim is applied to each block of channels.
  static Result<Transform> hadamard(int dim);
  // forward: [dim][dim] row-major A; finite and invertible (1-norm condition number <= 1e6). Matrices are
  // kept in binary16 times a power of two: A is rounded first, then its inverse is taken and rounded (2^-12
  // of an element). kKey keeps A^-T for queries ready, kValue A^-1 for outputs; what needs the other turns it
  // around at each call.
  static Result<Transform> dense(int dim, std::span<const float> forward, Side side);

  void set_centre(std::span<const float> mu);  // [dim], finite; empty removes it

  int dim() const { return dim_; }
  TransformKind kind() const { return kind_; }
  bool has_centre() const { return !centre_.empty(); }
  std::span<const float> centre() const { return centre_; }
  size_t matrix_bytes() const;  // memory of the matrices, counted as tables

  // rows x dim, row-major, in and out must not overlap.
  void apply(const float* x, float* y, int rows) const;             // y = A (x - mu)
  void invert(const float* y, float* x, int rows) const;            // x = A^-1 y + mu
  void apply_to_query(const float* q, float* out, int rows) const;  // out = A^-T q
  void invert_output(const float* o, float* out, int rows) const;   // out = A^-1 o, no centre
  // q . mu per row; zeros without a centre.
  void centre_dot(const float* q, float* out, int rows) const;

 private:
  // Binary16, by columns: element (i, j) is scale * [j * dim + i].
  struct Matrix {
    std::vector<uint16_t> columns;
    float scale = 1;
  };
  static Matrix pack(const std::vector<double>& row_major, int dim);
  static std::vector<double> unpack(const Matrix& matrix, int dim);  // row-major
  static Matrix transposed(const Matrix& matrix, int dim);
  // y = M x for the kind; `matrix` is for dense only.
  void multiply(const Matrix& matrix, const float* x, float* y, int rows) const;
  // y = A^-T x for kKey, A^-1 x for kValue.
  void multiply_inverse(Side side, const float* x, float* y, int rows) const;

  int dim_ = 0;
  int block_ = 0;  // Hadamard block size
  TransformKind kind_ = TransformKind::kIdentity;
  Side side_ = Side::kKey;
  Matrix forward_, inverse_;  // dense only; inverse_ is that of A^T for kKey
  std::vector<float> centre_;
};

}  // namespace kvant
