"""What each method can be told: frozen dataclasses with upstream's defaults and their source.

Nothing here needs torch, so that listing the methods doesn't either. Where upstream does
something by accident, an option names it, and upstream's behaviour is the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wavealign.errors import InputError
from wavealign.methods.settings import Params

TOP_P = ("inclusive", "exclusive")
"""Whether the block that crosses the threshold is kept."""


@dataclass(frozen=True)
class XAttention(Params):
    """XAttention; defaults of its video evaluation.

    Attributes:
        threshold: τ, the share of a row's antidiagonal mass that is kept (upstream: 0.9 and
            0.95 for HunyuanVideo).
        stride: S, the side of the cells whose antidiagonal is summed (upstream: 8 for video,
            16 elsewhere).
        block: tokens per query and K/V block (upstream: 128).
        norm: divides the scores once more (upstream: 1).
        pad_to: upstream pads Q and K with zeros to a multiple of this many tokens; 0 is its
            rule, a power of two near 2²⁸ / L, at least 2048.
        padded_keys: upstream's accident, non-causal only: the zero keys of the padding take
            part in the softmax.
        forced_column: upstream's accident: K/V block 0 is kept in every row, because
            rejected ranks are written there.
        top_p: "inclusive" upstream: the block that crosses τ is kept.
        causal: only blocks up to the diagonal, which is kept together with block 0.
        loose_first_chunk: upstream's accident, causal only: in the first `pad_to` tokens a row
            keeps one block more than its share asks for.

    Raises:
        InputError: a value out of its range.
    """

    threshold: float = 0.9
    stride: int = 8
    block: int = 128
    norm: float = 1.0
    pad_to: int = 0
    padded_keys: bool = True
    forced_column: bool = True
    top_p: str = "inclusive"
    causal: bool = False
    loose_first_chunk: bool = True

    def _check(self) -> None:
        self._share("threshold")
        self._least(1, "stride", "block")
        self._one_of("top_p", TOP_P)
        if self.block % self.stride:
            raise InputError(f"stride {self.stride} doesn't divide the block of {self.block}.")
        self._factor("norm")
        whole = self.pad_to >= 0 and self.pad_to % self.block == 0
        self._expect("pad_to", whole, f"a multiple of the block of {self.block}, or 0")


@dataclass(frozen=True)
class SpargeAttn(Params):
    """SpargeAttn; defaults of the recommended top-k interface.

    Attributes:
        select: "top-k" or "cdf".
        topk: share of the K/V blocks of a row that is kept (upstream: 0.5).
        cdf: share of the pooled attention of a row that is kept (upstream: 0.98; 0.9 in the
            function's own default).
        similarity: θ; a block whose rows resemble each other less is computed densely
            (upstream: -0.1 with top-k, 0.6 with cdf).
        block_q: tokens per query block (upstream: 128, but 64 on Hopper).
        block_kv: tokens per K/V block (upstream: 64, but 128 on Hopper).
        smooth_k: subtract the mean key first (upstream: yes).
        dense_tail: upstream's accident: a ragged last block counts as not similar, which
            makes its row and column dense.
        top_p: of cdf; "exclusive" upstream: the block that crosses the share is dropped.
        sink: keep K/V block 0 (upstream: no).
        score_dtype: "input" upstream: pooled scores have the dtype of Q; or "float32".
        causal: only blocks up to the diagonal.

    Raises:
        InputError: a value out of its range.
    """

    select: str = "top-k"
    topk: float = 0.5
    cdf: float = 0.98
    similarity: float = -0.1
    block_q: int = 128
    block_kv: int = 64
    smooth_k: bool = True
    dense_tail: bool = True
    top_p: str = "exclusive"
    sink: bool = False
    score_dtype: str = "input"
    causal: bool = False

    def _check(self) -> None:
        self._one_of("select", ("top-k", "cdf"))
        self._one_of("top_p", TOP_P)
        self._one_of("score_dtype", ("input", "float32"))
        self._share("topk", "cdf")
        self._least(1, "block_q", "block_kv")
        self._expect("similarity", -1 <= self.similarity <= 1, "-1 to 1, a cosine")


REPRESENTATIVES = ("auto", "last", "strided")


@dataclass(frozen=True)
class FlexPrefill(Params):
    """FlexPrefill; defaults of its README.

    Attributes:
        gamma: γ, the share of attention to cover (upstream: 0.9; 0.95 for best quality).
        tau: a head is query-specific where the pooled estimate is closer than this to the
            true distribution, as the root of the Jensen-Shannon divergence (upstream: 0.1).
        min_budget: fewest tokens of verticals and of slashes each (upstream: 512).
        max_budget: most tokens of each; 0 for no limit (upstream).
        block: tokens per query and K/V block, and the number of representative queries
            (upstream: 128).
        representative: "last" upstream: the last `block` queries; "strided": as many, evenly
            spread; "auto": last where causal, strided where not.
        causal: upstream has no other form; without it slashes have a sign.

    Raises:
        InputError: a value out of its range.
    """

    gamma: float = 0.9
    tau: float = 0.1
    min_budget: int = 512
    max_budget: int = 0
    block: int = 128
    representative: str = "auto"
    causal: bool = False

    def _check(self) -> None:
        self._share("gamma")
        self._share("tau", zero=True)
        self._least(1, "min_budget", "block")
        self._one_of("representative", REPRESENTATIVES)
        if self.max_budget and self.max_budget < self.min_budget:
            raise InputError(
                f"max_budget {self.max_budget} is below min_budget {self.min_budget}; expected 0 "
                "(no limit) or more."
            )


@dataclass(frozen=True)
class MInference(Params):
    """MInference, one of its three patterns; defaults are upstream's fallback for any head.

    Attributes:
        pattern: "vertical-slash", "a-shape" or "block-sparse".
        verticals: columns that are kept, in tokens (upstream: 1000).
        slashes: diagonals that are kept, in tokens (upstream: 6096).
        sink: first columns always among them (upstream: 30).
        band: nearest diagonals always among them (upstream: 100).
        queries: representative queries (upstream: 64).
        representative: as for FlexPrefill.
        n_init: a-shape: first keys that every query reads (upstream: 128).
        n_local: a-shape: width of the sliding window (upstream: 3968).
        topk: block-sparse: K/V blocks a row (upstream: 100); 0 to use `ratio`.
        ratio: block-sparse: share of the K/V blocks a row, where `topk` is 0 (0.3 to 0.7 in
            SpargeAttn's comparison on video).
        padded_mean: upstream's accident: the mean of a ragged last block counts its padding.
        block: tokens per query and K/V block (upstream: 64).
        causal: upstream has no other form; without it slashes have a sign.

    Raises:
        InputError: a value out of its range.
    """

    pattern: str = "vertical-slash"
    verticals: int = 1000
    slashes: int = 6096
    sink: int = 30
    band: int = 100
    queries: int = 64
    representative: str = "auto"
    n_init: int = 128
    n_local: int = 3968
    topk: int = 100
    ratio: float = 0.5
    padded_mean: bool = True
    block: int = 64
    causal: bool = False

    def _check(self) -> None:
        self._one_of("pattern", ("vertical-slash", "a-shape", "block-sparse"))
        self._one_of("representative", REPRESENTATIVES)
        self._least(1, "verticals", "slashes", "queries", "n_local", "block")
        self._share("ratio")
        self._least(0, "sink", "band", "n_init", "topk")


@dataclass(frozen=True)
class Exact(Params):
    """True attention mass per block: what the estimates aim at.

    Attributes:
        select: "top-p" (GSRS) or "top-k" (AdaSpa).
        mass: share of a row's attention that is kept (GSRS: 0.95 falling to 0.80).
        topk: share of the K/V blocks of a row that is kept (AdaSpa: 0.2).
        top_p: "inclusive" in GSRS: kept until the sum exceeds the share.
        dense_text: rows and columns of text tokens are dense (AdaSpa).
        block: tokens per query and K/V block.
        causal: softmax over keys up to the query only.
    """

    select: str = "top-p"
    mass: float = 0.9
    topk: float = 0.2
    top_p: str = "inclusive"
    dense_text: bool = True
    block: int = 128
    causal: bool = False

    def _check(self) -> None:
        self._one_of("select", ("top-p", "top-k"))
        self._one_of("top_p", TOP_P)
        self._share("mass", "topk")
        self._least(1, "block")


@dataclass(frozen=True)
class Random(Params):
    """Random blocks: the floor of locality.

    Attributes:
        density: mean share of kept blocks.
        spread: standard deviation of a row's NNZ / its mean.
        block_q: tokens per query block.
        block_kv: tokens per K/V block.

    Raises:
        InputError: a value out of its range.
    """

    density: float = 0.35
    spread: float = 0.0
    block_q: int = 128
    block_kv: int = 128

    def _check(self) -> None:
        self._share("density")
        self._least(1, "block_q", "block_kv")
        self._expect("spread", 0 <= self.spread <= 2, "0 to 2")


@dataclass(frozen=True)
class Window(Params):
    """A sliding window of tiles over frames, rows and columns of the video (STA).

    Attributes:
        tile: tokens of a tile in time, height and width (upstream: 6x8x8).
        window: tiles that a query tile sees in each direction, clamped at the borders
            (upstream: searched per head, 3x3x3 among others).
        dense_text: rows and columns of text tokens are dense.
        block: tokens per query and K/V block; a block is kept where any of its tokens is.

    Raises:
        InputError: a value out of its range.
    """

    tile: tuple[int, int, int] = (6, 8, 8)
    window: tuple[int, int, int] = (3, 3, 3)
    dense_text: bool = True
    block: int = 128

    def _check(self) -> None:
        self._least(1, "block")
        for name in ("tile", "window"):
            sizes = getattr(self, name)
            self._expect(name, len(sizes) == 3 and min(sizes) >= 1, "three sizes of at least 1")


@dataclass(frozen=True)
class RadialModel:
    """What upstream's scripts and masks have for a model; for the attributes see `Radial`."""

    decay: float
    block: int
    sink: bool


RADIAL_MODELS = {
    "wan2.2": RadialModel(0.8, 64, True),
    "wan": RadialModel(0.2, 128, True),
    "hunyuan": RadialModel(0.95, 128, False),
}

_OF_THE_MODEL: Any = None  # a default until `Radial` knows the model


@dataclass(frozen=True)
class Radial(Params):
    """Radial Attention: a window that narrows with the distance in time.

    The pattern is that of upstream's code, https://github.com/mit-han-lab/radial-attention at
    commit 72788d4 (2025-11-11). There the first layers and steps are dense as well, which is no
    matter of the mask. Earlier code differs: before that commit Wan's window at distance 1 was
    half a frame each way, not a whole one, and before commit 2f61c30 (2025-07-06) HunyuanVideo had
    the sink, too. So does the paper (https://arxiv.org/abs/2506.19852): it has the sink for every
    model, neither a decay nor a narrowest window, and below a width of one token it leaves out
    diagonals, where the code leaves out pairs of frames below 128 tokens.

    Attributes:
        decay: factor of the window's width; None for the model's (wan 0.2, wan2.2 0.8, hunyuan
            0.95, as upstream's scripts have it).
        model: "wan" (Wan2.1), "wan2.2" or "hunyuan" (HunyuanVideo): upstream has no others.
        sink: frame 0 is read by every query; None for the model's (Wan yes, HunyuanVideo no).
        dense_tail: upstream's accident: a ragged last block of video is dense, row and column.
        dense_text: rows and columns of text tokens are dense (upstream: yes).
        block: tokens per query and K/V block, and the narrowest window; None for the model's (128;
            wan2.2 64).
        cut_frames: upstream's accident: a frame counts in no more blocks than it would fill from
            a block's beginning. One that begins inside a block and ends in one more doesn't count
            in that last one, which the next frame shares.

    Raises:
        InputError: a value out of its range, or a model that upstream doesn't have.
    """

    decay: float = _OF_THE_MODEL
    model: str = "wan"
    sink: bool = _OF_THE_MODEL
    dense_tail: bool = True
    dense_text: bool = True
    block: int = _OF_THE_MODEL
    cut_frames: bool = True

    def __post_init__(self) -> None:
        self._one_of("model", tuple(RADIAL_MODELS))
        for name, value in vars(RADIAL_MODELS[self.model]).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    def _check(self) -> None:
        self._least(1, "block")
        self._factor("decay")
