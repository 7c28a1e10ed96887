// Calibration: the closed-form basis of each KV head from one pass over text.
//
// Keys. With C the covariance of post-rope keys around their mean mu (first tokens left out: sinks are kept
// exact) and H the second moment of the queries that meet them, a quantization error e of a stored key costs
// e^T H e in squared logits. M = C^1/2 H C^1/2 = U diag(lambda) U^T gives A = diag(lambda^1/4) U^T C^-1/2;
// stored keys A (k - mu) and queries A^-T q then have the same second moment diag(lambda^1/2), so errors
// of all coordinates weigh the same and widths follow lambda (the geometry of reverse water-filling, Cover
// and Thomas, Elements of Information Theory, section 10.3). Values. The same with C the covariance of
// values, H the sum of W_O^T W_O over the query heads that share the KV head, and mu = 0.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kvant/calibration_file.h"
#include "kvant/status.h"

namespace kvant::eval {

struct CalibrateOptions {
  std::string model_path;
  std::string text;   // plain text; must not overlap with any evaluation text
  int tokens = 8192;  // tokens of text to use, in windows
  int window_tokens = 2048;
  int threads = 0;       // 0: all cores
  int skip_tokens = 16;  // first tokens of each window that are left out of the statistics
  double ridge = 1e-3;   // added to C and H, relative to their mean eigenvalue
  std::function<void(double share)> progress;  // 0..1; may be empty
  std::function<bool()> cancelled;             // may be empty
};

// A channel that is far larger than the others of its head (post-rope for keys).
struct OutlierChannel {
  int layer = 0;
  Side side = Side::kKey;
  int kv_head = 0;
  int channel = 0;
  float rms = 0;  // root mean square over the calibration text
  float mean = 0;
  float median_rms = 0;  // of the head's channels
};

struct CalibrationResult {
  ggml::Calibration calibration;
  std::vector<OutlierChannel> outliers;  // by layer, keys first, head, channel
};

// kIo: model cannot be read; kUnsupported: the model has no attention that kvant handles; kInvalidArgument:
// less text than one window.
Result<CalibrationResult> calibrate(const CalibrateOptions& options);

}  // namespace kvant::eval
