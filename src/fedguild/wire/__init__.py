"""Stage 5 of 9: wire. Payloads at a client's boundary: their encoding, and the count of their bytes."""
