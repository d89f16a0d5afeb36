"""Stage 6 of 8: server. Rounds: sampling, validation, aggregation, checkpoints and records."""
