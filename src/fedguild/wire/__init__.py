"""Stage 5 of 9: wire. Encoding of payloads for the wire, and counts of their bytes."""
