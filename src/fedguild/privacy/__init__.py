"""Differential privacy (`dp`) and secure aggregation (`secure_sum`), without a model."""
