"""Rows of every kind that weights come in, and of kinds they should not."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

WIDTH = 512
RNG_SEED = 20261201


def kinds() -> dict[str, np.ndarray]:
    """Named float32 arrays [rows, WIDTH]; all finite, all within what float16 scales can hold."""
    rng = np.random.default_rng(RNG_SEED)
    normal = rng.standard_normal((16, WIDTH)).astype(np.float32)
    zero_blocks = normal.copy()
    zero_blocks[:, ::7] = 0
    zero_blocks[:, 32:96] = 0
    zero_blocks[::2, 256:] = 0
    outlier = normal * np.float32(0.01)
    outlier[np.arange(16), rng.integers(0, WIDTH, 16)] = 100
    ties = np.tile(np.array([-1, 1, 0.5, -0.5], np.float32), (4, WIDTH // 4))
    near_flat = np.float32(1) + rng.integers(0, 3, (8, WIDTH)).astype(np.float32) * np.float32(2**-23)
    offset = normal * np.float32(1e-6) - np.float32(3)
    negative_zeros = np.where(rng.random((4, WIDTH)) < 0.5, np.float32(-0.0), np.float32(0))
    mixed_scales = normal * np.exp(rng.uniform(-20, 8, (16, WIDTH // 16))).repeat(16, axis=1).astype(np.float32)
    return {
        "normal": normal,
        "heavy tails": rng.standard_t(2, (16, WIDTH)).astype(np.float32),
        "bfloat16 values": (normal.view(np.uint32) & 0xFFFF0000).view(np.float32),
        "zeros": np.zeros((2, WIDTH), np.float32),
        "negative zeros": negative_zeros,
        "zero blocks": zero_blocks,
        "constant": np.full((2, WIDTH), 0.7, np.float32),
        "negative constant": np.full((2, WIDTH), -0.7, np.float32),
        "negative only": -np.abs(normal),
        "positive only": np.abs(normal),
        "denormals": normal * np.float32(1e-40),
        "tiny": normal * np.float32(1e-30),
        "small": normal * np.float32(1e-7),
        "huge": normal * np.float32(1e4),
        "one outlier": outlier,
        "two values": np.where(normal > 0, np.float32(0.25), np.float32(-0.125)),
        "ties": ties,
        "small integers": rng.integers(-8, 8, (16, WIDTH)).astype(np.float32),
        "near flat": near_flat,
        "far offset": offset,
        "near flat, negative": -near_flat,
        "mixed scales": mixed_scales,
        "sparse": np.where(rng.random((16, WIDTH)) < 0.95, np.float32(0), normal),
    }


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """A super-block whose sub-blocks differ in size, offset and pattern."""
    values = st.floats(-2, 2, width=32, allow_nan=False)
    piece = st.lists(values, min_size=16, max_size=16)
    power = st.integers(-30, 12)
    parts = [np.array(draw(piece), np.float32) * np.float32(2.0 ** draw(power)) for _ in range(4)]
    base = np.concatenate([parts[draw(st.integers(0, 3))] for _ in range(16)])
    return (base + np.float32(draw(st.sampled_from([0, 0, 0, 1, -1, 1e-3, -100]))))[None].astype(np.float32)
