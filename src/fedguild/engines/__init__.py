"""The engines: where the clients of a round run. After the methods, which never see them."""
