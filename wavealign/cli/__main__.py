"""``python -m wavealign.cli``."""

from wavealign.cli import main

main()
