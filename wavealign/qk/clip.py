"""Frames of a video file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wavealign._extras import require
from wavealign.errors import InputError


def read_frames(path: str | Path, count: int, step: int = 1) -> Iterator[npt.NDArray[np.uint8]]:
    """Every `step`-th frame of a clip, from the first, RGB uint8 ``(height, width, 3)``.

    Args:
        path: whatever FFmpeg decodes.
        count: how many frames to give.
        step: 1 for consecutive frames.

    Raises:
        InputError: no video, damaged, or shorter than ``1 + (count - 1) * step`` frames.
        MissingCapabilityError: PyAV isn't installed.
    """
    av = require("av", "video", "--clip")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file}: no such file.")
    if count < 1 or step < 1:
        raise InputError(f"{count} frames, every {step}th: expected at least 1 of each.")
    needed = 1 + (count - 1) * step
    seen = 0
    try:
        with av.open(str(file)) as container:
            if not container.streams.video:
                raise InputError(f"{file}: holds no video.")
            for frame in container.decode(video=0):
                if seen % step == 0:
                    yield frame.to_ndarray(format="rgb24")
                seen += 1
                if seen == needed:
                    return
    except av.error.FFmpegError as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"{file}: can't be decoded after {seen} frames ({reason}).") from problem
    raise InputError(
        f"{file}: has {seen} frames; {count} frames of tokens, every {step}th frame of the clip, "
        f"need {needed}. Ask for fewer, or for a smaller --clip-step."
    )
