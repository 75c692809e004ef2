"""Other people's libraries: recording from, and (later) running inside them."""
