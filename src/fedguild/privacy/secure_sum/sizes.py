"""Sizes of keys and secrets, for modules that need no cryptography."""

SIGNATURE_BYTES = 96
"""ECDSA over P-384 as r and s, 48 bytes each; one of Ed25519 has 64 and is filled with zeros."""
KEY_BYTES = 32
"""X25519's keys, and what is derived from a secret."""
SEED_BYTES = 16
"""Secrets that are shared have 128 bits, as Shamir's scheme in pycryptodome takes them."""
TAG_BYTES = 16
"""What ChaCha20-Poly1305 adds to an envelope."""
