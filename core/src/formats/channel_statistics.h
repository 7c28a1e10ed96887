// Statistics of each channel over the live tokens of a page.
#pragma once

#include "formats/family.h"

namespace kvant {

// The live rows, packed together, and the mean and range of each channel over them. Zeros without live rows.
struct ChannelStatistics {
  explicit ChannelStatistics(const EncodeContext& context);

  int live_tokens = 0;
  alignas(64) float rows[kPageTokens * kMaxHeadDim];  // [live_tokens][row_stride of the context]
  alignas(64) float mean[kMaxHeadDim];
  alignas(64) float low[kMaxHeadDim];
  alignas(64) float high[kMaxHeadDim];
};

}  // namespace kvant
