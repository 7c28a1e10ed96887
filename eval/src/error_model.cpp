#include "error_model.h"

#include <algorithm>
#include <cmath>

#include "kvant/format.h"
#include "kvant/memory.h"
#include "kvant/transform.h"

namespace kvant::eval {
namespace {

using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;

Matrix forward_matrix(const CalibratedBasis& basis) {
  Matrix a(basis.dim, basis.dim);
  for (int i = 0; i < basis.dim; ++i) {
    for (int j = 0; j < basis.dim; ++j) {
      a(i, j) = static_cast<double>(basis.forward[static_cast<size_t>(i) * basis.dim + j]);
    }
  }
  return a;
}

// Relative squared error of "t4" on the sample in the calibrated basis, over that of normal data (.0099).
float measure_excess(const HeadStatistics& head, const CalibratedBasis& basis) {
  constexpr double kNormalError = .0099;
  const int dim = basis.dim;
  const Result<Format> format = Format::parse("t4", Side::kKey, dim);
  const Result<Transform> rotation = Transform::hadamard(dim);
  const int64_t pages = head.sample.cols() / kPageTokens;
  if (!format.ok() || !rotation.ok() || pages == 0) return 1.0f;
  const Eigen::MatrixXf a = forward_matrix(basis).cast<float>();
  Eigen::VectorXf centre = Eigen::VectorXf::Zero(dim);
  if (!basis.centre.empty()) centre = Eigen::Map<const Eigen::VectorXf>(basis.centre.data(), dim);
  std::vector<float> rotated(static_cast<size_t>(kPageTokens) * dim);
  struct alignas(kTileAlign) Line {
    std::byte bytes[kTileAlign];
  };
  std::vector<Line> tile(format.value().tile_bytes() / kTileAlign);
  double signal = 0, error = 0;
  for (int64_t p = 0; p < pages; ++p) {
    const Eigen::MatrixXf y = a * (head.sample.middleCols(p * kPageTokens, kPageTokens).colwise() - centre);
    rotation.value().apply(y.data(), rotated.data(), kPageTokens);
    const EncodeStats stats = format.value().encode({.x = rotated.data()}, tile.front().bytes);
    signal += stats.signal;
    error += stats.error;
  }
  return signal > 0 ? static_cast<float>(error / signal / kNormalError) : 1.0f;
}

}  // namespace

ErrorModel make_error_model(const HeadStatistics& head, const CalibratedBasis& basis) {
  const Matrix a = forward_matrix(basis);
  const Matrix inverse = a.inverse();
  // A unit error of stored coordinate i costs (A^-T H A^-1)_ii, and its square is on average (A C A^T)_ii.
  const Vector cost = (inverse.transpose() * head.weight * inverse).diagonal();
  const Matrix stored = basis.centre.empty() ? head.second_moment : head.covariance;
  const Vector power = (a * stored * a.transpose()).diagonal();
  ErrorModel model;
  const double dim = static_cast<double>(basis.dim);
  for (int i = 0; i < basis.dim; ++i) {
    model.spectrum.push_back(static_cast<float>(std::max(0.0, cost[i] * power[i])));
  }
  model.rotated = static_cast<float>(head.second_moment.trace() * head.weight.trace() / dim);
  model.per_channel = static_cast<float>(head.covariance.diagonal().dot(head.weight.diagonal()));
  model.excess = measure_excess(head, basis);
  model.largest = head.largest;
  return model;
}

void find_outliers(const HeadStatistics& head, Side side, int layer, int kv_head,
                   std::vector<OutlierChannel>* out) {
  const Vector rms = head.second_moment.diagonal().cwiseMax(0.0).cwiseSqrt();
  std::vector<double> sorted(rms.data(), rms.data() + rms.size());
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<int64_t>(sorted.size() / 2), sorted.end());
  const double median = sorted[sorted.size() / 2];
  for (Eigen::Index c = 0; c < rms.size(); ++c) {
    if (!(rms[c] > kOutlierRatio * median)) continue;
    out->push_back({.layer = layer,
                    .side = side,
                    .kv_head = kv_head,
                    .channel = static_cast<int>(c),
                    .rms = static_cast<float>(rms[c]),
                    .mean = static_cast<float>(head.mean[c]),
                    .median_rms = static_cast<float>(median)});
  }
}

}  // namespace kvant::eval
