"""Mixture-of-experts layers: who computes which token, and the products of all experts in one call. torch only."""

from elastic_ring.experts.compute import Products, grouped_linear
from elastic_ring.experts.order import Order

__all__ = ["Order", "Products", "grouped_linear"]
