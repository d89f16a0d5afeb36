"""Engines: they run the clients of a round. Methods come before them and never see them."""
