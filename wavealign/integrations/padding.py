"""How much of each sequence counts where text is padded behind the video.

A model says it with a mask over keys, the same for all its layers. As the tokens that count come
first, that mask is one length a sequence: reading it makes the host wait for the device, so it is
read once a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from wavealign.errors import InputError

# The number of a part, and its q, k and v ``[B, tokens, H, D]``.
PartAttention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Lengths:
    """Of the sequences of a call.

    Attributes:
        tokens: tokens of each that count: video, then text. The rest is padding.
        video_tokens: of all of them.
    """

    tokens: tuple[int, ...]
    video_tokens: int

    def parts(self) -> list[tuple[slice, int]]:
        """Which sequences are run together, and how many tokens of them: all, or one by one."""
        if len(set(self.tokens)) == 1:
            return [(slice(None), self.tokens[0])]
        return [(slice(b, b + 1), length) for b, length in enumerate(self.tokens)]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: PartAttention
    ) -> torch.Tensor:
        """Attention of ``[B, tokens, H, D]``, part after part, each without its padding.

        Rows of padding are zero: no other row ever reads them.

        Args:
            q, k, v: ``[B, tokens, H, D]``, padding included.
            function: attention of one part, given its number, q, k and v.
        """
        parts = self.parts()
        if parts == [(slice(None), q.shape[1])]:
            return function(0, q, k, v)
        out = torch.empty_like(q)
        for i, (own, tokens) in enumerate(parts):
            out[own, :tokens] = function(i, *(t[own, :tokens] for t in (q, k, v)))
            out[own, tokens:] = 0
        return out


class Padding:
    """The lengths that a model's padding masks say; those of a forward's first layer are kept.

    Not for longer: a mask's memory may have been rewritten since, and torch doesn't see every way.
    """

    def __init__(self) -> None:
        # Replaced as a whole, so that no thread finds another's counts beside its own mask.
        self._read_last: tuple[torch.Tensor | None, int, int, tuple[int, ...]] = (None, 0, 0, ())

    def __reduce__(self) -> tuple[type[Padding], tuple[()]]:
        return Padding, ()  # a copy has read nothing yet

    def lengths(
        self, mask: torch.Tensor | None, batch: int, video_tokens: int, text_tokens: int,
        layer: int = 0,
    ) -> Lengths:  # fmt: skip
        """From a mask over all keys, or over those of the text.

        Args:
            mask: true where a key counts, bool or integers, ``[B, keys]`` or ``[B, 1, 1, keys]``;
                None: all count.
            batch: B.
            video_tokens: at the front of each sequence.
            text_tokens: behind them, padding included.
            layer: that asks, from 0 in each forward.

        Raises:
            InputError: a mask of another kind, or one that hides more than the end of the text.
        """
        if mask is None:
            return Lengths((video_tokens + text_tokens,) * batch, video_tokens)
        keys = mask.shape[-1]
        flat = (batch, keys)
        if tuple(mask.shape) not in (flat, (batch, 1, 1, keys)) or (
            keys not in (text_tokens, video_tokens + text_tokens)
        ):
            raise InputError(
                f"an attention mask {list(mask.shape)} for {batch} sequences of {video_tokens} "
                f"video and {text_tokens} text tokens; expected one over keys, [B, keys] or "
                "[B, 1, 1, keys], of all tokens or of the text."
            )
        if mask.is_floating_point():
            raise InputError(f"an attention mask of {mask.dtype}; expected bool: which keys count.")
        before = video_tokens if keys == text_tokens else 0
        lengths = tuple(before + count for count in self._read(mask.reshape(flat), mask, layer))
        if min(lengths) < video_tokens:
            raise InputError(
                f"the attention mask leaves {min(lengths)} tokens of a sequence with "
                f"{video_tokens} tokens of video; expected only text to be padding."
            )
        return Lengths(lengths, video_tokens)

    def _read(self, flat: torch.Tensor, mask: torch.Tensor, layer: int) -> tuple[int, ...]:
        # An inference tensor doesn't count its changes; diffusers makes a mask each forward.
        version = 0 if mask.is_inference() else mask._version
        last, last_version, last_layer, known = self._read_last
        if mask is last and version == last_version and layer > last_layer:
            self._read_last = mask, version, layer, known
            return known
        counts = (flat != 0).sum(-1)
        prefix = torch.arange(flat.shape[1], device=flat.device) < counts[:, None]
        wrong = ((flat != 0) != prefix).any(-1)
        found = torch.stack([counts, wrong]).tolist()
        if any(found[1]):
            raise InputError(
                f"the attention mask of sequence {found[1].index(1)} has gaps; expected the tokens "
                "that count first and padding behind them."
            )
        self._read_last = mask, version, layer, tuple(found[0])
        return tuple(found[0])
