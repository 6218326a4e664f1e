# SPDX-License-Identifier: Apache-2.0
"""Feature maps and their gradients in Triton, by the `kernel` constants of `mhla_hf.ops.definitions`."""

# No postponed annotations here: Triton reads `tl.constexpr` from the functions themselves.
import triton
import triton.language as tl


@triton.jit
def feature_map(values, FEATURE_MAP: tl.constexpr):
    """φ of float32 values."""
    # NaN must come out as NaN, which a maximum would lose.
    if FEATURE_MAP == "relu":
        values = tl.where(values < 0, 0.0, values)
    elif FEATURE_MAP == "elu":
        values = tl.where(values > 0, values + 1, tl.exp(tl.minimum(values, 0.0)))
    elif FEATURE_MAP == "exp":
        values = tl.exp(values)
    else:
        tl.static_assert(FEATURE_MAP == "identity", "unknown feature map")
    return values


@triton.jit
def feature_map_gradient(gradient, values, FEATURE_MAP: tl.constexpr):
    """The gradient with respect to `values`, from the gradient with respect to their features."""
    if FEATURE_MAP == "relu":
        gradient = tl.where(values <= 0, 0.0, gradient)
    elif FEATURE_MAP == "elu":
        gradient = tl.where(values > 0, gradient, gradient * tl.exp(tl.minimum(values, 0.0)))
    elif FEATURE_MAP == "exp":
        gradient = gradient * tl.exp(values)
    else:
        tl.static_assert(FEATURE_MAP == "identity", "unknown feature map")
    return gradient
