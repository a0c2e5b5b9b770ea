"""What the book runs: one module per study, and nothing imports them."""
