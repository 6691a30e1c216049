"""Drills: break a run on this machine as the world would, and see what follows. No decisions about training."""
