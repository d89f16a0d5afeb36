"""Stage 4 of 9: client. Local training of a cohort of clients in one forward and backward pass."""
