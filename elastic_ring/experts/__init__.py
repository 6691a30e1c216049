"""Mixture-of-experts layers: who computes which token, where, and all experts' products in one call."""
