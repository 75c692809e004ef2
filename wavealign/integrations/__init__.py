"""Other people's libraries: recording from them, and running inside them."""
