"""Rounds: sampling, validation, aggregation and checkpoints."""
