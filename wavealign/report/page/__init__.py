"""One self-contained HTML page about many runs."""
