"""Secure aggregation: the protocol by which a server learns the sum of its clients' numbers, and none of the numbers.

K. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017 (section 4 and
figure 4); for many clients with the sparse graph of J. H. Bell et al., "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead", CCS 2020. docs/decisions/0014-secure-aggregation.md has the messages and the threat model.

The package has no transport: a `ClientSession` and a `ServerSession` exchange named arrays, whether a simulation in one
process or Flower carries them. Nothing here uses torch.
"""
