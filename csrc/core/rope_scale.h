/* rope_scale.h - the frequencies of rotary embedding, scaled for longer contexts. C and the host side of CUDA.
 *
 *     f_i = theta^(-2i/D), computed by the kernels.
 *     factor alone       f_i / factor: positions are compressed (Chen et al. 2023, https://arxiv.org/abs/2306.15595).
 *     original_length    as Llama 3.1 does (its wave, 2 pi / f_i, against the length L that was trained on):
 *                        f_i                  waves shorter than L / high_freq_factor
 *                        f_i / factor         waves longer than L / low_freq_factor
 *                        between them both, weighted by (L / wave - low_freq_factor) / (high_freq_factor - low_freq_factor)
 */
#pragma once

#include <math.h>

/* Of one f_i; f_i itself where factor is 1. original_length 0: factor alone. */
static inline double xt_scaled_frequency(double f, double factor, double low_freq_factor, double high_freq_factor,
                                         double original_length) {
    if (factor == 1.0) return f;
    if (original_length == 0.0) return f / factor;
    double waves = original_length * f / 6.283185307179586476925; /* in original_length */
    if (waves > high_freq_factor) return f;
    if (waves < low_freq_factor) return f / factor;
    double weight = (waves - low_freq_factor) / (high_freq_factor - low_freq_factor);
    return (1.0 - weight) * f / factor + weight * f;
}
