#include "kvant/transform.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd/hadamard_factors.h"
#include "simd/kernels.h"
#include "support/format_data.h"

namespace kvant {
namespace {

using testing::Random;

std::vector<float> normal(size_t n, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = random.normal();
  return x;
}

double dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// A rotation-free, well-conditioned matrix.
Transform dense_transform(int dim, uint64_t seed, Side side) {
  std::vector<float> a = normal(static_cast<size_t>(dim) * dim, seed);
  for (int i = 0; i < dim; ++i)
    a[static_cast<size_t>(i) * dim + i] += 2.0f * std::sqrt(static_cast<float>(dim));
  Result<Transform> transform = Transform::dense(dim, a, side);
  EXPECT_TRUE(transform.ok()) << transform.status().message();
  return transform.value();
}

// Elements of dense matrices are rounded to 2^-12: sums over dim of them are off by that times sqrt(dim).
double tolerance(const Transform& transform, double otherwise) {
  if (transform.kind() != TransformKind::kDense) return otherwise;
  return otherwise + 0x1p-11 * std::sqrt(static_cast<double>(transform.dim()));
}

std::vector<Transform> all_transforms(int dim) {
  std::vector<Transform> transforms = {Transform::identity(dim), Transform::hadamard(dim).value(),
                                       dense_transform(dim, 1, Side::kKey),
                                       dense_transform(dim, 1, Side::kValue)};
  const size_t without_centre = transforms.size();
  const std::vector<float> mu = normal(static_cast<size_t>(dim), 2);
  for (size_t i = 0; i < without_centre; ++i) {
    Transform centred = transforms[i];
    centred.set_centre(mu);
    transforms.push_back(centred);
  }
  return transforms;
}

TEST(HadamardFactors, AreSymmetricAndOrthogonal) {
  for (int order : {12, 20, 28}) {
    const float* h = simd::hadamard_matrix(order);
    const int stride = simd::kHadamardStride;
    for (int i = 0; i < order; ++i) {
      for (int j = 0; j < order; ++j) {
        EXPECT_EQ(std::fabs(h[i * stride + j]), 1.0f);
        EXPECT_EQ(h[i * stride + j], h[j * stride + i]);
        EXPECT_EQ(dot(h + i * stride, h + j * stride, order), i == j ? order : 0)
            << order << " " << i << " " << j;
      }
    }
  }
  EXPECT_EQ(simd::hadamard_factor(64), 1);
  EXPECT_EQ(simd::hadamard_factor(80), 20);
  EXPECT_EQ(simd::hadamard_factor(96), 12);
  EXPECT_EQ(simd::hadamard_factor(112), 28);
  EXPECT_EQ(simd::hadamard_factor(72), 0);
  EXPECT_EQ(simd::hadamard_factor(0), 0);
}

TEST(Transform, InvertUndoesApply) {
  for (int dim : testing::kHeadDims) {
    for (const Transform& transform : all_transforms(dim)) {
      SCOPED_TRACE(std::to_string(dim) + " kind " + std::to_string(static_cast<int>(transform.kind())));
      const auto n = static_cast<size_t>(dim) * 5;
      const std::vector<float> x = normal(n, 3);
      std::vector<float> y(n), back(n);
      transform.apply(x.data(), y.data(), 5);
      transform.invert(y.data(), back.data(), 5);
      for (size_t i = 0; i < n; ++i) ASSERT_NEAR(back[i], x[i], tolerance(transform, 2e-5));
    }
  }
}

// q . k is kept: (A^-T q) . A (k - mu) + q . mu.
TEST(Transform, ScoresAreKept) {
  for (int dim : testing::kHeadDims) {
    for (const Transform& transform : all_transforms(dim)) {
      const std::vector<float> q = normal(static_cast<size_t>(dim), 4),
                               k = normal(static_cast<size_t>(dim), 5);
      std::vector<float> tq(q.size()), tk(q.size());
      float constant = -1;
      transform.apply_to_query(q.data(), tq.data(), 1);
      transform.apply(k.data(), tk.data(), 1);
      transform.centre_dot(q.data(), &constant, 1);
      if (!transform.has_centre()) {
        EXPECT_EQ(constant, 0.0f);
      }
      EXPECT_NEAR(dot(tq.data(), tk.data(), dim) + constant, dot(q.data(), k.data(), dim),
                  tolerance(transform, 2e-3))
          << dim;
    }
  }
}

// A weighted sum of transformed values comes back as the weighted sum of values.
TEST(Transform, OutputsAreBroughtBack) {
  for (int dim : {64, 72, 80}) {
    for (const Transform& transform : all_transforms(dim)) {
      const auto n = static_cast<size_t>(dim);
      const std::vector<float> v = normal(n * 3, 6);
      const float weights[3] = {0.5f, 0.25f, 1.5f};
      std::vector<float> stored(n * 3), sum(n, 0.0f), out(n);
      transform.apply(v.data(), stored.data(), 3);
      for (int t = 0; t < 3; ++t) {
        for (size_t c = 0; c < n; ++c) sum[c] += weights[t] * stored[t * n + c];
      }
      transform.invert_output(sum.data(), out.data(), 1);
      for (size_t c = 0; c < n; ++c) {
        const float mu = transform.has_centre() ? transform.centre()[c] : 0.0f;
        const float expected = weights[0] * v[c] + weights[1] * v[n + c] + weights[2] * v[2 * n + c];
        ASSERT_NEAR(out[c] + 2.25f * mu, expected, tolerance(transform, 1e-4));
      }
    }
  }
}

TEST(Transform, HadamardIsOrthonormalOnItsBlocks) {
  for (int dim = 8; dim <= 256; dim += 8) {
    const Transform transform = Transform::hadamard(dim).value();
    std::vector<float> unit(static_cast<size_t>(dim), 0.0f), y(unit.size());
    unit[static_cast<size_t>(dim) / 3] = 1.0f;
    transform.apply(unit.data(), y.data(), 1);
    EXPECT_NEAR(dot(y.data(), y.data(), dim), 1.0, 1e-5);
    int block = 0;
    for (float v : y) block += v != 0.0f ? 1 : 0;
    for (float v : y) {
      if (v != 0.0f) {
        EXPECT_NEAR(std::fabs(v), 1.0 / std::sqrt(block), 1e-6) << dim;
      }
    }
    EXPECT_EQ(dim % block, 0);
    EXPECT_NE(simd::hadamard_factor(block), 0);
    EXPECT_GE(block, 8);
  }
  const auto block_of = [](int dim) {
    std::vector<float> unit(static_cast<size_t>(dim), 0.0f), y(unit.size());
    unit[0] = 1.0f;
    Transform::hadamard(dim).value().apply(unit.data(), y.data(), 1);
    return std::count_if(y.begin(), y.end(), [](float v) { return v != 0.0f; });
  };
  EXPECT_EQ(block_of(72), 24);
  EXPECT_EQ(block_of(80), 80);
  EXPECT_EQ(block_of(104), 8);
  EXPECT_EQ(block_of(192), 192);
}

TEST(Transform, SameBitsForAnyNumberOfRowsAndEveryTarget) {
  for (int dim : {40, 64, 72, 112, 128}) {
    for (const Transform& transform : all_transforms(dim)) {
      const auto n = static_cast<size_t>(dim);
      const std::vector<float> x = normal(n * 9, 7);
      std::vector<float> together(n * 9), alone(n * 9);
      transform.apply(x.data(), together.data(), 9);
      for (size_t r = 0; r < 9; ++r) transform.apply(x.data() + r * n, alone.data() + r * n, 1);
      EXPECT_EQ(together, alone);
      const char* before = simd::kernels().name;
      for (const simd::KernelTable* table : simd::available_kernels()) {
        ASSERT_TRUE(simd::force_kernels(table->name).ok());
        transform.apply(x.data(), alone.data(), 9);
        EXPECT_EQ(together, alone) << table->name;
      }
      ASSERT_TRUE(simd::force_kernels(before).ok());
    }
  }
}

TEST(Transform, RefusesBadMatrices) {
  const std::vector<float> zero(64 * 64, 0.0f);
  EXPECT_EQ(Transform::dense(64, zero, Side::kKey).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Transform::dense(32, zero, Side::kKey).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Transform::dense(-1, {}, Side::kKey).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Transform::dense(512, {}, Side::kKey).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Transform::hadamard(0).status().code(), Code::kInvalidArgument);
  std::vector<float> diagonal(64 * 64, 0.0f);
  for (int i = 0; i < 64; ++i) diagonal[i * 64 + i] = 1.0f;
  EXPECT_TRUE(Transform::dense(64, diagonal, Side::kKey).ok());
  diagonal[0] = 1e-5f;
  EXPECT_TRUE(Transform::dense(64, diagonal, Side::kKey).ok());
  diagonal[0] = 1e-7f;  // condition number 1e7
  EXPECT_EQ(Transform::dense(64, diagonal, Side::kKey).status().code(), Code::kInvalidArgument);
  diagonal[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(Transform::dense(64, diagonal, Side::kKey).status().code(), Code::kBadValue);
}

TEST(Transform, MatrixBytesAndCentre) {
  EXPECT_EQ(Transform::identity(64).matrix_bytes(), 0u);
  EXPECT_EQ(Transform::hadamard(64).value().matrix_bytes(), 0u);
  Transform transform = dense_transform(64, 8, Side::kValue);
  EXPECT_EQ(transform.matrix_bytes(), 2u * 64 * 64 * 2);
  transform.set_centre(std::vector<float>(64, 1.0f));
  EXPECT_TRUE(transform.has_centre());
  transform.set_centre({});
  EXPECT_FALSE(transform.has_centre());
}

// A row swap needs pivoting: the first pivot is zero.
TEST(Transform, DensePivots) {
  std::vector<float> swap(32 * 32, 0.0f);
  for (int i = 0; i < 32; ++i) swap[i * 32 + (31 - i)] = 2.0f;
  Result<Transform> transform = Transform::dense(32, swap, Side::kKey);
  ASSERT_TRUE(transform.ok());
  const std::vector<float> x = normal(32, 9);
  std::vector<float> y(32), back(32);
  transform.value().apply(x.data(), y.data(), 1);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(y[i], 2.0f * x[31 - i]);
  transform.value().invert(y.data(), back.data(), 1);
  EXPECT_EQ(back, x);
}

}  // namespace
}  // namespace kvant
