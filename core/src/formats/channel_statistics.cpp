#include "formats/channel_statistics.h"

#include <algorithm>

namespace kvant {

ChannelStatistics::ChannelStatistics(const EncodeContext& context) {
  const size_t stride = context.row_stride;
  for (int t = 0; t < kPageTokens; ++t) {
    if (((context.live >> t) & 1) == 0) continue;
    std::copy_n(context.rows + t * stride, stride, rows + live_tokens * stride);
    ++live_tokens;
  }
  std::fill_n(mean, stride, 0.0f);
  for (float* bound : {low, high}) {
    if (live_tokens > 0) {
      std::copy_n(rows, stride, bound);
    } else {
      std::fill_n(bound, stride, 0.0f);
    }
  }
  for (int t = 0; t < live_tokens; ++t) {
    const float* row = rows + t * stride;
    for (size_t c = 0; c < stride; ++c) {
      mean[c] = mean[c] + row[c];
      low[c] = row[c] < low[c] ? row[c] : low[c];
      high[c] = row[c] > high[c] ? row[c] : high[c];
    }
  }
  if (live_tokens == 0) return;
  const float share = 1.0f / static_cast<float>(live_tokens);
  for (size_t c = 0; c < stride; ++c) mean[c] = mean[c] * share;
}

}  // namespace kvant
