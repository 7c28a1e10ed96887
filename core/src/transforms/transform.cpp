#include "kvant/transform.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kvant/half.h"
#include "kvant/types.h"
#include "simd/hadamard_factors.h"
#include "simd/kernels.h"

namespace kvant {
namespace {

constexpr double kMaxCondition = 1e6;

// Largest absolute column sum.
double norm_one(int n, const std::vector<double>& a) {
  double largest = 0;
  for (int j = 0; j < n; ++j) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += std::fabs(a[static_cast<size_t>(i) * n + j]);
    largest = std::max(largest, sum);
  }
  return largest;
}

// Gauss-Jordan elimination with row pivoting. False when a pivot vanishes.
bool invert_matrix(int n, std::vector<double> a, std::vector<double>* inverse) {
  const auto at = [n](std::vector<double>& m, int i, int j) -> double& {
    return m[static_cast<size_t>(i) * n + j];
  };
  inverse->assign(static_cast<size_t>(n) * n, 0.0);
  for (int i = 0; i < n; ++i) at(*inverse, i, i) = 1.0;
  for (int column = 0; column < n; ++column) {
    int pivot = column;
    for (int i = column + 1; i < n; ++i) {
      if (std::fabs(at(a, i, column)) > std::fabs(at(a, pivot, column))) pivot = i;
    }
    const double value = at(a, pivot, column);
    if (!(std::fabs(value) > 0)) return false;
    for (int j = 0; j < n; ++j) {
      std::swap(at(a, pivot, j), at(a, column, j));
      std::swap(at(*inverse, pivot, j), at(*inverse, column, j));
    }
    for (int j = 0; j < n; ++j) {
      at(a, column, j) /= value;
      at(*inverse, column, j) /= value;
    }
    for (int i = 0; i < n; ++i) {
      const double factor = at(a, i, column);
      if (i == column || factor == 0.0) continue;
      for (int j = 0; j < n; ++j) {
        at(a, i, j) -= factor * at(a, column, j);
        at(*inverse, i, j) -= factor * at(*inverse, column, j);
      }
    }
  }
  return true;
}

Status check_dim(int dim) {
  if (dim > 0 && dim <= kMaxHeadDim) return Status();
  return Status(Code::kInvalidArgument,
                "transform of " + std::to_string(dim) + " channels; 1..256 are possible");
}

}  // namespace

Transform Transform::identity(int dim) {
  Transform transform;
  transform.dim_ = dim;
  return transform;
}

Result<Transform> Transform::hadamard(int dim) {
  KVANT_RETURN_IF_ERROR(check_dim(dim));
  Transform transform;
  transform.dim_ = dim;
  transform.kind_ = TransformKind::kHadamard;
  transform.block_ = dim;
  while (dim % transform.block_ != 0 || simd::hadamard_factor(transform.block_) == 0) --transform.block_;
  return transform;
}

Transform::Matrix Transform::pack(const std::vector<double>& row_major, int dim) {
  double largest = 0;
  for (const double a : row_major) largest = std::max(largest, std::fabs(a));
  // The largest element becomes 2^14 .. 2^15: elements down to 2^-28 of it keep all their bits.
  const int exponent = largest > 0 ? std::ilogb(largest) - 14 : 0;
  Matrix matrix;
  matrix.scale = std::ldexp(1.0f, exponent);
  matrix.columns.resize(row_major.size());
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      const double scaled = std::ldexp(row_major[static_cast<size_t>(i) * dim + j], -exponent);
      matrix.columns[static_cast<size_t>(j) * dim + i] = float_to_half(static_cast<float>(scaled));
    }
  }
  return matrix;
}

std::vector<double> Transform::unpack(const Matrix& matrix, int dim) {
  std::vector<double> out(matrix.columns.size());
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      const float stored = half_to_float(matrix.columns[static_cast<size_t>(j) * dim + i]);
      out[static_cast<size_t>(i) * dim + j] = static_cast<double>(stored) * matrix.scale;
    }
  }
  return out;
}

Transform::Matrix Transform::transposed(const Matrix& matrix, int dim) {
  Matrix out = matrix;
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j)
      out.columns[static_cast<size_t>(i) * dim + j] = matrix.columns[static_cast<size_t>(j) * dim + i];
  }
  return out;
}

Result<Transform> Transform::dense(int dim, std::span<const float> forward, Side side) {
  KVANT_RETURN_IF_ERROR(check_dim(dim));
  const size_t elements = static_cast<size_t>(dim) * static_cast<size_t>(dim);
  if (forward.size() != elements) {
    return Status(Code::kInvalidArgument, "matrix of " + std::to_string(forward.size()) + " elements for " +
                                              std::to_string(dim) + " channels; expected " +
                                              std::to_string(elements));
  }
  std::vector<double> a(forward.begin(), forward.end());
  if (!std::all_of(a.begin(), a.end(), [](double x) { return std::isfinite(x); })) {
    return Status(Code::kBadValue, "matrix has a value that is not finite");
  }
  Transform transform;
  transform.dim_ = dim;
  transform.kind_ = TransformKind::kDense;
  transform.side_ = side;
  transform.forward_ = pack(a, dim);
  a = unpack(transform.forward_, dim);
  std::vector<double> inverse;
  const bool regular = invert_matrix(dim, a, &inverse);
  const double condition = regular ? norm_one(dim, a) * norm_one(dim, inverse) : INFINITY;
  if (!(condition <= kMaxCondition)) {
    return Status(Code::kInvalidArgument, regular
                                              ? "matrix has condition number " + std::to_string(condition) +
                                                    "; at most 1000000 is accepted"
                                              : std::string("matrix is singular"));
  }
  transform.inverse_ = pack(inverse, dim);
  if (side == Side::kKey) transform.inverse_ = transposed(transform.inverse_, dim);
  return transform;
}

void Transform::set_centre(std::span<const float> mu) { centre_.assign(mu.begin(), mu.end()); }

size_t Transform::matrix_bytes() const {
  return (forward_.columns.size() + inverse_.columns.size()) * sizeof(uint16_t);
}

void Transform::multiply(const Matrix& matrix, const float* x, float* y, int rows) const {
  const simd::EncodeKernels& kernels = *simd::kernels().encode;
  switch (kind_) {
    case TransformKind::kIdentity:
      std::copy_n(x, static_cast<size_t>(rows) * dim_, y);
      return;
    case TransformKind::kHadamard:
      std::copy_n(x, static_cast<size_t>(rows) * dim_, y);
      kernels.hadamard(y, dim_, block_, rows);
      return;
    case TransformKind::kDense:
      kernels.matvec(matrix.columns.data(), matrix.scale, x, y, dim_, rows);
      return;
  }
}

void Transform::multiply_inverse(Side side, const float* x, float* y, int rows) const {
  const bool ready = kind_ != TransformKind::kDense || side == side_;
  multiply(ready ? inverse_ : transposed(inverse_, dim_), x, y, rows);
}

void Transform::apply(const float* x, float* y, int rows) const {
  if (centre_.empty()) {
    multiply(forward_, x, y, rows);
    return;
  }
  constexpr int kChunkRows = 8;
  float centred[kChunkRows * kMaxHeadDim];
  for (int first = 0; first < rows; first += kChunkRows) {
    const int count = std::min(kChunkRows, rows - first);
    for (int r = 0; r < count; ++r, x += dim_) {
      for (int c = 0; c < dim_; ++c) centred[r * dim_ + c] = x[c] - centre_[c];
    }
    multiply(forward_, centred, y + static_cast<size_t>(first) * dim_, count);
  }
}

void Transform::invert(const float* y, float* x, int rows) const {
  invert_output(y, x, rows);
  if (centre_.empty()) return;
  for (int r = 0; r < rows; ++r, x += dim_) {
    for (int c = 0; c < dim_; ++c) x[c] = x[c] + centre_[c];
  }
}

void Transform::apply_to_query(const float* q, float* out, int rows) const {
  multiply_inverse(Side::kKey, q, out, rows);
}

void Transform::invert_output(const float* o, float* out, int rows) const {
  multiply_inverse(Side::kValue, o, out, rows);
}

void Transform::centre_dot(const float* q, float* out, int rows) const {
  for (int r = 0; r < rows; ++r, q += dim_) {
    double sum = 0;
    for (size_t c = 0; c < centre_.size(); ++c)
      sum += static_cast<double>(q[c]) * static_cast<double>(centre_[c]);
    out[r] = static_cast<float>(sum);
  }
}

}  // namespace kvant
