"""FLOPs, bytes, memory and parameters of a method, and the papers' published figures.

`flops` and `memory` count a client's training from the shapes of model and adapter; `traffic` counts payloads by
running a method's server half on shapes (`model.shapes_only`); `profile` combines them for the tiers of clients
(`tiers`) and the server (`server`), and `rows` flattens the result. `published` compares the papers' figures with ours.
"""
