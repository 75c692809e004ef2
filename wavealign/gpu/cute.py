"""CuTe's compiler, which FlashAttention-4 and cuDNN's frontend share, works for one thread alone.

Two threads in it at once end the process (nvidia-cutlass-dsl 4, seen on an H200 with eight threads
on FlashAttention-4). It compiles at a first launch, so launches take turns; they only enqueue.
"""

from __future__ import annotations

from wavealign._locks import ForkSafeLock

CUTE = ForkSafeLock()
