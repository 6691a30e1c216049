"""Placement of members, copies and heals over nodes, failure domains and GPUs."""
