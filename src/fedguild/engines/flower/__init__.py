"""The `flower` engine: real clients over the network, Flower carries the messages.

`adapter` is the only module that imports flwr. On the server, `engine` moves a round's tasks out and
its deliveries back, and `roster` knows which node is which client. On a client's machine a short-lived
process of Flower hands each message over `link` to a long-lived trainer, which keeps the backbone.
"""
