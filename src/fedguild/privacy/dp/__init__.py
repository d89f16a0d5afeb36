"""Differential privacy without a model: accounting, keyed noise, clipping, ledgers and the site's secret.

Used by `client.private_training` (DP-SGD), `client.privacy_rules`, `server.private_mean` and `engines.private`. The
decisions are in docs/decisions/0015-differential-privacy.md.
"""
