// Steps of the logarithmic token scales, shared by Format::encode, Format::decode and the attention kernels,
// so that all of them use the same floats.
//
//   kLog4: base * 2^((k - 15) / 4)   = base * kQuarterOctave[(k + 1) & 3] * 2^(((k + 1) >> 2) - 4)
//   kLog8: base * 2^((k - 255) / 8)  = base * kEighthOctave[(k + 1) & 7] * 2^(((k + 1) >> 3) - 32)
//
// and k = 0 is zero. Powers of two are exact, so the product rounds once, whatever the order of the factors.
#pragma once

namespace kvant::simd {

// 2^(i / 4) and 2^(i / 8), rounded to nearest.
inline constexpr float kQuarterOctave[4] = {1.0f, 1.18920711500272103f, 1.41421356237309505f,
                                            1.68179283050742909f};
inline constexpr float kEighthOctave[8] = {1.0f,
                                           1.09050773266525766f,
                                           1.18920711500272107f,
                                           1.29683955465100967f,
                                           1.41421356237309505f,
                                           1.54221082540794082f,
                                           1.68179283050742909f,
                                           1.83400808640934246f};

// kLog4Steps[k] = 2^((k - 15) / 4), kLog4Steps[0] = 0.
inline constexpr float kLog4Steps[16] = {0.0f,
                                         kQuarterOctave[2] * 0.0625f,
                                         kQuarterOctave[3] * 0.0625f,
                                         kQuarterOctave[0] * 0.125f,
                                         kQuarterOctave[1] * 0.125f,
                                         kQuarterOctave[2] * 0.125f,
                                         kQuarterOctave[3] * 0.125f,
                                         kQuarterOctave[0] * 0.25f,
                                         kQuarterOctave[1] * 0.25f,
                                         kQuarterOctave[2] * 0.25f,
                                         kQuarterOctave[3] * 0.25f,
                                         kQuarterOctave[0] * 0.5f,
                                         kQuarterOctave[1] * 0.5f,
                                         kQuarterOctave[2] * 0.5f,
                                         kQuarterOctave[3] * 0.5f,
                                         1.0f};

}  // namespace kvant::simd
