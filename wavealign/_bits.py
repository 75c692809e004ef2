"""What numba kernels of several rooms need of single bits."""

from numba import types
from numba.extending import intrinsic


@intrinsic
def popcount(typingctx, word):
    """Bits set in a uint64."""

    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen
