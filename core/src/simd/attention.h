// The attention kernels of each target. A null pointer: this build has no such target.
#pragma once

#include "simd/kernels.h"

namespace kvant::simd {

const AttentionKernels* scalar_attention_kernels();
const AttentionKernels* hwy128_attention_kernels();      // needs SSSE3 on x86-64
const AttentionKernels* avx2_attention_kernels();        // AVX2, FMA, F16C, BMI1, BMI2
const AttentionKernels* avx512vnni_attention_kernels();  // AVX-512 F, BW, DQ, VL, VNNI and AVX2's

}  // namespace kvant::simd
