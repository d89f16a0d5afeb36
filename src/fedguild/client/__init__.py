"""Local training of a cohort of clients in one forward and backward pass."""
