"""The methods: names, what they compute, what they cost, where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from wavealign.errors import InputError, unknown_name
from wavealign.methods import params
from wavealign.methods.settings import Params


@dataclass(frozen=True)
class Method:
    """One method of the registry.

    Attributes:
        name: as given to ``--method``.
        params: its parameters.
        function: ``module:function`` below ``wavealign.methods``.
        needs_qk: whether it looks at Q and K; the others look at the token grid, or at nothing.
        formula: what it keeps.
        cost: per head, in L tokens, D elements, B tokens a block, S its stride.
        row_nnz: "constant" or "varying" K/V blocks per row.
        source: where it comes from.
        batched: ``module:function`` for all heads of a batch at once, where there is one; it gives
            None for inputs that go head by head.
    """

    name: str
    params: type[Params]
    function: str
    needs_qk: bool
    formula: str
    cost: str
    row_nnz: str
    source: str
    batched: str | None = None

    def settings(self, params: Params | None) -> Params:
        """The parameters that are given, or the method's defaults.

        Raises:
            InputError: they are another method's.
        """
        if params is not None and not isinstance(params, self.params):
            told = f"{self.params.__name__}, not {type(params).__name__}"
            raise InputError(f"{self.name} takes {told}.")
        return params if params is not None else self.params()


METHODS = {
    method.name: method
    for method in (
        Method(
            "xattention", params.XAttention, "xattention:xattention", True,
            "top-p of antidiagonal sums of S x S cells, softmax over cells",
            "2·L²·D/S flops, L²/S² exponentials", "varying",
            "XAttention, arXiv 2503.16428; mit-han-lab/x-attention", "xattention:xattention_heads",
        ),
        Method(
            "spargeattn", params.SpargeAttn, "spargeattn:spargeattn", True,
            "top-k or cdf of softmax between block means; dense where rows disagree",
            "L·D + 2·L²·D/B² flops", "constant (top-k), varying (cdf)",
            "SpargeAttention, arXiv 2502.18137; thu-ml/SpargeAttn",
        ),
        Method(
            "flexprefill", params.FlexPrefill, "flexprefill:flexprefill", True,
            "vertical and slash lines that cover γ, or query-aware blocks, by head",
            "2·B·L·D + 2·L²·D/B² flops", "varying",
            "FlexPrefill, arXiv 2502.20766; ByteDance-Seed/FlexPrefill",
        ),
        Method(
            "minference", params.MInference, "minference:minference", True,
            "vertical and slash lines, an A-shape, or top-k of pooled scores",
            "128·L·D flops; block-sparse 2·L²·D/B²", "nearly constant",
            "MInference, arXiv 2407.02490; microsoft/MInference",
        ),
        Method(
            "exact", params.Exact, "exact:exact", True,
            "top-p (GSRS) or top-k (AdaSpa) of the true attention mass",
            "2·L²·D flops, L² exponentials", "varying (top-p), constant (top-k)",
            "AdaSpa, arXiv 2502.21079; GSRS",
        ),
        Method(
            "random", params.Random, "static:random", False,
            "blocks at random: the floor of locality", "M·N log N", "as asked (spread)",
            "WaveAlign's control",
        ),
        Method(
            "window", params.Window, "static:window", False,
            "tiles near the query's tile in time, height and width",
            "tiles²", "constant for tiles of one block",
            "Sliding Tile Attention, arXiv 2502.04507; hao-ai-lab/FastVideo",
        ),
        Method(
            "radial", params.Radial, "static:radial", False,
            "a window that narrows with the distance between frames",
            "L²/B", "varying",
            "Radial Attention, arXiv 2506.19852; mit-han-lab/radial-attention",
        ),
    )
}  # fmt: skip


def find_method(name: str) -> Method:
    """The method of this name.

    Raises:
        InputError: there is none, with the nearest name.
    """
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]
