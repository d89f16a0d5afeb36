"""Stage 5 of 9: wire. What crosses a client's boundary: payloads, their bytes, and the count of them."""
