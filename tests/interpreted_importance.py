"""Run by test_importance in a process of its own: the Triton kernels on CPU tensors."""

import interpreter  # noqa: F401, I001 (before anything that imports triton)

from importance_cases import CASES

for case in CASES:
    if problem := case.check("cpu", "triton"):
        print(f"{case.name}: {problem}")
print("done")
