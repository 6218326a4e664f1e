# SPDX-License-Identifier: Apache-2.0
"""Bytes and operations of every kernel, and the least time that these take on an H200.

A stage takes at least as long as the slowest of three: its bytes of memory at the rate of a copy; the bytes that its
programs request from the L2 cache, where several may request the same, at the rate of that; and its matrix products at
the rate of large ones. Where groups of lines keep summaries in L2, these cost no bytes of memory. Products count as
executed, padding included. Launches, tails and whatever does not overlap come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mhla_hf.benchmarks.shapes import OperatorShape


# An H200: a copy of device memory (bytes read and written), reading its L2 cache, and large matrix products.
MEMORY_RATE = 4.1e12
CACHE_RATE = 5.5e12
PRODUCT_RATES = {"bf16": 790e12, "tf32": 395e12}

SUMMARIES = ("S", "S̃", "dS̃", "dS")
"""Tensors that groups of lines keep in L2."""

# Slots of a block are padded to tiles of tokens. A program of the mixing takes a tile of rows and of columns, and goes
# through the blocks in steps.
_TOKEN_TILE, _MIXING_ROWS, _MIXING_COLUMNS, _MIXING_STEP = 64, 64, 128, 32


@dataclass(frozen=True)
class Stage:
    """One kernel.

    Attributes:
        name: What it computes.
        reads: Names of tensors.
        writes: Names of tensors.
        products: Operations of matrix products, by precision.
        requests: How often tensors are read from L2, where it is not once.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    products: dict[str, float] = field(default_factory=dict)
    requests: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A shape with the options that change bytes or operations; tokens are bfloat16.

    Attributes:
        shape: The sizes.
        normalizer: `"query"` or `"none"`.
        per_head: Whether every head has mixing weights of its own.
        features: Features for each channel of a head: 2 for hedgehog, 1 otherwise.
        gate: Whether the fused path ends with an output norm and a gate.
        rotary: Whether the fused path rotates queries and keys.
        norms: Whether the fused path begins with norms of queries and keys.
    """

    shape: OperatorShape
    normalizer: str = "none"
    per_head: bool = False
    features: int = 1
    gate: bool = True
    rotary: bool = True
    norms: bool = True

    def bytes_of(self, tensor: str, training: bool) -> float:
        """Bytes of a tensor; summaries are bfloat16 in the forward pass and float32 in the backward pass."""
        shape = self.shape
        blocks, tokens = shape.layout().num_blocks, shape.batch * shape.tokens
        if tensor in SUMMARIES:
            return shape.rows * blocks * self.features * shape.width**2 * (4 if training else 2)
        sizes = {
            "z": 4 * shape.rows * blocks * self.features * shape.width,
            "d": 4 * tokens * shape.heads,
            "1/rms": 4 * tokens,
            "m": 4 * blocks**2 * (shape.heads if self.per_head else 1),
            # The cosine and the sine of a pair of channels side by side, in float16.
            "table": 2 * shape.tokens * shape.width,
        }
        return sizes.get(
            tensor.removeprefix("d") if tensor in ("dm", "dz") else tensor, tokens * shape.heads * shape.width * 2
        )

    def token_products(self, left: int | None = None, right: int | None = None) -> float:
        """Operations of a product of every slot's row with a matrix `[left, right]`, the features by V by default."""
        shape, table = self.shape, self.shape.layout().token_table("cpu")
        slots = _padded_to(table.shape[1], min(_TOKEN_TILE, _power_of_two(table.shape[1])))
        left = self.features * shape.width if left is None else left
        right = shape.width if right is None else right
        return 2 * shape.rows * table.shape[0] * slots * _power_of_two(left) * _power_of_two(right)

    def mixing_tiles(self) -> tuple[int, int, int]:
        """Tiles of rows of the mixing weights, rows and columns of the weights with their padding."""
        blocks = self.shape.layout().num_blocks
        rows = min(_MIXING_ROWS, max(16, _power_of_two(blocks)))
        return -(-blocks // rows), _padded_to(blocks, rows), _padded_to(blocks, _MIXING_STEP)

    def mixing_products(self) -> float:
        """Operations of mixing all summaries once, half of them where attention is causal."""
        _, rows, inner = self.mixing_tiles()
        total = 2 * self.shape.rows * rows * inner * self.features * self.shape.width**2
        return total / 2 if self.shape.causal else total

    def mixing_requests(self, summaries: str) -> dict[str, float]:
        """How often a mixing stage reads summaries and weights: each tile of rows and each tile of columns anew."""
        tiles, rows, inner = self.mixing_tiles()
        columns = -(-self.features * self.shape.width**2 // _MIXING_COLUMNS)
        # Four bytes a weight: two halves in bfloat16, or float32.
        weights = 4 * self.shape.rows * columns * rows * inner / self.bytes_of("m", False)
        if self.shape.causal:
            return {summaries: (tiles + 1) / 2, "m": weights / 2}
        return {summaries: tiles, "m": weights}

    def gradient_requests(self) -> dict[str, float]:
        """How often the gradient of mixing weights reads both kinds of summaries: each tile of a pair anew."""
        tiles, *_ = self.mixing_tiles()
        times = (tiles + 1) / 2 if self.shape.causal else tiles
        return {"dS̃": times, "S": times}

    def memory(self, stage: Stage, training: bool, cached: bool) -> float:
        """Bytes of memory that a stage moves, without summaries if they are `cached` in L2."""
        moved = [name for name in (*stage.reads, *stage.writes) if not (cached and name in SUMMARIES)]
        return sum(self.bytes_of(name, training) for name in moved)

    def requested(self, stage: Stage, training: bool) -> float:
        """Bytes that the programs of a stage request from L2, and write."""
        # Every head reads the whole rotary table.
        times = {"table": self.shape.heads, **stage.requests}
        reads = sum(times.get(name, 1) * self.bytes_of(name, training) for name in stage.reads)
        return reads + sum(self.bytes_of(name, training) for name in stage.writes)

    def seconds(self, stage: Stage, training: bool, cached: bool) -> float:
        """Least time of a stage."""
        return max(
            self.memory(stage, training, cached) / MEMORY_RATE,
            self.requested(stage, training) / CACHE_RATE,
            sum(count / PRODUCT_RATES[precision] for precision, count in stage.products.items()),
        )


def _padded_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _divides(problem: Problem, *names: str) -> tuple[str, ...]:
    """Names of tensors that there are with a normaliser only."""
    return names if problem.normalizer != "none" else ()


def block_forward(problem: Problem) -> list[Stage]:
    """Forward pass of the operator, with and without gradients."""
    z, d = _divides(problem, "z"), _divides(problem, "d")
    tokens = {"bf16": problem.token_products()}
    # Weights of 16 bits are two bfloat16 numbers.
    mixing = {"bf16": 2 * problem.mixing_products()}
    return [
        Stage("summaries, S_b = Σ φ(k) vᵀ", ("k", "v"), ("S", *z), tokens),
        Stage("mixing, S̃_i = Σ m_ib S_b", ("S", "m", *z), ("S̃", *z), mixing, problem.mixing_requests("S")),
        Stage("outputs, o = φ(q)ᵀ S̃", ("q", "S̃", *z), ("o", *d), tokens),
    ]


def block_backward(problem: Problem) -> list[Stage]:
    """Backward pass of the operator, which computes the summaries again, in float32."""
    tokens, mixing = {"tf32": problem.token_products()}, {"tf32": problem.mixing_products()}
    plain = {"bf16": problem.token_products()}
    z, d = _divides(problem, "z"), _divides(problem, "d")
    return [
        Stage("summaries again", ("k", "v"), ("S", *z), plain),
        Stage("mixing again", ("S", "m", *z), ("S̃", *z), mixing, problem.mixing_requests("S")),
        Stage("gradient of q: S̃ do", ("do", "S̃", *_divides(problem, "q", "z", "d")), ("dq", *d), tokens),
        Stage("gradient of S̃: Σ q doᵀ", ("q", "do", *d, *d), ("dS̃", *z), tokens if d else plain),
        Stage("gradient of m: dS̃_i · S_b", ("dS̃", "S"), ("dm",), mixing, problem.gradient_requests()),
        Stage("gradient of S: Σ m_ib dS̃_i", ("dS̃", "m", *z), ("dS", *z), mixing, problem.mixing_requests("dS̃")),
        Stage("gradient of k: dS v", ("v", "dS", *z), ("dk",), tokens),
        Stage("gradient of v: dSᵀ k", ("k", "dS"), ("dv",), tokens),
    ]


def causal_forward(problem: Problem) -> list[Stage]:
    """Forward pass of causal attention in chunks."""
    z, d = _divides(problem, "z"), _divides(problem, "d")
    tokens, mixing = problem.token_products(), 2 * problem.mixing_products()
    within = 2 * problem.token_products(problem.shape.chunk, problem.shape.width)
    return [
        Stage("summaries", ("k", "v"), ("S", *z), {"bf16": tokens}),
        Stage("mixing", ("S", "m", *z), ("S̃", *z), {"bf16": mixing}, problem.mixing_requests("S")),
        Stage("outputs", ("q", "k", "v", "S̃", *z), ("o", *d), {"bf16": tokens + within}),
    ]


def fused_forward(problem: Problem) -> list[Stage]:
    """Forward pass from the projections to the input of the output projection."""
    rows, gate = _fused_parts(problem)
    products = {"bf16": problem.token_products()}
    summaries, mixing, outputs = block_forward(problem)
    ending = ", norm, gate" if gate else ""
    stages = [
        Stage("norm, map, rotate, summaries", ("k", "v", *rows), summaries.writes, products),
        mixing,
        Stage(
            "norm, map, rotate, outputs" + ending, ("q", *outputs.reads[1:], *gate, *rows), outputs.writes, products
        ),
    ]
    return [*_norms(problem), *stages]


def fused_backward(problem: Problem) -> list[Stage]:
    """Backward pass of [`fused_forward`], which computes everything between projections and output again."""
    rows, gate = _fused_parts(problem)
    half, full = {"bf16": problem.token_products()}, {"tf32": problem.token_products()}
    mixing = {"tf32": problem.mixing_products()}
    z, d = _divides(problem, "z"), _divides(problem, "d")
    stages = [
        Stage("summaries again", ("k", "v", *rows), ("S", *z), half),
        Stage("mixing again", ("S", "m", *z), ("S̃", *z), mixing, problem.mixing_requests("S")),
    ]
    if gate:
        reads = ("q", "S̃", *z, "gate", "do", *rows)
        stages.append(Stage("outputs again, gradients of gate and output norm", reads, ("dô", "dgate"), full))
    stages += [
        Stage("gradient of normed q", ("q", "dô", "S̃", *z, *rows), ("dn", *d, *d), full),
        Stage("gradient of S̃", ("q", "dô", *d, *d, *rows), ("dS̃", *z), full if d else half),
        Stage("gradient of m", ("dS̃", "S"), ("dm",), mixing, problem.gradient_requests()),
        Stage("gradient of S", ("dS̃", "m", *z), ("dS", *z), mixing, problem.mixing_requests("dS̃")),
        Stage("gradient of v", ("k", "dS", *rows), ("dv",), full),
        Stage("gradient of normed k", ("k", "v", "dS", *z, *rows), ("dn",), full),
    ]
    if problem.norms:
        stages.append(_THROUGH_NORMS)
    return stages


def hedgehog_forward(problem: Problem) -> list[Stage]:
    """Forward pass with hedgehog features, which pass through no memory; norm of the output and gate are torch's."""
    rows, _ = _fused_parts(problem)
    width = problem.shape.width
    # Summaries are wider than a program's tile of 128 x 128, and each tile of their columns makes the features anew.
    tiles = max(1, problem.features * width * width // 128**2)
    products = {"bf16": problem.token_products() + tiles * problem.token_products(width, width)}
    again = {"q": tiles, "k": tiles, "table": tiles * problem.shape.heads}
    summaries, mixing, outputs = block_forward(problem)
    return [
        *_norms(problem),
        Stage("norm, rotate, map, summaries", (*summaries.reads, *rows), summaries.writes, products, again),
        mixing,
        Stage("norm, rotate, map, outputs", (*outputs.reads, *rows), outputs.writes, products, again),
    ]


def hedgehog_backward(problem: Problem) -> list[Stage]:
    """Backward pass of [`hedgehog_forward`]: that of the operator between the features and back through them."""
    rows, _ = _fused_parts(problem)
    width = problem.shape.width
    once = {"bf16": 2 * problem.token_products(width, width)}
    thrice = {"bf16": 6 * problem.token_products(width, width)}
    wide = {"q": "φ(q)", "k": "φ(k)", "dq": "dφ(q)", "dk": "dφ(k)"}
    between = [
        replace(
            stage,
            name=stage.name.replace("of q:", "of φ(q):").replace("of k:", "of φ(k):"),
            reads=tuple(wide.get(name, name) for name in stage.reads),
            writes=tuple(wide.get(name, name) for name in stage.writes),
        )
        for stage in block_backward(problem)
    ]
    stages = [
        Stage("features again", ("q", "k", *rows), ("φ(q)", "φ(k)"), once),
        *between,
        Stage("gradients of normed q and k, and of W", ("q", "k", "dφ(q)", "dφ(k)", *rows), ("dn", "dn"), thrice),
    ]
    return [*stages, _THROUGH_NORMS] if problem.norms else stages


_THROUGH_NORMS = Stage("through both norms", ("q", "k", "dn", "dn", "1/rms", "1/rms"), ("dq", "dk"))


def _norms(problem: Problem) -> list[Stage]:
    reads, writes = ("q", "k"), ("1/rms", "1/rms")
    return [Stage("norms of q and k: 1 / rms of each token", reads, writes)] if problem.norms else []


def _fused_parts(problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a stage reads beside tokens to make features of them, and the gate."""
    rows = (*(("table",) if problem.rotary else ()), *(("1/rms",) if problem.norms else ()))
    return rows, ("gate",) if problem.gate else ()
