"""Real kernels: backends, how a schedule is applied to them, correctness, timing, counters.

Nothing here imports the simulator; the two meet in the schedule that both execute and in the
result row that both produce. torch is imported by the modules that need it, on first use.
"""
