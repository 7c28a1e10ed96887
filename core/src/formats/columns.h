// The values of a tile turned channel-major, for searches whose lanes are tokens.
#pragma once

#include "formats/family.h"
#include "simd/kernels.h"

namespace kvant {

class Columns {
 public:
  explicit Columns(const EncodeContext& context) {
    simd::kernels().encode->transpose(context.rows, context.row_stride, context.layout.head_dim, data_);
  }
  const float* data() const { return data_; }  // [head_dim][64]

 private:
  alignas(64) float data_[kMaxHeadDim * kPageTokens];
};

}  // namespace kvant
