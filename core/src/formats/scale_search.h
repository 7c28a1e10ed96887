// Choice of scales: the search that the token, group and channel families share.
#pragma once

#include <cstdint>

#include "formats/family.h"
#include "kvant/format.h"
#include "simd/encode.h"

namespace kvant {

// Chooses scale (and low) of every token and band and writes the words into the tile.
//   columns  [head_dim][64] channel-major; zeros for tokens that are not live
//   weight   [head_dim] weight of squared errors, or null
//
// Trials. The anchor of a token is the step with which no value is clipped: amax / (2^(bits-1) - 0.5), where
// amax is the largest magnitude (asymmetric: half the range). Tried are
//   kE6M10  anchor * r, rounded to e6m10 after the choice
//   kLog8   the smallest word that is not below the anchor, and steps of r below it
//   kLog4   the smallest word that is not below the anchor, and the next words below it
// with 8 trials from 4 bits on: r = 2^(-j/8), j = 0, 1, 2, 3, 4, 6, 8, 12; and 16 trials for 2 and 3 bits,
// where stronger clips pay: j = 0..9, 12, 14, 16, 20, 24, 28. Scale zero is taken where it has a smaller
// error than all of them. The base of kLog8 is the largest anchor of the page. So is that of kLog4 at first;
// when its upper words find no use and some token chose the lowest word or zero, it is lowered to the largest
// scale in use and the search is repeated. The largest tokens decide because their errors are the largest. A
// low is centre of the range - scale * (2^bits - 1) / 2, so the grid is symmetric around that centre.
//
// Gain. A value rounded with the scale of least squared error comes back too small: decoded values have the
// projection p = <x, y> / <x, x> of about 1 - D on the originals, D the relative error (.12 at 2 bits). A
// query that is aligned with a key, and a sum over many values, see that shrinkage, not the noise. So bands
// of 2 to 4 bits with a symmetric grid and kLog4 or kLog8 store a base larger by 1 / p of the page, between 1
// and 1.25, 1.1 and 1.05; codes are still chosen with the scales that were searched. Null `code_gain`: no
// gain.
void choose_token_scales(const TileLayout& layout, const float* columns, const float* weight,
                         float* code_gain, std::byte* tile);
// The same from the rows and channel weights of the context: all metadata of families that have none per
// channel.
void choose_token_metadata(const EncodeContext& context, float* code_gain, std::byte* tile);

inline int scale_trials(int bits) { return bits >= 4 ? 8 : 16; }
// Fills ratio and inverse_ratio with r for search->trials trials.
void fill_trial_ratios(simd::ScaleSearch* search);

// One over the scale, 0 for scale 0: the factor that quantizing multiplies with.
inline float inverse_scale(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

inline constexpr float kLargestHalf = 65504.0f;
// Nearest binary16 with a magnitude of at most 65504.
uint16_t clamped_half(float x);

}  // namespace kvant
