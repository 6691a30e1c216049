"""Mixture-of-experts layers: sorting tokens by expert, products of all experts in one call, exchanges in a ring."""
