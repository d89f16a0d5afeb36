"""Engines, which train the clients of a round. Methods come before them and never depend on them."""
