"""Policy search: trials, spaces, the store that keeps them, and what runs them."""
