"""Training of the packaged model `embedded`, a very small OLMoE, from nothing but a seed."""
