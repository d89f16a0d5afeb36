"""The `flower` engine: real clients over the network, with Flower as the transport.

`adapter` is the only module that imports flwr. On the server, `engine` sends a round's tasks and receives its
deliveries, and `client_registry` knows which node is which client. On a client's machine, a short-lived process of
Flower forwards each message over `ipc` to a long-lived trainer, which keeps the backbone.
"""
