"""Stage 6 of 9: server. Rounds: sampling, validation, aggregation, checkpoints and records."""
