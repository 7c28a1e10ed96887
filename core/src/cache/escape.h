// Escape: heads that break at a width, as far as their calibration knows, get more bits.
#pragma once

#include <string>

#include "kvant/layer_scheme.h"

namespace kvant {

// Squared error over square of normal data at 2 to 8 bits with searched scales (docs/formats.md); 1 below.
double relative_error(int bits);

// What a relative error of 1 in these channels of the calibrated basis would cost (ErrorModel's units).
double band_cost(const ErrorModel& model, int first_channel, int channels);

// Widens every band of `format` by as many bits as it takes to bring the expected error to at most `limit`,
// to 8 bits at most. Returns what to tell the user, empty when nothing had to change.
std::string widen_until(double limit, const ErrorModel& model, TransformKind transform, Side side, int head,
                        Format* format);

}  // namespace kvant
