// What calibration says about quantization besides the basis: expected errors and outlier channels.
#pragma once

#include <Eigen/Dense>
#include <vector>

#include "kvant/calibrate.h"

namespace kvant::eval {

// Moments of one head and side, in the units of ErrorModel.
struct HeadStatistics {
  Eigen::MatrixXd covariance;
  Eigen::MatrixXd second_moment;
  Eigen::VectorXd mean;
  Eigen::MatrixXd weight;  // H: e^T H e is the cost of an error e
  Eigen::MatrixXf sample;  // [dim][tokens] vectors as they are written, whole pages of them count
  float largest = 0;       // magnitude
};

// `basis` holds forward and centre; errors are measured by encoding the sample.
ErrorModel make_error_model(const HeadStatistics& head, const CalibratedBasis& basis);

// Channels whose root mean square is more than kOutlierRatio times the median channel's.
inline constexpr double kOutlierRatio = 6.0;
void find_outliers(const HeadStatistics& head, Side side, int layer, int kv_head,
                   std::vector<OutlierChannel>* out);

}  // namespace kvant::eval
